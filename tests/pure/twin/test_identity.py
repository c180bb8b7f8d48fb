"""The twin takes the decisions of the real engine, plan by plan.

Once beside a core that is driven as `proc.core_main` drives it, around an executor that checks
every plan, and once against recorded decisions of vLLM's scheduler.
"""

import math
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.pure.twin.deployments import LAYOUT, group
from tests.replay import Replay, load_directory
from twostroke.clock import VirtualClock
from twostroke.config import SchedulerConfig
from twostroke.core.loop import EngineCore
from twostroke.cost import LinearStepCost, StepWork
from twostroke.messages import AddRequest, SamplingParams
from twostroke.testing.fake_executor import FakeExecutor
from twostroke.twin.scenario import Scenario
from twostroke.twin.workload import Workload, from_spec
from twostroke.twin.world import World

DATA = Path(__file__).parents[2] / "data"
COST = LinearStepCost(base_s=0.004, token_s=2e-5, row_s=1e-5, attended_s=1e-9)


class Process:
    """`CoreProcess._loop` on a clock of its own: begin, submit, collect, take inbox, finish.

    With `extends` who comes is put into the second step in flight as long as that has not begun.
    """

    def __init__(self, config: SchedulerConfig, load: Workload, *, extends: bool = False) -> None:
        self.extends = extends
        self.clock = VirtualClock()
        self.core = EngineCore(config, self.clock, check=not extends)
        self.executor = FakeExecutor(
            block_size=config.block_size,
            token=lambda name, position: load.output_value(int(name)),
        )
        self.depth = 2 if config.async_scheduling else 1
        self.load = load
        self.inbox = list(range(len(load)))
        self.ends: list[float] = []  # of the plans in flight
        self.last_end_s = 0.0
        self.num_extended = 0

    def take_inbox(self, *, wait: bool) -> None:
        arrivals = self.load.arrival_s
        if wait:
            self.clock.advance_to(max(self.clock.now(), float(arrivals[self.inbox[0]])))
        while self.inbox and arrivals[self.inbox[0]] <= self.clock.now():
            index = self.inbox.pop(0)
            self.core.add(
                AddRequest(
                    handle=index,
                    request_id=str(index),
                    prompt_token_ids=self.load.prompt(index),
                    params=SamplingParams(temperature=0.0, ignore_eos=True),
                    max_tokens=int(self.load.output_tokens[index]),
                    arrival_s=float(arrivals[index]),
                )
            )
        self.core.take_outputs()

    def run(self) -> list:
        core = self.core
        while core.num_in_flight or core.has_work() or self.inbox:
            self.take_inbox(wait=not core.num_in_flight and not core.has_work())
            plan = core.begin()
            if plan is not None:
                self.executor.submit(plan)
                self.ends.append(self.end_of(plan))
                if len(plan.slots) and core.num_in_flight < self.depth:
                    continue
            if core.num_in_flight:
                end_s = max(self.clock.now(), self.ends.pop(0))
                while self.extends and self.next_arrival_s <= end_s:
                    self.clock.advance_to(max(self.clock.now(), self.next_arrival_s))
                    self.take_inbox(wait=False)
                    self.extend(end_s)
                self.clock.advance_to(end_s)
                result = self.executor.collect()
                self.take_inbox(wait=False)
                core.finish(result)
        return self.executor.plans

    @property
    def next_arrival_s(self) -> float:
        return float(self.load.arrival_s[self.inbox[0]]) if self.inbox else math.inf

    def extend(self, start_s: float) -> None:
        """Put who has come into the plan that begins at `start_s`."""
        if self.core.num_in_flight == 2 and (plan := self.core.extend()) is not None:
            self.num_extended += 1
            self.executor.recall()
            self.executor.submit(plan)
            self.last_end_s = start_s
            self.ends[-1:] = [self.end_of(plan)]

    def end_of(self, plan) -> float:
        seconds = 0.0
        if len(plan.slots):
            samples = int(plan.samples.sum())
            seconds = COST.step_s(StepWork.of_rows(plan.num_computed, plan.num_scheduled, samples))
        self.last_end_s = max(self.last_end_s, self.clock.now()) + seconds
        return self.last_end_s


def plans_of_twin(
    config: SchedulerConfig, load: Workload, cost=COST, *, fast_forward=False, late=False
):
    own = msgspec.to_builtins(config)
    layout = replace(LAYOUT, block_size=config.block_size)
    world = World(
        Scenario(
            engines=[replace(group("both", cost=cost, layout=layout, **own), plans_late=late)],
            workload=load,
            fast_forward=fast_forward,
        )
    )
    plans: list = []
    world.engines[0].on_plan = plans.append
    result = world.run()
    return plans, result


def text_of(plan) -> bytes:
    return msgspec.msgpack.encode(plan, enc_hook=lambda array: array.tolist())


@pytest.mark.parametrize("how", ["async", "async, extended", "sync"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [90, 400])
def test_plans_are_those_of_the_process(how, caching, num_blocks):
    extends = how.endswith("extended")
    config = SchedulerConfig(
        num_blocks=num_blocks,
        max_num_seqs=6,
        max_num_batched_tokens=256,
        max_model_len=1200,
        enable_prefix_caching=caching,
        async_scheduling=how != "sync",
    )
    load = from_spec(
        "gamma:30/s,cv=2,in=lognormal(150,1),out=lognormal(40,1),n=60,prefix=40,prefixes=2", seed=5
    )
    process = Process(config, load, extends=extends)
    expected = process.run()
    plans, _ = plans_of_twin(config, load, late=extends)
    assert len(plans) == len(expected)
    for ours, theirs in zip(plans, expected, strict=True):
        assert text_of(ours) == text_of(theirs)
    assert extends == (process.num_extended > 0)


# ---------------------------------------------------------------- recorded decisions


_FEATURES = (
    "external",
    "send",
    "grammar_ready_step",
    "abort_step",
    "priority",
    "skip_prefix_cache",
)
_OURS = (
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_scheduled_tokens",
    "max_model_len",
    "long_prefill_token_threshold",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "async_scheduling",
    "reserve_full_isl",
    "sliding_window",
)


def is_plain(workload, trace) -> bool:
    """Whether a twin, whose answers have a given length and nothing else, can play it."""
    config = trace["config"]
    specs = workload["requests"]
    stops = any("eos_at" in s or "stop_token_at" in s or s.get("min_tokens") for s in specs)
    return not (
        config["num_spec_tokens"]
        or config["policy"] != "fcfs"
        or trace["stuck"]
        or workload.get("reset_prefix_cache")
        or any(name in spec for spec in specs for name in _FEATURES)
        or any(spec.get("cache_salt") for spec in specs)
        or any("out_of" in segment for spec in specs for segment in spec.get("prompt", ()))
        or (stops and config["async_scheduling"])
    )


def load_of(workload, trace) -> tuple[Workload, list[str]]:
    """Its requests, each arriving just before its step, where a step takes a second."""
    specs = sorted(workload["requests"], key=lambda spec: spec.get("arrival_step", 0))
    model = Replay(workload)._model
    prompts = [np.array(model.prompt(spec["id"]), np.int32) for spec in specs]
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    # A step that begins just before k ends just before k + 1; those for k + 1 come before that.
    steps = np.array([spec.get("arrival_step", 0) for spec in specs])
    outputs = [trace["outputs"][spec["id"]]["n"] for spec in specs]
    n = len(specs)
    load = Workload(
        "recorded",
        1 + steps - 1e-6 * (steps + 1),
        lengths,
        np.array(outputs, np.int32),
        np.concatenate(prompts),
        np.ones(int(lengths.sum()), np.int32),
        np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        np.full(n, -1, np.int32),
        np.zeros(n),
    )
    return load, [spec["id"] for spec in specs]


def recorded():
    workloads = dict(load_directory(DATA / "scheduler_workloads.tar.xz"))
    traces = dict(load_directory(DATA / "scheduler_traces.tar.xz"))
    return [
        (name, workload, traces[name])
        for name, workload in workloads.items()
        if is_plain(workload, traces[name])
    ]


def test_recorded_decisions():
    cases = recorded()
    assert len(cases) == 34
    for name, workload, trace in cases:
        settings = {key: trace["config"][key] for key in _OURS}
        config = SchedulerConfig(num_blocks=trace["config"]["num_gpu_blocks"], **settings)
        load, ids = load_of(workload, trace)
        plans, _ = plans_of_twin(config, load, LinearStepCost(base_s=1.0))
        taken = [rows_of(plan, seats) for plan, seats in with_seats(plans, ids)]
        expected = [step["sched"] for step in trace["steps"] if step.get("sched")]
        assert [rows for rows in taken if rows] == expected, name


def with_seats(plans, ids):
    """Each plan with who sits where."""
    seats: dict[int, str] = {}
    for plan in plans:
        for new in plan.new:
            seats[new.slot] = ids[int(new.request_id)]
        yield plan, dict(seats)


def rows_of(plan, seats):
    rows = zip(plan.slots.tolist(), plan.num_scheduled.tolist(), strict=True)
    return {seats[slot]: count for slot, count in rows}
