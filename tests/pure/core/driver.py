"""EngineCore around a FakeExecutor, driven as a process drives it, with everything checked."""

from typing import Any

import numpy as np

from twostroke.clock import VirtualClock
from twostroke.config import SchedulerConfig
from twostroke.core.executor import Executor
from twostroke.core.loop import EngineCore
from twostroke.messages import (
    AddRequest,
    EngineOutputs,
    EventKind,
    Finished,
    SamplingParams,
    StepPlan,
    StepResult,
)
from twostroke.testing.fake_executor import FakeExecutor, simulated_token

SMALL = {
    "block_size": 4,
    "num_blocks": 17,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
}


def make_request(handle: int, prompt: int | list[int] = 8, max_tokens: int = 4, **fields: Any):
    """A request of `prompt` tokens (or these); sampling fields go into its params."""
    own = {name: fields.pop(name) for name in list(fields) if name in AddRequest.__struct_fields__}
    if isinstance(prompt, int):
        prompt = list(range(1000 * handle, 1000 * handle + prompt))
    return AddRequest(
        handle=handle,
        request_id=f"r{handle}",
        prompt_token_ids=np.array(prompt, np.int32),
        params=SamplingParams(**fields),
        max_tokens=max_tokens,
        **own,
    )


class Engine:
    """A core and its fake device; collects tokens, ends and events by handle."""

    def __init__(
        self, *, connector=None, executor=None, faithful=False, check=True, **settings: Any
    ) -> None:
        self.config = SchedulerConfig(**(SMALL | settings))
        self.clock = VirtualClock()
        self.core = EngineCore(
            self.config, self.clock, connector=connector, check=check, faithful=faithful
        )
        self.executor: Executor = executor or FakeExecutor(block_size=self.config.block_size)
        self.depth = 2 if self.config.async_scheduling else 1
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        self.events: list[tuple[int, EventKind]] = []
        self.cached: dict[int, int] = {}
        self.logprobs: list[Any] = []

    def add(self, *args: Any, **fields: Any) -> AddRequest:
        request = make_request(*args, **fields)
        self.core.add(request)
        self.take()
        return request

    def take(self) -> None:
        if (outputs := self.core.take_outputs()) is not None:
            self._note(outputs)

    def begin(self) -> StepPlan | None:
        plan = self.core.begin()
        if plan is not None:
            self.executor.submit(plan)
        return plan

    def finish(self) -> StepResult:
        result = self.executor.collect()
        self.clock.advance_to(self.clock.now() + 1)
        self._note(self.core.finish(result))
        return result

    def turn(self) -> StepPlan | None:
        """One turn of the engine's loop."""
        plan = self.begin()
        if plan is not None and len(plan.slots) and self.core.num_in_flight < self.depth:
            return plan
        if self.core.num_in_flight:
            self.finish()
        return plan

    def run(self, turns: int = 2000) -> "Engine":
        """Turn until nothing is left to do."""
        for _ in range(turns):
            if not self.core.has_work() and not self.core.num_in_flight:
                self.core.check_integrity()
                return self
            self.turn()
        raise AssertionError(f"not done after {turns} turns: {self.core.slots()}")

    def _note(self, outputs: EngineOutputs) -> None:
        start = 0
        for handle, count in zip(
            outputs.handles.tolist(), outputs.num_tokens.tolist(), strict=True
        ):
            assert handle not in self.finished, "tokens after the end"
            tokens = outputs.token_ids[start : start + count].tolist()
            self.tokens.setdefault(handle, []).extend(tokens)
            start += count
        assert start == len(outputs.token_ids)
        for end in outputs.finished:
            assert end.handle not in self.finished, "ended twice"
            self.finished[end.handle] = end
        for prefill in outputs.prefills:
            self.cached[prefill.handle] = prefill.cached_tokens
        if outputs.events is not None:
            kinds = [EventKind(kind) for kind in outputs.events.kinds.tolist()]
            self.events += zip(outputs.events.handles.tolist(), kinds, strict=True)
        self.logprobs += outputs.logprobs

    def events_of(self, handle: int) -> list[EventKind]:
        return [kind for who, kind in self.events if who == handle]

    @property
    def num_free(self) -> int:
        return self.core.state.kv.num_free


def expected_tokens(handle: int, prompt: int, count: int) -> list[int]:
    """What the fake model says after a prompt of this length."""
    return [simulated_token(f"r{handle}", prompt + i) for i in range(count)]
