"""OpenAI's shapes, as requests bring them and answers carry them, with vLLM's extras.

Request fields are never null here: `parse.py` drops a null, which asks for the default. Answers are
written by msgspec, in the order of the fields; UNSET fields are left out.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

# Integers that travel over msgpack, and string keys that become token ids.
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenKey = Annotated[str, Meta(pattern=r"^(0|[1-9][0-9]{0,9})$")]

# ---------------------------------------------------------------- requests


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`include_obfuscation` pads OpenAI's own stream; it is accepted and does nothing here."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What both endpoints read. Meanings are those of `messages.SamplingParams`."""

    model: str = ""
    max_tokens: Int64 | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Int64 = 0
    min_p: float = 0.0
    n: Int64 = 1
    seed: Int64 | None = None
    stop: str | list[str] = []
    stop_token_ids: list[Int64] = []
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[TokenKey, float] = {}
    min_tokens: Int64 = 0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: Int64 | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Int64 = 0
    cache_salt: str = ""
    return_token_ids: bool = False


class FunctionCall(msgspec.Struct):
    """`arguments` is JSON in a string, as OpenAI has it."""

    name: str
    arguments: str = "{}"


class ToolCall(msgspec.Struct):
    """A call that an earlier turn made; only templates read it."""

    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"
    index: int | None = None


class ContentPart(msgspec.Struct):
    """One part of a message. Other types than text are refused by name in `chat.py`."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One turn. The last group is what clients send back with an assistant's own message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: Any = None
    audio: None = None
    function_call: None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    max_completion_tokens: Int64 | None = None
    logprobs: bool = False
    top_logprobs: Int64 | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions. `prompt` is homogeneous: texts, token ids, or lists of token ids."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Int64 | None = None
    echo: bool = False
    add_special_tokens: bool = True


class RoleRequest(msgspec.Struct):
    """POST /engines/{engine}/role."""

    role: Literal["prefill", "decode", "both"]


class TokenizeChatRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize with messages, rendered as /v1/chat/completions renders them."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    model: str = ""
    return_token_strs: bool = False


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize with a text."""

    prompt: str
    model: str = ""
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: str = ""


# ---------------------------------------------------------------- answers


class PromptTokensDetails(msgspec.Struct):
    """`cached_tokens` of the prompt were found in the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens of a whole request, over all its prompts and samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct):
    """One candidate. `token` is "bytes:\\xf0..." when it is only a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """The chosen token of one position, with the most likely ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities in chat's shape."""

    content: list[ChatTokenLogprob]


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities in columns. The first token of an echoed prompt has None."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []


class PromptLogprob(msgspec.Struct):
    """vLLM's shape of a prompt position's candidate, keyed by its token id."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class Delta(msgspec.Struct, omit_defaults=True):
    """What is new in a message."""

    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct):
    """A piece of one sample; `stop_reason` (vLLM's) comes with the finish_reason."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a chat stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class AssistantMessage(msgspec.Struct):
    """The answer's text."""

    role: str = "assistant"
    content: str = ""
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """One sample, whole."""

    index: int
    message: AssistantMessage = msgspec.field(default_factory=AssistantMessage)
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The answer of /v1/chat/completions."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionChoice(msgspec.Struct):
    """A sample of a text completion: a piece of it in a chunk, all of it in an answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """The answer of /v1/completions, and one event of its stream: OpenAI gives both one shape."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ErrorDetail(msgspec.Struct):
    """OpenAI's error object; the hint is the end of the message."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """Every answer that is not a 2xx, and the last event of a stream that failed."""

    error: ErrorDetail
