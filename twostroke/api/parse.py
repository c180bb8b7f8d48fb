"""From the bytes of a body to a request struct, or to a 400 that names the field.

Nothing is ignored silently. A field is read, or it is a pure hint (accepted, no effect), or it is
refused by name: as something OpenAI or vLLM has and this server does not, or as unknown, with the
nearest name. A null, and a value that asks for nothing (tools: []), is the same as no field.

Fields are decoded one by one from their own slice of the body, so that a hostile value of a field
that is not read costs no memory, and an error knows its field.
"""

import difflib
import functools
import re
import typing
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from twostroke.api.protocol import ChatRequest, CompletionRequest
from twostroke.errors import RequestError, UnsupportedFieldError

T = TypeVar("T", bound=msgspec.Struct)

# Accepted and without effect: none of them changes what a right answer is.
HINTS = frozenset(
    (
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    )
)


@dataclass(frozen=True)
class Refusal:
    """A field that is refused, unless it has one of the values that ask for nothing."""

    harmless: tuple[object, ...] = ()
    hint: str = ""


_NO_TOOLS = "tool calling is not implemented; put the tools into the prompt"
_NO_GRAMMAR = "constrained output is not implemented; ask for the format in the prompt"
_NO_MEDIA = "this server reads and writes text only"
_OWN_PROCESSORS = "use logit_bias, min_p, top_k or the penalties"

_REFUSED = {
    "best_of": Refusal((), "use n"),
    "allowed_token_ids": Refusal(([],), "use logit_bias"),
    "audio": Refusal((), _NO_MEDIA),
    "bad_words": Refusal(([],), "use logit_bias"),
    "chat_template": Refusal((), "the server's template is fixed; see --chat-template"),
    "documents": Refusal(([],), "put the documents into a message"),
    "early_stopping": Refusal((False,), "beam search is not implemented"),
    "function_call": Refusal(("none",), _NO_TOOLS),
    "functions": Refusal(([],), _NO_TOOLS),
    "guided_choice": Refusal((), _NO_GRAMMAR),
    "guided_decoding_backend": Refusal((), _NO_GRAMMAR),
    "guided_grammar": Refusal((), _NO_GRAMMAR),
    "guided_json": Refusal((), _NO_GRAMMAR),
    "guided_regex": Refusal((), _NO_GRAMMAR),
    "kv_transfer_params": Refusal((), "engines hand KV over among themselves only"),
    "length_penalty": Refusal((1.0,), "beam search is not implemented"),
    "logits_processors": Refusal(([],), _OWN_PROCESSORS),
    "mm_processor_kwargs": Refusal(({},), _NO_MEDIA),
    "modalities": Refusal((["text"],), _NO_MEDIA),
    "prediction": Refusal((), "predicted outputs are not implemented"),
    "prompt_embeds": Refusal((), "send text or token ids"),
    "request_id": Refusal((), "send it in the header x-request-id"),
    "response_format": Refusal(({"type": "text"},), _NO_GRAMMAR),
    "return_tokens_as_token_ids": Refusal((False,), "use return_token_ids"),
    "spaces_between_special_tokens": Refusal((True,)),
    "structured_outputs": Refusal((), _NO_GRAMMAR),
    "tool_choice": Refusal(("none",), _NO_TOOLS),
    "tools": Refusal(([],), _NO_TOOLS),
    "truncate_prompt_tokens": Refusal((), "shorten the prompt in the client"),
    "use_beam_search": Refusal((False,), "beam search is not implemented"),
    "vllm_xargs": Refusal(({},)),
    "web_search_options": Refusal((), "this server has no access to the web"),
}
_REFUSED_BY: dict[type[msgspec.Struct], dict[str, Refusal]] = {
    ChatRequest: {
        **_REFUSED,
        "echo": Refusal((False,), "only /v1/completions can echo"),
        "prompt": Refusal((), "send a prompt to /v1/completions"),
        "suffix": Refusal(("",), "infilling is not implemented"),
    },
    CompletionRequest: {
        **_REFUSED,
        "max_completion_tokens": Refusal((), "this endpoint calls it max_tokens"),
        "messages": Refusal((), "send messages to /v1/chat/completions"),
        "suffix": Refusal(("",), "infilling is not implemented"),
        "top_logprobs": Refusal((), "this endpoint takes the number in logprobs"),
    },
}
_LONGEST_HARMLESS_BYTES = 256

_AT = re.compile(r"^(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`)?$", re.DOTALL)
_NAMED = re.compile(r"^Object (?:contains unknown|missing required) field `(.*)`$", re.DOTALL)


@functools.cache
def _decoders(kind: type[msgspec.Struct]) -> dict[str, "msgspec.json.Decoder[Any]"]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: msgspec.json.Decoder(hints[name]) for name in kind.__struct_fields__}


_anything = msgspec.json.Decoder(object)
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


def members(body: bytes) -> dict[str, msgspec.Raw]:
    """The fields of a JSON object, undecoded, without the nulls."""
    try:
        given = _members.decode(body)
    except RecursionError:
        raise RequestError("the JSON of the body is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise RequestError(f"the body must be a JSON object: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    return {name: raw for name, raw in given.items() if bytes(raw) != b"null"}


def parse(body: bytes, kind: type[T]) -> T:
    """Read a body as `kind`. Raises RequestError with `param` for whatever is not as it should."""
    decoders = _decoders(kind)
    refused = _REFUSED_BY.get(kind, {})
    values: dict[str, Any] = {}
    given = members(body)
    for name, raw in given.items():
        if decoder := decoders.get(name):
            values[name] = _decode(decoder, raw, name)
        elif name == "best_of" and bytes(raw) == bytes(given.get("n", b"1")):
            continue  # the n best of n: all of them
        elif name in refused:
            _refuse(name, raw, refused[name])
        elif name not in HINTS:
            raise _unknown(name, [*decoders, *refused, *HINTS])
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in values:
            raise RequestError(f"the field {field.name} is missing", param=field.name)
    return kind(**values)


def _decode(decoder: "msgspec.json.Decoder[Any]", raw: msgspec.Raw, name: str) -> Any:
    try:
        return decoder.decode(raw)
    except RecursionError:
        raise RequestError(f"{name} is nested too deeply", param=name) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _explain(name, str(error)) from None


def _explain(name: str, message: str) -> RequestError:
    """An error of msgspec's, which ends in the path of the value, in terms of our field."""
    found = _AT.match(message)
    what = found["what"] if found else message
    path = (found["path"] or "") if found else ""
    param = name + path.replace("[...]", "")
    if named := _NAMED.match(what):
        param = f"{param}.{named[1]}"
        if what.startswith("Object missing"):
            return RequestError(f"the field {param} is missing", param=param)
        return RequestError(f"unknown field {param}", param=param, hint="remove it")
    return RequestError(f"{param} is not valid: {what[:1].lower()}{what[1:]}", param=param)


def _refuse(name: str, raw: msgspec.Raw, refusal: Refusal) -> None:
    value: object = None
    if len(bytes(raw)) <= _LONGEST_HARMLESS_BYTES:
        value = _decode(_anything, raw, name)
        if any(value == harmless for harmless in refusal.harmless):
            return
    shown = name
    if isinstance(value, str | bool | int | float):
        shown = f"{name} {value!r}"
    elif isinstance(value, dict) and isinstance(value.get("type"), str):
        shown = f"{name} of type {value['type']!r}"
    raise UnsupportedFieldError(f"{shown} is not supported", param=name, hint=refusal.hint)


def _unknown(name: str, known: list[str]) -> RequestError:
    near = difflib.get_close_matches(name[:64], known, n=1)
    shown = name if len(name) <= 64 else name[:64] + "..."
    hint = f"did you mean {near[0]}?" if near else "remove it"
    return RequestError(f"unknown field {shown!r}", param=shown, hint=hint)
