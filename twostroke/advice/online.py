"""The same verdicts in a running router: what engines report is summed up, and judged now and then.

Recording costs a few additions a step and a request. Every `every_s` the sums since about
`window_s` ago become an `Observation`, which takes the verdicts a fraction of a millisecond. No
I/O: the caller shows the result where it likes.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from twostroke.advice import figures
from twostroke.advice.closed_form import best_split
from twostroke.advice.figures import over
from twostroke.advice.observation import UNKNOWN, Observation
from twostroke.advice.verdict import Verdict
from twostroke.advice.verdicts import WORTH_CHANGING, judge
from twostroke.clock import Clock
from twostroke.kv_messages import KvLink, row_bytes
from twostroke.messages import EngineOutputs, EngineReady

Role = Literal["prefill", "decode", "both"]

FEWEST_STEPS = 30  # with different batches, for a slope over them
FEWEST_TRANSFERS = 5  # between two looks, for a rate of the links then
FEWEST_RATES = 3  # for the worst of them


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The verdicts of one moment, and the (P, D) that is advised; None: not known yet."""

    seen: Observation
    verdicts: tuple[Verdict, ...]
    ratio: tuple[int, int] | None

    def gauges(self) -> dict[str, float]:
        """1 for a verdict that calls for action, 0 for one that does not, NaN where unknown."""
        return {
            it.name: UNKNOWN if it.calls_for_action is None else float(it.calls_for_action)
            for it in self.verdicts
        }


@dataclass
class _Engine:
    role: Role
    ready: EngineReady | None = None
    num_preemptions: int = 0
    reads_until_s: float = 0.0


class SteadyRatio:
    """The advised P:D, which changes only for good reason.

    Another split of the same engines must carry WORTH_CHANGING times as much as the advised one at
    each look for `patience_s` (switching a role drains an engine, and load comes in waves).
    """

    def __init__(self, patience_s: float = 60.0) -> None:
        self._patience_s = patience_s
        self._advised: tuple[int, int] | None = None
        self._better_since_s: float | None = None

    def update(
        self, now_s: float, counts: tuple[int, int], prefill_per_s: float, decode_per_s: float
    ) -> tuple[int, int] | None:
        """What to advise, given the engines there are and what one of each carries."""
        if self._advised is None or sum(self._advised) != sum(counts):
            self._advised, self._better_since_s = counts, None
        if not (prefill_per_s > 0 and decode_per_s > 0):
            return self._advised
        best = best_split(sum(counts), prefill_per_s, decode_per_s)

        def carried(split: tuple[int, int]) -> float:
            return min(split[0] * prefill_per_s, split[1] * decode_per_s)

        if carried(best) < WORTH_CHANGING * carried(self._advised):
            self._better_since_s = None
        elif self._better_since_s is None:
            self._better_since_s = now_s
        elif now_s - self._better_since_s >= self._patience_s:
            self._advised, self._better_since_s = best, None
        return self._advised


class Advisor:
    """Sums up what engines and requests report. Engines are known by their index."""

    def __init__(
        self,
        clock: Clock,
        *,
        window_s: float = 60.0,
        every_s: float = 5.0,
        streams: bool = False,
    ) -> None:
        self._clock = clock
        self._window_s, self._every_s = window_s, every_s
        self._streams = streams
        self._engines: dict[int, _Engine] = {}
        self._links: dict[tuple[int, str], KvLink] = {}
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._past: deque[tuple[float, dict[str, float]]] = deque([(clock.now(), {})])
        self._steady = SteadyRatio()
        self.advice: Advice | None = None

    # ------------------------------------------------------------ what it is told

    def set_engine(self, engine: int, role: Role, ready: EngineReady | None = None) -> None:
        """An engine is there, is ready, or has another role now."""
        it = self._engines.setdefault(engine, _Engine(role))
        it.role = role
        it.ready = ready or it.ready

    def engine_gone(self, engine: int) -> None:
        """An engine has died or left."""
        self._engines.pop(engine, None)
        self._links = {key: link for key, link in self._links.items() if key[0] != engine}

    def on_outputs(self, engine: int, outputs: EngineOutputs) -> None:
        """What an engine did in a step."""
        it = self._engines.get(engine)
        if it is None:
            return
        sums, role = self._sums, it.role
        if (step := outputs.step) is not None:
            sums[f"{role} busy_s"] += step.seconds
            sums[f"{role} tokens"] += step.num_tokens
            if role == "decode" and step.num_tokens == step.num_rows:
                for power, name in enumerate(("n", "x", "xx")):
                    sums[f"steps {name}"] += step.num_rows**power
                sums["steps y"] += step.seconds
                sums["steps xy"] += step.num_rows * step.seconds
        if (stats := outputs.stats) is not None:
            sums[f"{role} looks"] += 1
            for name in ("num_running", "num_waiting", "num_loading", "kv_usage", "hold_usage"):
                sums[f"{role} {name}"] += getattr(stats, name)
            if role == "decode":
                sums["preemptions"] += max(0, stats.num_preemptions - it.num_preemptions)
            it.num_preemptions = stats.num_preemptions
        for received in outputs.kv_received:
            if received.num_bytes and not received.error:
                sums["transfers"] += 1
                sums["transfer bytes"] += received.num_bytes
                sums["transfer messages"] += received.num_messages
                sums["read_s"] += received.moving_s
                # Reads side by side share the link: its rate is bytes over the time of any.
                started_s = max(received.started_s, it.reads_until_s)
                sums["link busy_s"] += max(0.0, received.ended_s - started_s)
                it.reads_until_s = max(it.reads_until_s, received.ended_s)
        for link in outputs.kv_links:
            if not link.error:
                self._links[engine, link.engine_id] = link

    def on_ended(
        self,
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        spent_s: Mapping[str, float],
    ) -> None:
        """A request ended well; `spent_s` is its ledger, by the interval's name in lower case."""
        sums = self._sums
        sums["ended"] += 1
        sums["prompt"] += prompt_tokens
        sums["cached"] += cached_tokens
        sums["output"] += output_tokens
        for name, seconds in spent_s.items():
            sums[f"spent {name}"] += seconds

    # ------------------------------------------------------------ what it says

    @property
    def is_due(self) -> bool:
        """Whether it is time to judge anew."""
        return self._clock.now() - self._past[-1][0] >= self._every_s

    def update(self) -> Advice | None:
        """The advice, judged anew if that is due. Call it as often as you like."""
        now_s = self._clock.now()
        if not self.is_due:
            return self.advice
        while len(self._past) > 1 and self._past[1][0] <= now_s - self._window_s:
            self._past.popleft()
        seen = self.observe(now_s)
        self._past.append((now_s, dict(self._sums)))
        ratio = None
        if seen.num_prefill >= 1 and seen.num_decode >= 1:
            ratio = self._steady.update(
                now_s,
                (int(seen.num_prefill), int(seen.num_decode)),
                figures.prefill_capacity_per_s(seen),
                figures.decode_capacity_per_s(seen),
            )
        self.advice = Advice(seen=seen, verdicts=tuple(judge(seen)), ratio=ratio)
        return self.advice

    def observe(self, now_s: float) -> Observation:
        """What was seen in the window that ends now."""
        since_s, before = self._past[0]
        window_s = now_s - since_s
        grown = defaultdict(float, {k: v - before.get(k, 0.0) for k, v in self._sums.items()})
        counts = {
            role: sum(it.role == role for it in self._engines.values())
            for role in ("prefill", "decode")
        }
        ended = grown["ended"]

        def spent(name: str) -> float:
            return over(grown[f"spent {name}"], ended)

        def gauge(role: str, name: str) -> float:
            return over(grown[f"{role} {name}"], grown[f"{role} looks"])

        transfers = grown["transfers"]
        return Observation(
            source="router",
            window_s=window_s,
            num_prefill=counts["prefill"],
            num_decode=counts["decode"],
            kv_streams=float(self._streams),
            requests_per_s=over(ended, window_s),
            prompt_tokens=over(grown["prompt"], ended),
            cached_tokens=over(grown["cached"], ended),
            output_tokens=over(grown["output"], ended),
            prefill_busy=over(grown["prefill busy_s"], window_s * counts["prefill"]),
            prefill_queue_s=spent("queue"),
            prefill_s=spent("prefill"),
            prefill_waiting=gauge("prefill", "num_waiting"),
            prefill_running=gauge("prefill", "num_running"),
            prefill_kv_usage=gauge("prefill", "kv_usage"),
            prefill_pinned=gauge("prefill", "hold_usage"),
            prefill_tokens_per_s=over(grown["prefill tokens"], grown["prefill busy_s"]),
            room_wait_s=spent("held"),
            transfer_s=spent("transfer"),
            read_s=over(grown["read_s"], transfers),
            transfer_messages=over(grown["transfer messages"], transfers),
            transfer_bytes=over(grown["transfer bytes"], transfers),
            transfer_bytes_per_s=over(grown["transfer bytes"], window_s),
            decode_queue_s=spent("decode_queue"),
            decode_s=spent("decode"),
            preempted_s=spent("preempted"),
            tpot_s=over(grown["spent decode"], grown["output"] - ended),
            decode_busy=over(grown["decode busy_s"], window_s * counts["decode"]),
            decode_running=over(grown["steps x"], grown["steps n"]),
            decode_loading=gauge("decode", "num_loading"),
            decode_waiting=gauge("decode", "num_waiting"),
            decode_kv_usage=gauge("decode", "kv_usage"),
            decode_elasticity=_elasticity(grown),
            preemptions_per_request=over(grown["preemptions"], ended),
            **self._of_links(),
            **self._of_engines(),
        )

    def _of_links(self) -> dict[str, float]:
        links = list(self._links.values())
        rates = [link.bytes_per_s for link in links if link.bytes_per_s > 0]
        readers = {engine for engine, _ in self._links}
        return {
            "link_bytes_per_s": over(sum(rates), len(rates)),
            "link_low_bytes_per_s": self._low_bytes_per_s(),
            "link_message_s": over(sum(link.message_s for link in links), len(links)),
            "num_links": float(len(readers)) if readers else UNKNOWN,
        }

    def _low_bytes_per_s(self) -> float:
        """What a link did, while it moved anything, in the worst tenth of the time between looks.

        Not known where D reads chunk by chunk: there it waits for P, not for the link.
        """
        rates = []
        for (_, before), (_, after) in pairwise(self._past):
            moved = after.get("transfers", 0.0) - before.get("transfers", 0.0)
            if moved >= FEWEST_TRANSFERS and not self._streams:
                num_bytes = after["transfer bytes"] - before.get("transfer bytes", 0.0)
                busy_s = after["link busy_s"] - before.get("link busy_s", 0.0)
                rates.append(over(num_bytes, busy_s))
        return sorted(rates)[len(rates) // 10] if len(rates) >= FEWEST_RATES else UNKNOWN

    def _of_engines(self) -> dict[str, float]:
        """Sizes that engines tell when they are ready; 0 and None are those they do not tell."""

        def told(role: Role, value: Callable[[EngineReady], float]) -> float:
            found = [
                value(it.ready) for it in self._engines.values() if it.role == role and it.ready
            ]
            found = [it for it in found if it > 0]
            return over(sum(found), len(found))

        facts = {
            "prefill_pin_limit": told("prefill", lambda it: it.max_hold_share),
            "decode_max_num_seqs": told("decode", lambda it: float(it.max_num_seqs)),
            "decode_pool_tokens": told("decode", lambda it: (it.num_blocks - 1.0) * it.block_size),
        }
        its = [it.ready.kv for it in self._engines.values() if it.role == "decode" and it.ready]
        layouts = [kv.layout for kv in its if kv is not None]
        if layouts:
            it = layouts[0]
            tp = it.tensor_parallel_size
            heads = tp * max(1, -(-it.num_kv_heads // tp))
            facts["kv_token_bytes"] = 2.0 * it.num_layers * heads * row_bytes(it.dtype, it.head_dim)
            facts |= {"decode_tp": float(tp), "num_kv_heads": float(it.num_kv_heads)}
        return facts


def _elasticity(sums: Mapping[str, float]) -> float:
    """Of t = a + b B by least squares over the window's decode steps: b B / t at their means."""
    n, x, xx = sums["steps n"], sums["steps x"], sums["steps xx"]
    y, xy = sums["steps y"], sums["steps xy"]
    spread = n * xx - x * x
    # Batches that vary by less than a tenth say nothing about a slope.
    if n < FEWEST_STEPS or spread <= 0.01 * x * x or y <= 0:
        return UNKNOWN
    slope = (n * xy - x * y) / spread
    return min(1.0, max(0.0, slope * x / y))
