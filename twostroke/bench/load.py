"""The load generator: sends requests to an OpenAI server and notes when each piece arrives.

Open loop when a request rate is given (requests leave on time whether or not the server keeps up),
closed loop with `max_concurrency`. It only records; `stats` makes figures of it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise

import httpx
import msgspec

from twostroke.bench.workload import Prompt
from twostroke.errors import ConfigError

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 600.0  # without a byte from the server; a run must end
DEFAULT_VOCAB_SIZE = 32_000


@dataclass(frozen=True)
class Target:
    """The model and how it is asked."""

    model: str
    ignore_eos: bool = False
    temperature: float = 0.0


@dataclass
class Outcome:
    """What became of one request. Times are seconds on one monotonic clock."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    start_s: float = 0.0
    chunk_times_s: list[float] = field(default_factory=list)  # arrival of each piece of output
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.chunk_times_s[0] - self.start_s

    @property
    def e2el_s(self) -> float:
        """End-to-end latency: to the last token."""
        return self.chunk_times_s[-1] - self.start_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; 0 with fewer than two."""
        if self.output_tokens < 2:
            return 0.0
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        """Times between pieces of output."""
        return [after - before for before, after in pairwise(self.chunk_times_s)]


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Error(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


def connect(base_url: str, api_key: str = "") -> httpx.AsyncClient:
    """A client without a bound on connections, so that it never queues by itself."""
    return httpx.AsyncClient(
        base_url=base_url.rstrip("/").removesuffix("/v1"),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
    )


async def find_model(client: httpx.AsyncClient) -> str:
    """The first model that the server names. Raises ConfigError when no server answers."""
    try:
        response = await client.get("/v1/models")
        if response.is_error:
            raise ConfigError(f"{client.base_url} answered: {_error_text(response)}")
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise ConfigError(
            f"no server answers at {client.base_url}: {error or type(error).__name__}",
            hint="start one with twostroke serve, or name another with --base-url",
        ) from None
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"{client.base_url} lists no model at /v1/models") from None


async def find_vocab_size(client: httpx.AsyncClient) -> int:
    """The vocabulary's size where the server tells it (ours does), else one that any model has."""
    try:
        return int((await client.get("/props")).json()["limits"]["vocab_size"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return DEFAULT_VOCAB_SIZE


async def send(client: httpx.AsyncClient, target: Target, prompt: Prompt) -> Outcome:
    """One streamed completion. Errors end up in the outcome, not in an exception."""
    outcome = Outcome(prompt_tokens=len(prompt.prompt) if isinstance(prompt.prompt, list) else 0)
    body = {
        "model": target.model,
        "prompt": prompt.prompt,
        "max_tokens": prompt.output_tokens,
        "temperature": target.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.ignore_eos:
        body["ignore_eos"] = True
    outcome.start_s = time.monotonic()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.is_error:
                await response.aread()
                outcome.error = _error_text(response)
                return outcome
            await _read_stream(response, outcome)
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    if not outcome.error and not outcome.chunk_times_s:
        outcome.error = "the answer had no token"
    return outcome


async def _read_stream(response: httpx.Response, outcome: Outcome) -> None:
    async for data in _events(response):
        if data == b"[DONE]":
            return
        chunk = _decode_chunk(data)
        if chunk.error is not None:
            outcome.error = chunk.error.message
            return
        if chunk.usage is not None:
            outcome.prompt_tokens = chunk.usage.prompt_tokens
            outcome.output_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            # A last piece that only says why it ended is no token, unless nothing came before it
            # (an answer whose only token is half a character).
            if choice.text or choice.finish_reason is None or not outcome.chunk_times_s:
                outcome.chunk_times_s.append(time.monotonic())
    outcome.error = "the stream ended before [DONE]"


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """The data of each server-sent event (ours and vLLM's are one line each)."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _error_text(response: httpx.Response) -> str:
    try:
        text = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        text = response.text[:200]
    return f"HTTP {response.status_code}: {text}"


async def run(
    client: httpx.AsyncClient,
    target: Target,
    prompts: Sequence[Prompt],
    offsets_s: Sequence[float],
    *,
    max_concurrency: int | None = None,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
) -> tuple[list[Outcome], float]:
    """Send prompt i at `offsets_s[i]`; return outcomes in that order and the duration in seconds.

    With `max_concurrency` a request whose moment has come still waits for a free place; its latency
    counts from when it is sent.
    """
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()

    async def one(prompt: Prompt) -> Outcome:
        async with places:
            outcome = await send(client, target, prompt)
        on_done(outcome)
        return outcome

    start_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for prompt, offset_s in zip(prompts, offsets_s, strict=True):
            if (wait_s := start_s + offset_s - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            tasks.append(group.create_task(one(prompt)))
    return [task.result() for task in tasks], time.monotonic() - start_s
