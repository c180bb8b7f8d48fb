"""What is simulated, and what comes out: `simulate(scenario) -> Result`.

Scenario   engines by role, their costs and sizes, the links, the workload, the router's rules
Result     columns by request (arrival, TTFT, TPOT, intervals), timelines by engine, totals
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from twostroke.arrays import Float64s, Int32s, Int64s
from twostroke.config import SchedulerConfig
from twostroke.cost import BandwidthCurve, HostCost, StepCost
from twostroke.kv.sizing import KvLayout
from twostroke.router.dispatch import DispatchSettings, Role
from twostroke.twin.link import LinkUse
from twostroke.twin.transfers import Link
from twostroke.twin.workload import Workload

UNLIMITED = Link(bandwidth=BandwidthCurve((0.0,), (1e15,)))


@dataclass(frozen=True, kw_only=True)
class EngineGroup:
    """`count` engines alike: their role, the cost of a step, and what their scheduler is told.

    `config.num_blocks` counts the null block, as ever. `layout` says how many bytes a hand-off
    moves; its block size must be the config's. `steps_together`: they share the experts of their
    model, so a step of one is a step of all (`lockstep`). `plans_late`: a second step in
    flight has who comes until it begins, as in our engines, where they hand nothing over.
    """

    role: Role
    cost: StepCost
    config: SchedulerConfig
    layout: KvLayout
    count: int = 1
    host: HostCost = field(default_factory=HostCost)
    max_hold_share: float = 0.5
    steps_together: bool = False
    plans_late: bool = False

    @property
    def num_devices(self) -> int:
        return self.count * self.layout.tensor_parallel_size


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A deployment under a load. `until_s` ends it early: what has not ended by then has failed.

    With `fast_forward` off every step is taken singly: slower, and the same to the last bit.
    """

    engines: Sequence[EngineGroup]
    workload: Workload
    link: Link = UNLIMITED
    settings: DispatchSettings = field(default_factory=DispatchSettings)
    until_s: float = float("inf")
    fast_forward: bool = True
    record_timelines: bool = True
    name: str = ""

    @property
    def num_devices(self) -> int:
        return sum(group.num_devices for group in self.engines)


@dataclass(frozen=True, kw_only=True)
class EngineResult:
    """One engine over the run. `timeline` has `time_s`, `running`, `waiting`, `loading`,
    `kv_usage` and `hold_usage`; `busy_s` is the device's, `prefill_s` that in prompts' steps."""

    name: str
    role: Role
    timeline: dict[str, Float64s]
    busy_s: float
    prefill_s: float
    num_steps: int
    num_skipped: int
    num_preemptions: int
    num_blocks: int
    loaded_bytes: int
    loaded_messages: int


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a scenario. Columns have one entry a request, NaN where it never got so far.

    `intervals_s[i, interval]` are the seconds of the ledger. `itl_s` and `itl_counts`: the gaps
    between tokens, and how often each came. `changes`: (request, interval entered or -1, time) of
    every change, in order. `links`: bytes moved, seconds in use and rates over time, by link.
    """

    scenario: Scenario
    duration_s: float
    arrival_s: Float64s
    ttft_s: Float64s
    tpot_s: Float64s
    e2e_s: Float64s
    prompt_tokens: Int32s
    output_tokens: Int32s
    cached_tokens: Int32s
    num_preemptions: Int32s
    intervals_s: Float64s
    itl_s: Float64s
    itl_counts: Int64s
    peak_tokens_per_s: int
    errors: dict[int, str]
    changes: tuple[Int32s, Int32s, Float64s]
    engines: list[EngineResult]
    link_bytes: dict[str, float]
    link_busy_s: dict[str, float]
    links: dict[str, LinkUse]
    counters: dict[str, Any]
    wall_s: float

    @property
    def done(self) -> Any:
        """[requests] Which were answered in full."""
        return np.isfinite(self.e2e_s)

    @property
    def request_rate(self) -> float:
        """Requests answered a second."""
        return float(self.done.sum()) / self.duration_s if self.duration_s > 0 else 0.0


def simulate(scenario: Scenario, *, on_done: Callable[[int], None] = lambda count: None) -> Result:
    """Run a scenario to its end. `on_done` is called with the number of requests that ended.

    The same scenario gives the same result, bit for bit. Raises ConfigError for engines that
    cannot work together, and whatever the engines raise, which would be a bug.
    """
    from twostroke.twin.world import World

    return World(scenario, on_done=on_done).run()


def engine_name(index: int, groups: Sequence[EngineGroup]) -> str:
    """P0, P1, D0, E0: role and number."""
    role = groups[index].role
    nth = sum(group.role == role for group in groups[:index])
    return f"{ {'prefill': 'P', 'decode': 'D', 'both': 'E'}[role] }{nth}"


def link_name(key: object, groups: Sequence[EngineGroup]) -> str:
    """A link by its key in the network: the fabric, or the direction and the engine."""
    assert isinstance(key, tuple)
    if key == ("fabric",):
        return "fabric"
    return f"{engine_name(key[1], groups)} {key[0]}"
