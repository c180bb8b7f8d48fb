"""Chat templates, in a sandbox."""

from collections.abc import Mapping, Sequence
from typing import Any


class ChatTemplate:
    """A model's jinja2 chat template. Raises ModelError when it does not compile."""

    def __init__(self, template: str, *, bos_token: str = "", eos_token: str = "") -> None:
        raise NotImplementedError

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for `messages`. Raises RequestError(param="messages")."""
        raise NotImplementedError
