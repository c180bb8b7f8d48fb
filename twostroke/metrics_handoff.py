"""Metrics of prefill and decode in engines of their own, and the numbers of the status line.

What engines count comes with `EngineStats`; what the router counts is handed over as
`HandoffNumbers` whenever somebody asks. Transport failures, expired leases and late hand-offs are
counters of their own: the first speak of the network, the second and third of capacity.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from twostroke.messages import EngineStats


@dataclass(frozen=True, kw_only=True)
class EngineRole:
    """What an engine is for, how it is, and how much it has worked since it started."""

    role: str
    state: str
    stats: EngineStats
    busy_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class HandoffNumbers:
    """What a router counts; totals since its start but for the first two."""

    num_waiting: int = 0  # requests that no engine has yet
    num_tickets: int = 0  # prompts kept on P until they are read
    decisions: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (where, reason)
    retries: Mapping[str, int] = field(default_factory=dict)
    recomputes: Mapping[str, int] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)  # of loads
    num_late: int = 0
    num_unknown_tickets: int = 0
    num_transfers: int = 0
    transfer_tokens: int = 0
    transfer_bytes: int = 0
    transfer_messages: int = 0
    transfer_s: float = 0.0
    engines: Mapping[int, EngineRole] = field(default_factory=dict)
    verdicts: Mapping[str, float] = field(default_factory=dict)  # 1: it calls for a change
    observed: Mapping[str, float] = field(default_factory=dict)  # what they rest on
    advised: tuple[int, int] | None = None  # prefill and decode engines, of those there are


Family = CounterMetricFamily | GaugeMetricFamily


def collect_handoff(numbers: HandoffNumbers, prefix: str, model_name: str) -> Iterator[Family]:
    """The families of a deployment whose engines have roles."""
    labels = {"model_name": model_name}

    def gauge(name: str, text: str, value: float) -> Family:
        family = GaugeMetricFamily(f"{prefix}:{name}", text, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family

    def counter(
        name: str, text: str, values: Iterable[tuple[tuple[str, ...], float]], *by: str
    ) -> Family:
        family = CounterMetricFamily(f"{prefix}:{name}", text, labels=[*labels, *by])
        for key, value in values:
            family.add_metric([*labels.values(), *key], value)
        return family

    def by_reason(name: str, text: str, values: Mapping[str, int]) -> Family:
        return counter(name, text, (((reason,), n) for reason, n in values.items()), "reason")

    it = numbers
    yield gauge("handoff_queue_depth", "Requests that wait in the router.", it.num_waiting)
    yield gauge("handoff_tickets", "Prompts kept on P until they are read.", it.num_tickets)
    yield counter(
        "routing_decisions",
        "Where requests were sent, and why.",
        it.decisions.items(),
        "where",
        "reason",
    )
    yield by_reason("handoff_retries", "Requests run again, by what had failed.", it.retries)
    yield by_reason(
        "handoff_recomputes", "Prompts prefilled where they decode, since a hand-off failed.",
        it.recomputes,
    )  # fmt: skip
    yield by_reason("kv_transfer_failures", "Loads that failed.", it.failures)
    yield counter("handoffs_late", "Hand-offs over their deadline.", [((), it.num_late)])
    yield counter(
        "unknown_tickets", "Tickets that nobody waited for.", [((), it.num_unknown_tickets)]
    )
    yield counter("kv_transfers", "Loads that moved KV.", [((), it.num_transfers)])
    yield counter("kv_transfer_tokens", "Tokens whose KV moved.", [((), it.transfer_tokens)])
    yield counter("kv_transfer_bytes", "Bytes of KV that moved.", [((), it.transfer_bytes)])
    yield counter("kv_transfer_messages", "Reads that it took.", [((), it.transfer_messages)])
    yield counter("kv_transfer_seconds", "Time spent in reads of KV.", [((), it.transfer_s)])
    verdicts = GaugeMetricFamily(
        f"{prefix}:advice",
        "1: this verdict of `twostroke diagnose` calls for a change, NaN: it cannot be told.",
        labels=[*labels, "verdict"],
    )
    for name, value in it.verdicts.items():
        verdicts.add_metric([*labels.values(), name], value)
    yield verdicts
    observed = GaugeMetricFamily(
        f"{prefix}:observed",
        "What the verdicts rest on: figures of the last minute, by their names in an observation.",
        labels=[*labels, "figure"],
    )
    for name, value in it.observed.items():
        observed.add_metric([*labels.values(), name], value)
    yield observed
    if it.advised is not None:
        yield gauge("advised_prefill_engines", "Of those there are, for prefill.", it.advised[0])
        yield gauge("advised_decode_engines", "Of those there are, for decode.", it.advised[1])
    yield from _of_engines(it.engines, prefix, labels)


def _of_engines(
    engines: Mapping[int, EngineRole], prefix: str, labels: Mapping[str, str]
) -> Iterator[Family]:
    """What is told of each engine."""

    def family(
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str, text: str, *more: str
    ) -> Family:
        return kind(f"{prefix}:{name}", text, labels=[*labels, "engine", *more])

    roles = family(GaugeMetricFamily, "engine_role", "1 for what an engine is.", "role", "state")
    busy = family(CounterMetricFamily, "engine_busy_seconds", "Time spent in steps.")
    families = {
        name: family(
            GaugeMetricFamily if name in _GAUGES else CounterMetricFamily, *_OF_STATS[name]
        )
        for name in _OF_STATS
    }
    for index, engine in engines.items():
        values = [*labels.values(), str(index)]
        roles.add_metric([*values, engine.role, engine.state], 1)
        busy.add_metric(values, engine.busy_s)
        for name, its in families.items():
            its.add_metric(values, getattr(engine.stats, name))
    yield roles
    yield busy
    yield from families.values()


_GAUGES = ("num_holds", "hold_usage")
_OF_STATS = {
    "num_holds": ("kv_holds", "Prompts that an engine keeps for others."),
    "hold_usage": ("kv_hold_usage", "Share of the pool that these take, 0 to 1."),
    "num_expired_leases": ("kv_expired_leases", "Prompts let go because nobody came for them."),
    "num_failed_loads": ("kv_failed_loads", "Loads that failed on an engine."),
    "num_unknown_transfers": ("kv_unknown_transfers", "Messages about transfers nobody knows."),
}


def load_ratio(before: HandoffNumbers, now: HandoffNumbers) -> float | None:
    """How busy prefill engines were, for each unit of time that decode engines were.

    Over the time between two looks; 1 is balanced, above it prefill is the bottleneck. None when
    one of them did nothing or there are none.
    """
    shares = []
    for role in ("prefill", "decode"):
        grown = [
            engine.busy_s - before.engines[index].busy_s
            for index, engine in now.engines.items()
            if engine.role == role and index in before.engines
        ]
        shares.append(sum(grown) / len(grown) if grown else 0.0)
    prefill, decode = shares
    return prefill / decode if prefill > 0 and decode > 0 else None


def status_parts(before: HandoffNumbers, now: HandoffNumbers, elapsed_s: float) -> list[str]:
    """What the status line adds: totals by role, the queue in the router, and what moved."""
    parts = []
    for role, short in (("prefill", "P"), ("decode", "D"), ("both", "P+D")):
        its = [e.stats for e in now.engines.values() if e.role == role and e.state != "gone"]
        if its:
            usage = sum(stats.kv_usage for stats in its) / len(its)
            running = sum(stats.num_running for stats in its)
            waiting = sum(stats.num_waiting for stats in its)
            parts.append(f"{len(its)} {short} {running} running {waiting} waiting {usage:.0%} KV")
    parts.append(f"hand-offs queued {now.num_waiting} held {now.num_tickets}")
    moved = now.transfer_bytes - before.transfer_bytes
    if moved and elapsed_s > 0:
        parts.append(f"KV moved {moved / elapsed_s / 1e9:.2f} GB/s")
    if (ratio := load_ratio(before, now)) is not None:
        parts.append(f"load P:D {ratio:.2f}")
    if failed := sum(now.failures.values()) - sum(before.failures.values()):
        parts.append(f"failed loads {failed}")
    return parts
