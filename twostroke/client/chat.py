"""Chat templates: a model's jinja2 text that turns messages into one prompt, in a sandbox.

The environment is that of Hugging Face transformers (trim_blocks, lstrip_blocks, `tojson` without
HTML escapes, `raise_exception`, `strftime_now`, loop controls, `generation` blocks), so templates
render to the same text. A template comes with the model and is not trusted: it reaches no
attribute that leads out of the sandbox, ranges are at most 100,000 long, products and powers are
bounded, and so is the text it may produce. What is not bounded is time: loops nested in loops can
keep it busy, so a template that a client sends must never be run.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from twostroke.errors import ModelError, RequestError

MAX_CHARS = 16 << 20
_MAX_PRODUCT = 1 << 16  # items of a repeated sequence, bytes of a power
_OURS = frozenset(("messages", "bos_token", "eos_token", "raise_exception", "strftime_now"))


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**"))

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """Refuse a product or power that would fill the memory."""
        size = 0
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * right // 8
        elif isinstance(left, str | list | tuple) and isinstance(right, int):
            size = len(left) * right
        elif isinstance(right, str | list | tuple) and isinstance(left, int):
            size = len(right) * left
        if size > _MAX_PRODUCT:
            raise SecurityError(f"the result of {operator} is too large; at most {_MAX_PRODUCT:,}")
        return super().call_binop(context, operator, left, right)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks what a model wrote, for training; here it just renders."""

    tags = frozenset(("generation",))  # type: ignore[assignment]

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A model's chat template. Raises ModelError when it is not valid jinja2.

    `source` is its text, for people to read.
    """

    def __init__(self, template: str, *, bos_token: str = "", eos_token: str = "") -> None:
        try:
            self._template = _environment().from_string(template)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"the chat template is not valid: {error}") from None
        self.source = template
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for `messages`, special tokens written out.

        `kwargs` are variables of the template (`enable_thinking`, ...). Raises RequestError with
        param "messages" when the template refuses them or fails.
        """
        if taken := _OURS & kwargs.keys():
            raise RequestError(
                f"chat_template_kwargs names {sorted(taken)[0]!r}, which the server sets",
                param="chat_template_kwargs",
            )
        pieces, num_chars = [], 0
        try:
            for piece in self._template.generate(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                **self._tokens,
                **kwargs,
            ):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_CHARS:
                    break
        except jinja2.TemplateError as error:
            raise RequestError(
                f"the chat template does not accept these messages: {error.message or error}",
                param="messages",
            ) from None
        except Exception as error:  # whatever untrusted code can raise on this input
            raise RequestError(
                f"the chat template cannot render these messages: {error!r}", param="messages"
            ) from None
        if num_chars > MAX_CHARS:
            raise RequestError(
                f"the rendered prompt has more than {MAX_CHARS:,} characters", param="messages"
            )
        return "".join(pieces)
