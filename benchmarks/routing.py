"""Which engine gets a request: our rule beside others, on a virtual clock with the real core.

    python benchmarks/routing.py [--engines 4] [--requests 2000] [--json]

Four engines with a core and a KV pool of 64,000 tokens each; a step takes 8 ms and 40 us a token.
Requests come at random (Poisson) and get 100 tokens each. Rules: turn by turn; vLLM 0.22.1's score
(requests in flight, and its term for waiting ones when the pool is full; what the engines say is
heard every 100 ms); ours without affinity; ours. Workloads:

mixed      prompts of 500 tokens on average, a few very long; nothing shared
prefixes   64 prefixes of 1,500 tokens, some far more popular, and 100 tokens of one's own
one        the same prefix of 3,000 tokens for everybody
"""

import argparse
import heapq
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from twostroke.clock import VirtualClock
from twostroke.config import SchedulerConfig
from twostroke.core.loop import EngineCore
from twostroke.messages import AddRequest, EngineStats, Int32s, SamplingParams
from twostroke.router.policy import RoutingPolicy
from twostroke.testing.fake_executor import FakeExecutor

STEP_S, TOKEN_S = 8e-3, 40e-6
STALE_S = 0.1
OUTPUT_TOKENS = 100
RATES = {"mixed": 90.0, "prefixes": 70.0, "one": 110.0}  # requests a second to four engines
CONFIG = SchedulerConfig(
    num_blocks=4001,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    max_model_len=16_384,
    async_scheduling=False,
)


class Rule(Protocol):
    """What a way to choose has in common with RoutingPolicy."""

    def keys_of(self, token_ids: Int32s) -> Sequence[int]: ...
    def choose(self, keys: Sequence[int]) -> int: ...
    def sent(self, handle: int, engine: int, tokens: int, keys: Sequence[int]) -> None: ...
    def first_token(self, handle: int) -> None: ...
    def ended(self, handle: int) -> None: ...
    def engine_stats(self, engine: int, stats: EngineStats) -> None: ...


class Turns:
    """One engine after the other."""

    def __init__(self, num_engines: int) -> None:
        self._turn = itertools.cycle(range(num_engines))

    def keys_of(self, token_ids: Int32s) -> Sequence[int]:
        return ()

    def choose(self, keys: Sequence[int]) -> int:
        return next(self._turn)

    def sent(self, handle: int, engine: int, tokens: int, keys: Sequence[int]) -> None:
        pass

    def first_token(self, handle: int) -> None:
        pass

    def ended(self, handle: int) -> None:
        pass

    def engine_stats(self, engine: int, stats: EngineStats) -> None:
        pass


class Counts(Turns):
    """vLLM's score; what the engines say is heard every STALE_S seconds."""

    def __init__(self, num_engines: int, clock: VirtualClock) -> None:
        self._clock = clock
        self._count = num_engines
        self._where: dict[int, int] = {}
        self._in_flight = [0] * num_engines
        self._said = [EngineStats() for _ in range(num_engines)]
        self._heard = [EngineStats() for _ in range(num_engines)]
        self._heard_s = 0.0
        self._first = 0

    def choose(self, keys: Sequence[int]) -> int:
        if self._clock.now() - self._heard_s >= STALE_S:
            self._heard, self._heard_s = list(self._said), self._clock.now()

        def score(engine: int) -> float:
            heard = self._heard[engine]
            count = max(self._in_flight[engine], heard.num_waiting + heard.num_running)
            return count + heard.num_waiting * 6 * max(0.0, heard.kv_usage - 0.5)

        self._first = (self._first + 1) % self._count
        return min(((self._first + i) % self._count for i in range(self._count)), key=score)

    def sent(self, handle: int, engine: int, tokens: int, keys: Sequence[int]) -> None:
        self._where[handle] = engine
        self._in_flight[engine] += 1

    def ended(self, handle: int) -> None:
        self._in_flight[self._where.pop(handle)] -= 1

    def engine_stats(self, engine: int, stats: EngineStats) -> None:
        self._said[engine] = stats


@dataclass
class Seen:
    arrived_s: dict[int, float] = field(default_factory=dict)
    first_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    sent: list[int] = field(default_factory=list)


class Engine:
    """A core, and when its running step ends."""

    def __init__(self, clock: VirtualClock) -> None:
        self.core = EngineCore(CONFIG, clock)
        self.executor = FakeExecutor(token=lambda request_id, position: 1)

    def begin(self) -> float | None:
        """Start a step; returns its length in seconds."""
        plan = self.core.begin()
        if plan is None:
            return None
        self.executor.submit(plan)
        self.executor.plans.clear()
        return STEP_S + TOKEN_S * int(plan.num_scheduled.sum())


def prompts(workload: str, count: int, rng: np.random.Generator) -> list[Int32s]:
    def fresh(length: int) -> Int32s:
        return rng.integers(2, 50_000, length).astype(np.int32)

    if workload == "mixed":
        lengths = np.clip(rng.lognormal(np.log(500) - 0.72, 1.2, count), 8, 12_000).astype(int)
        return [fresh(length) for length in lengths]
    prefixes = [fresh(3000)] if workload == "one" else [fresh(1500) for _ in range(64)]
    popularity = 1 / np.arange(1, len(prefixes) + 1)
    chosen = rng.choice(len(prefixes), count, p=popularity / popularity.sum())
    return [np.concatenate([prefixes[i], fresh(100)]) for i in chosen]


def simulate(rule: Rule, num_engines: int, clock: VirtualClock, work: list[Int32s], rate: float):
    """Run all of `work` and say what was seen."""
    rng = np.random.default_rng(1)
    engines = [Engine(clock) for _ in range(num_engines)]
    seen = Seen(sent=[0] * num_engines)
    arrivals = np.cumsum(rng.exponential(1 / rate, len(work)))
    events: list[tuple[float, int, int]] = [(t, 1, i) for i, t in enumerate(arrivals.tolist())]
    heapq.heapify(events)
    busy = [False] * num_engines
    waiting_first = set()

    def start(index: int) -> None:
        if not busy[index] and (length_s := engines[index].begin()) is not None:
            busy[index] = True
            heapq.heappush(events, (clock.now() + length_s, 0, index))

    def finish(index: int) -> None:
        busy[index] = False
        outputs = engines[index].core.finish(engines[index].executor.collect())
        if outputs.stats is not None:
            rule.engine_stats(index, outputs.stats)
        for handle in outputs.handles.tolist():
            if handle in waiting_first:
                waiting_first.discard(handle)
                rule.first_token(handle)
                seen.first_s.append(clock.now() - seen.arrived_s[handle])
        seen.cached_tokens += sum(prefill.cached_tokens for prefill in outputs.prefills)
        for end in outputs.finished:
            rule.ended(end.handle)
            seen.end_s.append(clock.now() - seen.arrived_s[end.handle])

    while events:
        time_s, is_arrival, index = heapq.heappop(events)
        clock.advance_to(time_s)
        if is_arrival:
            tokens = work[index]
            keys = rule.keys_of(tokens)
            engine = rule.choose(keys)
            rule.sent(index, engine, len(tokens), keys)
            seen.sent[engine] += 1
            seen.arrived_s[index] = time_s
            waiting_first.add(index)
            engines[engine].core.add(
                AddRequest(
                    handle=index,
                    request_id=str(index),
                    prompt_token_ids=tokens,
                    params=SamplingParams(),
                    max_tokens=OUTPUT_TOKENS,
                )
            )
            start(engine)
        else:
            finish(index)
            start(index)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for workload, rate in RATES.items():
        work = prompts(workload, options.requests, np.random.default_rng(0))
        for name in ("turns", "counts", "no affinity", "ours"):
            clock, count = VirtualClock(), options.engines
            rule: Rule = {
                "turns": lambda n=count: Turns(n),
                "counts": lambda n=count, c=clock: Counts(n, c),
                "no affinity": lambda n=count: RoutingPolicy(n, affinity=False),
                "ours": lambda n=count: RoutingPolicy(n),
            }[name]()
            seen = simulate(rule, count, clock, work, rate * count / 4)
            assert len(seen.end_s) == len(work)
            first_ms = np.array(seen.first_s) * 1e3
            rows.append(
                {
                    "workload": workload,
                    "rule": name,
                    "first_token_mean_ms": round(float(first_ms.mean())),
                    "first_token_p99_ms": round(float(np.percentile(first_ms, 99))),
                    "latency_mean_ms": round(float(np.mean(seen.end_s)) * 1e3),
                    "cached_percent": round(100 * seen.cached_tokens / sum(map(len, work)), 1),
                    "busiest_to_mean": round(max(seen.sent) * count / len(work), 2),
                }
            )
    if options.json:
        print(json.dumps(rows))
        return
    print("| " + " | ".join(rows[0]) + " |")
    print("|---" * len(rows[0]) + "|")
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")


if __name__ == "__main__":
    main()
