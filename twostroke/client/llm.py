"""The engine as a library: `LLM(model).generate(prompts, params)`.

    caller's thread ── generate ──▶ event loop in a thread, AsyncEngine ──▶ engine process

The loop has a thread of its own, so calls work from any thread, and where a loop already runs (in
Jupyter). Several calls at once share the engine. The engine stops with `close`, at the end of a
`with` block, when the object is collected, or at exit.
"""

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from twostroke.checkpoint import Checkpoint
from twostroke.checkpoint import resolve as resolve_checkpoint
from twostroke.client.chat import ChatTemplate
from twostroke.client.engine import AsyncEngine, RequestOutput
from twostroke.client.tokenizer import Tokenizer, load_tokenizer
from twostroke.config import EngineConfig
from twostroke.config import resolve as resolve_config
from twostroke.errors import (
    ConfigError,
    EngineDeadError,
    ModelError,
    RequestError,
    TwostrokeError,
)
from twostroke.ledger import Interval
from twostroke.messages import SamplingParams, TokenLogprobs
from twostroke.metrics import SampleRecord
from twostroke.transport import EngineChannel

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]
T = TypeVar("T")

_UNBOUNDED = 1 << 31  # offline, the caller's own list is the queue
_CLOSE_S = 10.0
# Exit codes of an engine that could not start, and what they mean.
_REFUSALS: dict[object, type[TwostrokeError]] = {2: ConfigError, 3: ModelError}


class EngineHandle(Protocol):
    """Running engines, as `proc.launch.start_engines` gives them."""

    @property
    def channels(self) -> Sequence[EngineChannel]: ...

    def stop(self) -> object:
        """End the engines, and return the exit code of one that refused to start; idempotent."""
        ...


Launch = Callable[[EngineConfig, Checkpoint], EngineHandle]


@dataclass(frozen=True)
class CompletionResult:
    """One of a request's n samples; fields as in `RequestOutput`."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    error: str | None
    logprobs: list[TokenLogprobs] | None
    cumulative_logprob: float | None


@dataclass(frozen=True)
class RequestMetrics:
    """Times of a request's slowest sample, in seconds; `intervals_s` sums to `latency_s`."""

    latency_s: float
    first_token_s: float | None
    intervals_s: dict[str, float]
    num_cached_tokens: int


@dataclass(frozen=True)
class RequestResult:
    """What came of one prompt. `prompt` is None when token ids were given."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionResult]
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(frozen=True)
class _Job:
    prompt: str | None
    token_ids: list[int]
    params: SamplingParams


class LLM:
    """A model in an engine process of its own.

    `settings` are those of `twostroke serve`, with underscores (`max_model_len=4096`). Raises
    ConfigError or ModelError when they or the model cannot work. `launch` starts the engines
    (default: `proc.launch.start_engines`).
    """

    def __init__(self, model: str = "", *, launch: Launch | None = None, **settings: Any) -> None:
        self.config, _ = resolve_config({"model": model, **settings})
        if self.config.hands_off:
            raise ConfigError(
                "LLM runs plain engines only, without --prefill, --decode, --join and the like",
                hint="twostroke serve runs prefill and decode apart",
            )
        checkpoint = resolve_checkpoint(self.config)
        self.tokenizer: Tokenizer = load_tokenizer(checkpoint, self.config.tokenizer)
        self._chat_template = self._load_chat_template(checkpoint)
        if launch is None:
            # The one place where client names proc: a library must start its own engine.
            from twostroke.proc.launch import start_engines

            launch = start_engines
        handle = launch(self.config, checkpoint)
        self.engine = AsyncEngine(
            handle.channels,
            self.tokenizer,
            model_name=checkpoint.served_name,
            max_model_len=checkpoint.shape.max_position_embeddings,
            eos_token_ids=checkpoint.shape.eos_token_ids,
            max_num_queued_reqs=_UNBOUNDED,
            vocab_size=checkpoint.shape.vocab_size,
            default_seed=self.config.seed,
            prefix_caching=self.config.enable_prefix_caching,
            status_interval_s=0,
        )
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        thread.start()
        self._loop.call_soon_threadsafe(self.engine.start)
        self._finalizer = weakref.finalize(
            self, _shut_down, self._loop, thread, self.engine, handle
        )
        try:
            self._run(self.engine.wait_ready())
        except EngineDeadError as error:
            self.close()
            kind = _REFUSALS.get(handle.stop(), EngineDeadError)
            raise kind(error.message) from None
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestResult]:
        """Complete one prompt or many, and return results in the order of the prompts.

        A prompt is a text, a list of token ids, or a mapping with `prompt` or `prompt_token_ids`.
        `sampling_params` are for all, or one for each. `use_tqdm` shows a progress bar. A prompt
        that is refused raises RequestError, with a note saying which, and the others are aborted.
        """
        listed = _listed(prompts)
        each = _per_prompt(sampling_params, len(listed))
        jobs = [self._job(*pair) for pair in zip(listed, each, strict=True)]
        return self._complete(jobs, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[RequestResult]:
        """Answer one conversation or many, rendered with the model's chat template."""
        if self._chat_template is None:
            raise ModelError(
                f"the model {self.engine.model_name} has no chat template",
                hint="use generate, or give chat_template a file",
            )
        one = not messages or isinstance(messages[0], Mapping)
        conversations: Any = [messages] if one else messages
        texts = [
            self._chat_template.render(
                conversation, add_generation_prompt=add_generation_prompt, **template_kwargs
            )
            for conversation in conversations
        ]
        jobs = [
            _Job(text, self.tokenizer.encode(text, add_special_tokens=False), params)
            for text, params in zip(texts, _per_prompt(sampling_params, len(texts)), strict=True)
        ]
        return self._complete(jobs, use_tqdm)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False, with nothing forgotten, while requests run."""
        return bool(self._run(self.engine.call("reset_prefix_cache")))

    def close(self) -> None:
        """Abort what runs and stop the engine. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------ inside

    def _load_chat_template(self, checkpoint: Checkpoint) -> ChatTemplate | None:
        text = checkpoint.chat_template
        if self.config.chat_template:
            path = Path(self.config.chat_template)
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelError(f"cannot read the chat template {path}: {error}") from None
        if text is None:
            return None
        tokenizer = self.tokenizer
        return ChatTemplate(text, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)

    def _job(self, prompt: Prompt, params: SamplingParams) -> _Job:
        given: Any = prompt
        if isinstance(prompt, Mapping):
            given = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if isinstance(given, str):
            return _Job(given, self.tokenizer.encode(given), params)
        is_ids = isinstance(given, Sequence) and not isinstance(given, bytes)
        if not is_ids or not all(isinstance(token_id, int) for token_id in given):
            raise RequestError(
                f"a prompt is {prompt!r:.200}",
                hint="give a text, token ids, or a mapping with prompt or prompt_token_ids",
            )
        return _Job(None, list(given), params)

    def _complete(self, jobs: list[_Job], show: bool) -> list[RequestResult]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, disable=not show) as bar:
            task = bar.add_task("prompts", total=len(jobs), rate="")
            started_s, num_tokens = time.monotonic(), 0

            def advance(result: RequestResult) -> None:
                nonlocal num_tokens
                num_tokens += sum(len(output.token_ids) for output in result.outputs)
                rate = num_tokens / max(time.monotonic() - started_s, 1e-9)
                bar.update(task, advance=1, rate=f"{rate:.1f} tok/s")

            # Enough to keep every seat taken.
            width = 4 * self.config.max_num_seqs * self.config.data_parallel_size
            return self._run(_run_jobs(self.engine, jobs, width, advance))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run on the loop's thread and wait; an interrupt cancels it, which aborts its requests."""
        if not self._finalizer.alive:
            coroutine.close()
            raise EngineDeadError("this LLM was closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt becomes a list of one; a list of ints is one prompt."""
    given: Any = prompts
    one = not isinstance(given, Sequence) or isinstance(given, str | bytes)
    return [given] if one or (len(given) > 0 and isinstance(given[0], int)) else list(given)


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [_checked(params or SamplingParams())] * count
    if len(params) != count:
        raise RequestError(
            f"{count} prompts came with {len(params)} sampling_params",
            hint="give one for all, or one for each",
        )
    return [_checked(each) for each in params]


def _checked(params: SamplingParams) -> SamplingParams:
    """With the types that the fields should have: a program may have given any."""
    try:
        given = msgspec.to_builtins(params)
        if isinstance(given.get("stop"), str):  # as vLLM has it
            given["stop"] = [given["stop"]]
        return msgspec.convert(given, SamplingParams)
    except (msgspec.ValidationError, TypeError, AttributeError) as error:
        raise RequestError(
            f"sampling_params are not valid: {error}", param="sampling_params"
        ) from None


async def _run_jobs(
    engine: AsyncEngine,
    jobs: Sequence[_Job],
    width: int,
    advance: Callable[[RequestResult], None],
) -> list[RequestResult]:
    """Run all jobs, `width` at a time and in order; the first error cancels the others."""
    results: dict[int, RequestResult] = {}
    waiting = iter(enumerate(jobs))

    async def work(numbered: Iterator[tuple[int, _Job]]) -> None:
        for number, job in numbered:
            try:
                results[number] = await _run_job(engine, job, f"llm-{number}")
            except RequestError as error:
                error.add_note(f"in prompt {number}")
                raise
            advance(results[number])

    workers = [asyncio.create_task(work(waiting)) for _ in range(min(width, len(jobs)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [results[number] for number in range(len(jobs))]


async def _run_job(engine: AsyncEngine, job: _Job, request_id: str) -> RequestResult:
    records: list[SampleRecord] = []
    outputs = [
        output
        async for output in engine.generate(
            job.token_ids,
            job.params,
            request_id=request_id,
            final_only=True,
            on_close=records.extend,
        )
    ]
    outputs.sort(key=lambda output: output.index)
    return RequestResult(
        prompt=job.prompt,
        prompt_token_ids=job.token_ids,
        outputs=[_completion(output) for output in outputs],
        metrics=_metrics(records),
        prompt_logprobs=outputs[0].prompt_logprobs,
    )


def _completion(output: RequestOutput) -> CompletionResult:
    logprobs = output.logprobs
    return CompletionResult(
        index=output.index,
        text=output.text,
        token_ids=output.token_ids,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        error=output.error,
        logprobs=logprobs,
        cumulative_logprob=None if logprobs is None else sum(p.logprobs[0] for p in logprobs),
    )


def _metrics(records: Iterable[SampleRecord]) -> RequestMetrics:
    slowest = max(records, key=lambda record: record.ledger.total_ns)
    ledger = slowest.ledger
    first_ns = ledger.first_token_ns
    return RequestMetrics(
        latency_s=ledger.total_ns / 1e9,
        first_token_s=None if first_ns is None else (first_ns - ledger.arrived_ns) / 1e9,
        intervals_s={interval.name.lower(): ledger.seconds(interval) for interval in Interval},
        num_cached_tokens=slowest.cached_tokens,
    )


def _shut_down(
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    engine: AsyncEngine,
    handle: EngineHandle,
) -> None:
    """Stop the tasks, the loop, its thread and the engine, in this order."""
    if threading.current_thread() is thread:  # collected there: a thread cannot join itself
        threading.Thread(target=_shut_down, args=(loop, thread, engine, handle)).start()
        return
    try:
        asyncio.run_coroutine_threadsafe(engine.close(), loop).result(_CLOSE_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_CLOSE_S)
        if not loop.is_running():
            loop.close()
        handle.stop()
