"""`twostroke chat`: talk to a running server from a terminal."""

import contextlib
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twostroke.errors import ConfigError, TwostrokeError

if TYPE_CHECKING:
    import httpx

URL = Annotated[str, typer.Option("--url", help="the server")]
API_KEY = Annotated[
    str, typer.Option("--api-key", envvar="TWOSTROKE_API_KEY", help="its key, if it wants one")
]

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 600.0


def chat(
    prompt: Annotated[
        str | None,
        typer.Argument(help="answer this and end; without it, a conversation", show_default=False),
    ] = None,
    url: URL = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="by its name in the API")] = "default",
    api_key: API_KEY = "",
    system: Annotated[str, typer.Option(help="system message", show_default=False)] = "",
    max_tokens: Annotated[
        int | None, typer.Option(help="longest answer", min=1, show_default=False)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0: always the likeliest token", show_default=False)
    ] = None,
) -> None:
    """Talk to a running server.

    Ctrl-C stops an answer, Ctrl-D ends the conversation.
    """
    options = {"max_tokens": max_tokens, "temperature": temperature}
    with connect(url, api_key) as client:
        conversation = Conversation(
            client,
            model,
            messages=[{"role": "system", "content": system}] if system else [],
            options={name: value for name, value in options.items() if value is not None},
        )
        if prompt is not None:
            for text in conversation.ask(prompt):
                print(text, end="", flush=True)
            print()
        else:
            _converse(conversation)


@dataclass
class Conversation:
    """Messages so far, and the server that continues them."""

    client: "httpx.Client"
    model: str
    messages: list[dict[str, str]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    num_answer_tokens: int = 0  # of the last answer, as the server counted them

    def ask(self, question: str) -> Generator[str, None, None]:
        """Stream the answer in pieces. Closing the iterator stops it; what came is remembered.

        Raises TwostrokeError with the server's words when it refuses; the question is then
        forgotten.
        """
        self.messages.append({"role": "user", "content": question})
        answer = ""
        self.num_answer_tokens = 0
        try:
            for text in self._stream():
                answer += text
                yield text
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()

    def _stream(self) -> Generator[str, None, None]:
        import json

        import httpx

        body = {
            "model": self.model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.options,
        }
        try:
            with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    raise TwostrokeError(_error_text(response))
                for data in _events(response):
                    if data == b"[DONE]":
                        continue
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise TwostrokeError(f"the answer broke off: {chunk['error']['message']}")
                    if chunk.get("usage"):
                        self.num_answer_tokens = chunk["usage"]["completion_tokens"]
                    for choice in chunk["choices"]:
                        if text := choice["delta"].get("content"):
                            yield text
        except httpx.HTTPError as error:
            raise _unreachable(self.client, error) from None


def _converse(conversation: Conversation) -> None:
    """Read questions until the end of input."""
    from rich.console import Console

    with contextlib.suppress(ImportError):  # gives input() line editing and history
        import readline  # noqa: F401
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    name = get_json(conversation.client, "/v1/models")["data"][0]["id"]
    notes.print(
        f"{name} at {conversation.client.base_url}. Ctrl-C stops an answer, Ctrl-D ends.",
        style="dim",
    )
    while True:
        try:
            question = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            continue
        if not question:
            continue
        try:
            _answer(conversation, question, notes)
        except TwostrokeError as error:
            notes.print(f"error: {error}", style="red", markup=False)


def _answer(conversation: Conversation, question: str, notes: Any) -> None:
    """Print an answer as it arrives, then how fast it came."""
    start_s = time.monotonic()
    first_s = None
    pieces = conversation.ask(question)
    try:
        for text in pieces:
            if first_s is None:
                first_s = time.monotonic()
            print(text, end="", flush=True)
        print()
    except KeyboardInterrupt:
        print()
        notes.print("(stopped)", style="dim")
        return
    finally:
        pieces.close()
    if first_s is not None and (tokens := conversation.num_answer_tokens) > 1:
        rate = (tokens - 1) / max(time.monotonic() - first_s, 1e-9)
        notes.print(
            f"({tokens} tokens, first after {first_s - start_s:.2f} s, then {rate:.0f} tokens/s)",
            style="dim",
        )


# ---------------------------------------------------------------- HTTP


def connect(url: str, api_key: str) -> "httpx.Client":
    """A client of the server at `url`, with or without /v1 at its end."""
    import httpx

    return httpx.Client(
        base_url=url.rstrip("/").removesuffix("/v1"),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        trust_env=False,
    )


def get_json(client: "httpx.Client", path: str) -> Any:
    """GET, or a TwostrokeError that says why not."""
    import httpx

    try:
        response = client.get(path)
    except httpx.HTTPError as error:
        raise _unreachable(client, error) from None
    if response.is_error:
        raise TwostrokeError(_error_text(response))
    try:
        return response.json()
    except ValueError:
        raise ConfigError(f"{client.base_url} is not such a server: {path} is no JSON") from None


def _unreachable(client: "httpx.Client", error: Exception) -> TwostrokeError:
    import httpx

    reason = str(error) or type(error).__name__
    if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol)):
        return ConfigError(
            f"no server answers at {client.base_url}: {reason}",
            hint="start one with twostroke serve, or name another with --url",
        )
    return TwostrokeError(f"the server at {client.base_url} broke off: {reason}")


def _events(response: "httpx.Response") -> Iterator[bytes]:
    """The data of each server-sent event. (httpx's own lines also end at U+2028 and other
    characters of an answer.)"""
    rest = b""
    for piece in response.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _error_text(response: "httpx.Response") -> str:
    try:
        text = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        text = response.text[:200]
    return f"HTTP {response.status_code}: {text}"
