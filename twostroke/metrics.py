"""Prometheus metrics with vLLM's names, and the numbers of the log lines.

Values are kept in plain numbers and NumPy columns and turned into Prometheus families only when
`/metrics` is read: recording costs a few array operations a step, and some additions a request.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from twostroke.kv_messages import KvReceived
from twostroke.ledger import OF_TWO_ENGINES, Interval, RequestLedger
from twostroke.messages import EngineReady, EngineStats
from twostroke.metrics_handoff import HandoffNumbers, collect_handoff

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily

# Buckets are vLLM's, so that existing dashboards and recording rules keep working.
_TTFT_S: tuple[float, ...] = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
)
_TTFT_S += (10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_TOKEN_S: tuple[float, ...] = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
)
_TOKEN_S += (10.0, 20.0, 40.0, 80.0)
_REQUEST_S: tuple[float, ...] = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
)
_REQUEST_S += (120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
_STEP_TOKENS = tuple(float(b) for b in (1, *(1 << i for i in range(3, 15))))
_N = (1.0, 2.0, 5.0, 10.0, 20.0)
_MOVED_BYTES = tuple(float(1 << i) for i in range(16, 36, 2))
_MOVE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_MOVE_RATES = tuple(m * 10.0**e for e in (8, 9, 10, 11) for m in (1, 2.5, 5))
_PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)

_FEW_VALUES = 16  # up to here NumPy's calls take longer than a loop: 50 us in a step of one token

FINISH_REASONS = ("stop", "length", "abort", "error")


def token_buckets(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `max_model_len`."""
    decades = range(len(str(max_model_len)))
    bounds = [float(m * 10**d) for d in decades for m in (1, 2, 5)]
    return tuple(b for b in bounds if b <= max_model_len)


class Histogram:
    """Counts per bucket; a value equal to a bound belongs to the bucket below it (`le`)."""

    def __init__(self, help_text: str, bounds: Sequence[float]) -> None:
        self.help_text = help_text
        self._bounds = list(bounds)
        self._counts = np.zeros(len(self._bounds) + 1, np.int64)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Record `value`, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def observe_many(self, values: Sequence[float]) -> None:
        """Record every value, in a few array operations where that is faster."""
        if len(values) <= _FEW_VALUES:
            for value in values:
                self.observe(value)
        else:
            array = np.asarray(values, np.float64)
            where = np.searchsorted(self._bounds, array, side="left")
            self._counts += np.bincount(where, minlength=self._counts.size)
            self._sum += float(array.sum())

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds and cumulative counts, +Inf last."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(bounds, np.cumsum(self._counts).tolist(), strict=True))

    @property
    def sum(self) -> float:
        """Sum of all recorded values."""
        return self._sum


@dataclass(frozen=True, kw_only=True)
class SampleRecord:
    """One finished sample (a request with n = 1 has one). `ledger` is closed."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int
    finish_reason: str
    ledger: RequestLedger
    transfer_bytes: int = 0  # of KV from another engine
    transfer_s: float = 0.0


class EngineMetrics:
    """What one engine did, and the requests that it served; all under its `engine` label."""

    def __init__(self, *, model_name: str, prefix: str, engine: int, max_model_len: int) -> None:
        self._prefix = prefix
        self._labels = {"model_name": model_name, "engine": str(engine)}
        self._stats = EngineStats()
        self._ready: EngineReady | None = None
        self._finished = dict.fromkeys(FINISH_REASONS, 0)
        self._rejected = 0
        self._prompt_tokens_cached = 0
        self._spent_ns = [0] * len(Interval)
        tokens = token_buckets(max_model_len)

        def latency(of: str) -> Histogram:
            return Histogram(f"Seconds of a request: {of}.", _REQUEST_S)

        self._histograms = {
            "time_to_first_token_seconds": Histogram("Arrival to first token.", _TTFT_S),
            "inter_token_latency_seconds": Histogram("Time between tokens.", _TOKEN_S),
            "request_time_per_output_token_seconds": Histogram(
                "Mean time per output token of a request, after its first.", _TOKEN_S
            ),
            "e2e_request_latency_seconds": latency("end to end"),
            "request_queue_time_seconds": latency("waiting before its first step"),
            "request_inference_time_seconds": latency("first step to last token"),
            "request_prefill_time_seconds": latency("first step to first token"),
            "request_decode_time_seconds": latency("decoding, without what preemption cost"),
            "request_frontend_time_seconds": latency("before it was sent"),
            "request_preempted_time_seconds": latency("preempted, and computing again"),
            "request_egress_time_seconds": latency("finished, its last output not taken"),
            "iteration_tokens_total": Histogram("Tokens per engine step.", _STEP_TOKENS),
            "request_prompt_tokens": Histogram("Prompt tokens of a request.", tokens),
            "request_generation_tokens": Histogram("Tokens that a request generated.", tokens),
            "request_max_num_generation_tokens": Histogram(
                "Most tokens that a sample of a request generated.", tokens
            ),
            "request_params_n": Histogram("The parameter n.", _N),
            "request_params_max_tokens": Histogram("The parameter max_tokens.", tokens),
            "request_prefill_kv_computed_tokens": Histogram(
                "Prompt tokens computed, not cached.", tokens
            ),
            "request_num_preemptions": Histogram("Preemptions of a request.", _PREEMPTIONS),
        }

        # Only told of engines that have a part in hand-offs.
        self._moves = {
            "request_held_time_seconds": latency("waiting for room, or for D to read its prompt"),
            "request_transfer_time_seconds": latency("its KV on the way"),
            "request_decode_queue_time_seconds": latency("waiting for its turn on D"),
            "kv_transfer_size_bytes": Histogram("Bytes of a load.", _MOVED_BYTES),
            "kv_transfer_time_seconds": Histogram("Seconds of a load.", _MOVE_S),
            "kv_transfer_rate_bytes_per_second": Histogram("Bytes a second.", _MOVE_RATES),
        }

    # ------------------------------------------------------------ recording

    def engine_ready(self, ready: EngineReady) -> None:
        """Sizes of the KV pool, for the info metric."""
        self._ready = ready

    def observe_stats(self, stats: EngineStats) -> None:
        """The engine's latest gauges and totals."""
        steps = stats.num_steps - self._stats.num_steps
        if steps > 0:
            mean = (stats.step_tokens - self._stats.step_tokens) / steps
            self._histograms["iteration_tokens_total"].observe(mean, steps)
        self._stats = stats

    def observe_tokens(
        self, first_token_s: Sequence[float], inter_token_s: Sequence[float]
    ) -> None:
        """The times to first token, and between tokens, that one step brought."""
        self._histograms["time_to_first_token_seconds"].observe_many(first_token_s)
        self._histograms["inter_token_latency_seconds"].observe_many(inter_token_s)

    def observe_request(self, samples: Sequence[SampleRecord]) -> None:
        """A request ended, in whatever way."""
        seen = self._histograms
        seen["request_params_n"].observe(len(samples))
        most = max(sample.output_tokens for sample in samples)
        seen["request_max_num_generation_tokens"].observe(most)
        for sample in samples:
            ledger = sample.ledger
            self._finished[sample.finish_reason] += 1
            self._prompt_tokens_cached += sample.cached_tokens
            for interval, spent_ns in enumerate(ledger.spent_ns):
                self._spent_ns[interval] += spent_ns
            prefill_s, decode_s = ledger.seconds(Interval.PREFILL), ledger.seconds(Interval.DECODE)
            lost_s = ledger.seconds(Interval.PREEMPTED)
            seen["e2e_request_latency_seconds"].observe(ledger.total_ns / 1e9)
            seen["request_queue_time_seconds"].observe(ledger.seconds(Interval.QUEUE))
            seen["request_inference_time_seconds"].observe(prefill_s + decode_s + lost_s)
            seen["request_prefill_time_seconds"].observe(prefill_s)
            seen["request_decode_time_seconds"].observe(decode_s)
            for interval in (Interval.FRONTEND, Interval.PREEMPTED, Interval.EGRESS):
                name = f"request_{interval.name.lower()}_time_seconds"
                seen[name].observe(ledger.seconds(interval))
            self._observe_two(ledger)
            seen["request_prompt_tokens"].observe(sample.prompt_tokens)
            seen["request_generation_tokens"].observe(sample.output_tokens)
            seen["request_params_max_tokens"].observe(sample.max_tokens)
            seen["request_num_preemptions"].observe(ledger.num_preemptions)
            computed = sample.prompt_tokens - sample.cached_tokens
            seen["request_prefill_kv_computed_tokens"].observe(computed)
            if (per_token_s := time_per_output_token_s(sample)) is not None:
                seen["request_time_per_output_token_seconds"].observe(per_token_s)

    def observe_rejection(self) -> None:
        """A request was refused because the queue is full, before an engine was chosen for it."""
        self._rejected += 1

    def observe_transfer(self, received: KvReceived) -> None:
        """KV came to this engine from another."""
        seconds = received.moving_s
        if received.num_bytes and seconds > 0:
            self._moves["kv_transfer_size_bytes"].observe(received.num_bytes)
            self._moves["kv_transfer_time_seconds"].observe(seconds)
            self._moves["kv_transfer_rate_bytes_per_second"].observe(received.num_bytes / seconds)

    def _observe_two(self, ledger: RequestLedger) -> None:
        """The intervals of a request that two engines served, or that waited for their room."""
        if any(ledger.spent_ns[interval] for interval in OF_TWO_ENGINES):
            for interval in OF_TWO_ENGINES:
                name = f"request_{interval.name.lower()}_time_seconds"
                self._moves[name].observe(ledger.seconds(interval))

    # ------------------------------------------------------------ exposition

    def collect(self) -> Iterator[Family]:
        """Families for prometheus_client, with this engine's samples."""
        stats = self._stats
        yield self._gauge("num_requests_running", "Running requests.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Waiting requests.", stats.num_waiting)
        yield self._gauge("num_requests_loading", "Requests that wait for KV.", stats.num_loading)
        yield self._gauge("kv_cache_usage_perc", "KV pool in use, 0 to 1.", stats.kv_usage)
        yield self._counter("num_preemptions", "Preemptions.", stats.num_preemptions)
        yield self._counter(
            "prefix_cache_queries",
            "Tokens looked up in the prefix cache.",
            stats.prefix_cache_queries,
        )
        yield self._counter(
            "prefix_cache_hits", "Tokens found in the prefix cache.", stats.prefix_cache_hits
        )
        if stats.spec_decode_num_drafts:
            yield from self._speculation(stats)
        yield self._counter("prompt_tokens", "Prompt tokens processed.", stats.prompt_tokens)
        yield self._counter(
            "prompt_tokens_cached", "Prompt tokens not computed.", self._prompt_tokens_cached
        )
        yield self._counter("generation_tokens", "Tokens generated.", stats.generation_tokens)
        yield self._by_label(
            "request_success", "Ended requests.", "finished_reason", self._finished
        )
        rejections = {"queue_full": self._rejected}
        yield self._by_label("admission_rejections", "Refused requests.", "reason", rejections)
        spent_s = {i.name.lower(): self._spent_ns[i] / 1e9 for i in Interval}
        yield self._by_label(
            "request_interval_seconds",
            "Where ended requests spent their time.",
            "interval",
            spent_s,
        )
        hands_over = self._ready is not None and self._ready.kv is not None
        shown = self._histograms | (self._moves if hands_over else {})
        for name, histogram in shown.items():
            family = HistogramMetricFamily(
                self._name(name), histogram.help_text, labels=list(self._labels)
            )
            family.add_metric(list(self._labels.values()), histogram.buckets(), histogram.sum)
            yield family
        if self._ready is not None:
            facts = {
                "block_size": str(self._ready.block_size),
                "num_gpu_blocks": str(self._ready.num_blocks),
                "engine": self._labels["engine"],
            }
            info = GaugeMetricFamily(
                self._name("cache_config_info"), "Sizes of the KV pool.", labels=list(facts)
            )
            info.add_metric(list(facts.values()), 1)
            yield info

    def _speculation(self, stats: EngineStats) -> Iterator[Family]:
        yield self._counter(
            "spec_decode_num_drafts",
            "Times that a request had drafts verified.",
            stats.spec_decode_num_drafts,
        )
        yield self._counter(
            "spec_decode_num_draft_tokens",
            "Draft tokens verified.",
            stats.spec_decode_num_draft_tokens,
        )
        yield self._counter(
            "spec_decode_num_accepted_tokens",
            "Draft tokens accepted.",
            stats.spec_decode_num_accepted_tokens,
        )

    def _name(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    def _gauge(self, name: str, help_text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(self._name(name), help_text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, help_text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(self._name(name), help_text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _by_label(
        self, name: str, help_text: str, label: str, values: dict[str, int] | dict[str, float]
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(self._name(name), help_text, labels=[*self._labels, label])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), key], value)
        return family


class Metrics(Collector):
    """The metrics of all engines of a server, in a registry of their own.

    Record in `engines[i]`. What concerns none, as a refused request, is counted in the first.
    """

    def __init__(
        self,
        *,
        model_name: str,
        prefix: str = "twostroke",
        num_engines: int = 1,
        max_model_len: int = 131072,
    ) -> None:
        self.engines: list[EngineMetrics] = []
        self.handoff: Callable[[], HandoffNumbers] | None = None  # where engines have roles
        self._prefix, self._model_name = prefix, model_name
        self._new_engine = partial(
            EngineMetrics, model_name=model_name, prefix=prefix, max_model_len=max_model_len
        )
        self.add_engine(num_engines - 1)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def add_engine(self, engine: int) -> None:
        """See to it that `engines` reaches as far as index `engine`."""
        while len(self.engines) <= engine:
            self.engines.append(self._new_engine(engine=len(self.engines)))

    def render(self) -> bytes:
        """The text that `/metrics` answers, of type CONTENT_TYPE."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Family]:
        """Each family once, with the samples of every engine."""
        families: dict[str, Family] = {}
        for engine in self.engines:
            for family in engine.collect():
                if family.name in families:
                    families[family.name].samples.extend(family.samples)
                else:
                    families[family.name] = family
        yield from families.values()
        if self.handoff is not None:
            yield from collect_handoff(self.handoff(), self._prefix, self._model_name)


def total_stats(engines: Sequence[EngineStats]) -> EngineStats:
    """Sums over engines; the KV usage is their mean."""
    names = EngineStats.__struct_fields__
    total = EngineStats(**{name: sum(getattr(it, name) for it in engines) for name in names})
    total.kv_usage /= len(engines)
    return total


def time_per_output_token_s(sample: SampleRecord) -> float | None:
    """Mean time between a sample's tokens; None with fewer than two."""
    ledger = sample.ledger
    if sample.output_tokens < 2 or ledger.first_token_ns is None or ledger.finished_ns is None:
        return None
    return (ledger.finished_ns - ledger.first_token_ns) / 1e9 / (sample.output_tokens - 1)
