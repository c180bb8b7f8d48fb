"""POST /v1/chat/completions: messages to a prompt, a prompt to chunks, chunks to an answer."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from twostroke.api.errors import GenerationError
from twostroke.api.logprobs import chat_logprobs, prompt_logprobs
from twostroke.api.parse import parse
from twostroke.api.protocol import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    Delta,
    TokenizeChatRequest,
)
from twostroke.api.sampling import UsageCounter, sampling_params
from twostroke.api.state import ServerState, check_finish, request_ids
from twostroke.api.streaming import GenerationResponse, read_body
from twostroke.client.engine import RequestOutput
from twostroke.errors import RequestError, UnsupportedFieldError
from twostroke.messages import SamplingParams

MAX_TOP_LOGPROBS = 20
# What the server itself gives to `ChatTemplate.render`, which refuses its own variables.
_OUR_VARIABLES = frozenset(("add_generation_prompt", "tools"))


async def chat_completions(state: ServerState, request: Request) -> Response:
    """Answer a chat, streamed or not."""
    ask = parse(await read_body(request, state.max_body_bytes), ChatRequest)
    model = state.served_name(ask.model)
    params = _params(ask)
    state.require_ready()
    prompt_token_ids = await encode_chat(state, ask, state.engine.max_request_tokens)
    request_id, unique_id = request_ids(request)
    chat = _Chat(
        state=state,
        ask=ask,
        params=params,
        prompt_token_ids=prompt_token_ids,
        response_id=f"chatcmpl-{unique_id}",
        model=model,
    )
    return GenerationResponse(chat.chunks(), None if ask.stream else fold, request_id)


def _params(ask: ChatRequest) -> SamplingParams:
    given = {ask.max_tokens, ask.max_completion_tokens} - {None}
    if len(given) == 2:
        raise RequestError(
            f"max_tokens is {ask.max_tokens} and max_completion_tokens "
            f"{ask.max_completion_tokens}; they mean the same",
            param="max_tokens",
            hint="send only one",
        )
    top = ask.top_logprobs
    if top is not None and not ask.logprobs:
        raise RequestError(
            "top_logprobs needs logprobs", param="top_logprobs", hint="set logprobs to true"
        )
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise RequestError(
            f"top_logprobs is {top}; it must be at least 0 and at most {MAX_TOP_LOGPROBS}",
            param="top_logprobs",
        )
    return sampling_params(
        ask,
        max_tokens=given.pop() if given else None,
        logprobs=(top or 0) if ask.logprobs else None,
        prompt_logprobs=ask.prompt_logprobs,
    )


# ---------------------------------------------------------------- messages -> prompt


async def encode_chat(
    state: ServerState, ask: ChatRequest | TokenizeChatRequest, max_tokens: int | None = None
) -> list[int]:
    """The token ids that the model sees for `ask.messages`; see `Tokenizer.encode_async`."""
    text = _render(state, ask)
    return await state.tokenizer.encode_async(
        text, add_special_tokens=ask.add_special_tokens, max_tokens=max_tokens
    )


def _render(state: ServerState, ask: ChatRequest | TokenizeChatRequest) -> str:
    if state.chat_template is None:
        raise RequestError(
            f"the model {state.model_name} has no chat template",
            param="messages",
            hint="use /v1/completions, or restart with --chat-template FILE",
        )
    if taken := _OUR_VARIABLES & ask.chat_template_kwargs.keys():
        name = min(taken)
        raise RequestError(
            f"chat_template_kwargs cannot set {name}", param=f"chat_template_kwargs.{name}"
        )
    continues = ask.continue_final_message
    if continues and ask.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    messages = [_template_message(i, message) for i, message in enumerate(ask.messages)]
    text = state.chat_template.render(
        messages,
        add_generation_prompt=not continues and ask.add_generation_prompt is not False,
        **ask.chat_template_kwargs,
    )
    return _open_end(text, messages[-1]["content"]) if continues else text


def _open_end(text: str, final: str) -> str:
    """Cut what the template puts after the final message, so that the model goes on with it.

    Templates strip some messages; the rule is that of transformers' apply_chat_template.
    """
    for content in (final, final.strip()):
        if content and (at := text.rfind(content)) >= 0:
            return text[: at + len(content)]
    raise RequestError(
        "continue_final_message needs a final message with text, which the template shows as it is",
        param="continue_final_message",
    )


def _template_message(index: int, message: ChatMessage) -> dict[str, Any]:
    """A message as templates expect it: text in one string, arguments as an object."""
    # `developer` is what OpenAI now calls `system`; models know the old name.
    role = "system" if message.role == "developer" else message.role
    content = _text(index, message)
    shown: dict[str, Any] = {"role": role, "content": content}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            shown[name] = value
    if reasoning := message.reasoning_content or message.reasoning:
        shown["reasoning_content"] = reasoning
    if message.tool_calls:
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(
                        f"messages[{index}].tool_calls[{i}]", call.function.arguments
                    ),
                },
            }
            for i, call in enumerate(message.tool_calls)
        ]
    return shown


def _text(index: int, message: ChatMessage) -> str:
    param = f"messages[{index}].content"
    if message.content is None:
        if message.tool_calls or message.role == "assistant":
            return message.refusal or ""
        raise RequestError(f"{param} of role {message.role} is missing", param=param)
    if isinstance(message.content, str):
        return message.content
    texts = []
    for i, part in enumerate(message.content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "refusal"):
            raise UnsupportedFieldError(
                f"{param}[{i}] is of type {part.type[:64]!r}; this server reads text only",
                param=f"{param}[{i}].type",
            )
        if text is None:
            raise RequestError(
                f"{param}[{i}] has no {part.type}", param=f"{param}[{i}].{part.type}"
            )
        texts.append(text)
    return "\n".join(texts)


def _arguments(param: str, arguments: str) -> Mapping[str, Any]:
    try:
        parsed = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise RequestError(
            f"{param}.function.arguments is not a JSON object in a string",
            param=f"{param}.function.arguments",
        )
    return parsed


# ---------------------------------------------------------------- prompt -> chunks -> answer


@dataclass(kw_only=True)
class _Chat:
    """One chat on its way through the engine."""

    state: ServerState
    ask: ChatRequest
    params: SamplingParams
    prompt_token_ids: list[int]
    response_id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    async def chunks(self) -> AsyncGenerator[ChatChunk, None]:
        """The stream: roles, pieces, then the usage when it is wanted."""
        usage = UsageCounter(self.ask, len(self.prompt_token_ids))
        outputs = self.state.engine.generate(
            self.prompt_token_ids,
            self.params,
            request_id=self.response_id,
            priority=self.ask.priority,
            cache_salt=self.ask.cache_salt,
            final_only=not self.ask.stream,
        )
        is_first = True
        async with aclosing(outputs):
            async for output in outputs:
                check_finish(output)
                usage.count(output)
                if is_first:
                    is_first = False
                    for index in range(self.params.n):
                        role = Delta(role="assistant", content="")
                        yield self._chunk(usage, ChatChunkChoice(index, role))
                choice = self._choice(output)
                if choice is None and output.prompt_logprobs is None:
                    continue
                chunk = self._chunk(usage, choice)
                if output.prompt_logprobs is not None:
                    chunk.prompt_logprobs = prompt_logprobs(
                        self.state.tokenizer, output.prompt_logprobs
                    )
                yield chunk
        if usage.is_wanted:
            chunk = self._chunk(usage, None)
            chunk.usage = usage.total()
            yield chunk

    def _choice(self, output: RequestOutput) -> ChatChunkChoice | None:
        """What an output adds to its sample; None when it has nothing to tell yet."""
        logprobs = None
        if output.logprobs and self.params.logprobs is not None:
            logprobs = chat_logprobs(self.state.tokenizer, output.logprobs, self.params.logprobs)
        token_ids = output.token_ids if self.ask.return_token_ids else None
        if not (output.text or output.finish_reason or logprobs or token_ids):
            return None
        choice = ChatChunkChoice(
            output.index, Delta(content=output.text), logprobs, output.finish_reason
        )
        if output.finish_reason is not None:
            choice.stop_reason = output.stop_reason
        if token_ids is not None:
            choice.token_ids = token_ids
        return choice

    def _chunk(self, usage: UsageCounter, choice: ChatChunkChoice | None) -> ChatChunk:
        chunk = ChatChunk(
            id=self.response_id,
            created=self.created,
            model=self.model,
            choices=[] if choice is None else [choice],
        )
        if usage.is_wanted:
            chunk.usage = usage.total() if usage.is_continuous else None
        if self.ask.return_token_ids and choice is not None and choice.delta.role:
            chunk.prompt_token_ids = self.prompt_token_ids
        return chunk


async def fold(chunks: AsyncIterator[ChatChunk]) -> ChatCompletion:
    """The whole answer: what a client of the stream would have put together."""
    choices: dict[int, ChatChoice] = {}
    answer: ChatCompletion | None = None
    async for chunk in chunks:
        if answer is None:
            answer = ChatCompletion(
                id=chunk.id,
                created=chunk.created,
                model=chunk.model,
                choices=[],
                prompt_token_ids=chunk.prompt_token_ids,
            )
        if chunk.prompt_logprobs is not UNSET:
            answer.prompt_logprobs = chunk.prompt_logprobs
        if chunk.usage is not UNSET:
            answer.usage = chunk.usage
        for piece in chunk.choices:
            _add(choices.setdefault(piece.index, ChatChoice(piece.index)), piece)
    if answer is None:
        raise GenerationError("the engine gave no output")
    answer.choices = [choices[index] for index in sorted(choices)]
    return answer


def _add(choice: ChatChoice, piece: ChatChunkChoice) -> None:
    choice.message.content += piece.delta.content or ""
    if piece.logprobs is not None:
        if choice.logprobs is None:
            choice.logprobs = ChatLogprobs([])
        choice.logprobs.content += piece.logprobs.content
    if piece.finish_reason is not None:
        choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason
    if piece.token_ids is not UNSET:
        known = [] if choice.token_ids is UNSET else choice.token_ids
        choice.token_ids = known + piece.token_ids
