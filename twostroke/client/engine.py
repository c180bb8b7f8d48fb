"""The engine as the API process sees it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec

from twostroke.client.tokenizer import Tokenizer
from twostroke.clock import Clock, WallClock
from twostroke.errors import EngineDeadError
from twostroke.messages import (
    EngineProgress,
    EngineReady,
    EngineStats,
    SamplingParams,
    TokenLogprobs,
)
from twostroke.metrics import Metrics
from twostroke.transport import EngineChannel


class RequestOutput(msgspec.Struct, kw_only=True):
    """What one sample of a request got since its last output.

    `finish_reason` is "stop", "length", "abort" or "error" (then `error` says why) in a sample's
    last output, else None. `stop_reason` is the stop string or the stop token id (not EOS) that
    ended it. `token_ids` and `logprobs` have one entry per new token; `text` may lag behind them
    (partial characters, possible stop strings) until the last output. `prompt_logprobs` comes once,
    complete, with the first output of index 0 when asked for: None for the first position.
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class AsyncEngine:
    """Sends requests to one engine core and hands out what comes back."""

    ready: EngineReady | None
    dead: EngineDeadError | None
    stats: EngineStats  # the engine's latest

    def __init__(
        self,
        channel: EngineChannel,
        tokenizer: Tokenizer,
        *,
        model_name: str,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        max_num_queued_reqs: int,
        metrics: Metrics,
        default_seed: int = 0,
        clock: Clock | None = None,
        on_progress: Callable[[EngineProgress], None] | None = None,
        status_interval_s: float = 10.0,
    ) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Start the output task on the running loop."""
        raise NotImplementedError

    async def close(self) -> None:
        """Stop the tasks; requests still open end with EngineDeadError."""
        raise NotImplementedError

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        arrival_s: float | None = None,
        final_only: bool = False,
    ) -> AsyncIterator[RequestOutput]:
        """Run a request; an async generator that ends when all `params.n` samples have ended."""
        raise NotImplementedError

    async def wait_ready(self) -> EngineReady:
        """Wait for the model to be loaded. Raises EngineDeadError when that fails."""
        raise NotImplementedError

    async def call(self, method: str, *args: Any) -> Any:
        """Ask the core something (`slots`, `reset_prefix_cache`, ...; see UtilityCall)."""
        raise NotImplementedError

    @property
    def num_unfinished(self) -> int:
        """Core requests that are open: running or waiting."""
        raise NotImplementedError
