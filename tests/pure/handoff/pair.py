"""Two engines on one clock, driven by hand: the test is the router."""

from typing import Any

import numpy as np

from tests.pure.handoff.world import BLOCK, endpoint_of
from twostroke.clock import VirtualClock
from twostroke.config import SchedulerConfig
from twostroke.connector.handoff import HandoffScheduler
from twostroke.core.loop import EngineCore
from twostroke.kv_messages import KvCommands, KvReady, KvReceive, KvReceived, KvSend, KvTicket
from twostroke.messages import (
    AddRequest,
    EngineOutputs,
    EventKind,
    Finished,
    SamplingParams,
    StepPlan,
)
from twostroke.testing.fake_kv import FakePool, KvExecutor, continuation
from twostroke.testing.link_with_faults import FakeNetwork, Fault, LinkWithFaults

STEP_S = 0.01


def prompt_of(seed: int, count: int) -> list[int]:
    return [(seed * 7919 + i * 31) % 1000 for i in range(count)]


class Party:
    """One engine; what it says is kept, and its loop turns when told to."""

    def __init__(self, network: FakeNetwork, name: str, **settings: Any) -> None:
        fields = {
            "block_size": BLOCK,
            "num_blocks": 17,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "max_model_len": 64,
        }
        options: dict[str, Any] = {"max_hold_share": 1.0} | {
            key: settings.pop(key)
            for key in ("max_hold_share", "quarantine_s", "step_cost")
            if key in settings
        }
        check = settings.pop("check", True)
        self.config = SchedulerConfig(**(fields | settings))
        self.network, self.clock = network, network.clock
        self.endpoint = endpoint_of(name, self.config.num_blocks, self.config.block_size)
        self.pool = FakePool(self.config.num_blocks, self.config.block_size)
        self.link = LinkWithFaults(network, self.endpoint, self.pool)
        self.connector = HandoffScheduler(self.clock, self.endpoint, **options)
        self.core = EngineCore(self.config, self.clock, connector=self.connector, check=check)
        self.executor = KvExecutor(self.pool, self.link)
        self.depth = 2 if self.config.async_scheduling else 1
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        self.events: list[tuple[int, EventKind]] = []
        self.ready: list[KvReady] = []
        self.received: list[KvReceived] = []
        self.cached: dict[int, int] = {}

    # ------------------------------------------------------------ messages in

    def add(self, handle: int, prompt: list[int], max_tokens: int = 4, **fields: Any) -> None:
        request = AddRequest(
            handle=handle,
            request_id=fields.pop("request_id", f"r{handle}"),
            prompt_token_ids=np.array(prompt, np.int32),
            params=SamplingParams(temperature=0.0),
            max_tokens=max_tokens,
            **fields,
        )
        self.core.add(request)
        self.take()

    def send(self, handle: int, prompt: list[int], *, lease_s: float = 30.0, **fields: Any) -> None:
        """A prefill leg."""
        self.add(
            handle,
            prompt,
            fields.pop("max_tokens", 1),
            kv_send=KvSend(lease_s=lease_s, stream=fields.pop("stream", False)),
            **fields,
        )

    def receive(
        self,
        handle: int,
        prompt: list[int],
        ticket: KvTicket | None,
        max_tokens: int = 4,
        *,
        timeout_s: float = 5.0,
        **fields: Any,
    ) -> None:
        """A decode leg; without a ticket it streams."""
        num_tokens = len(prompt) if ticket is None else ticket.num_tokens
        receive = KvReceive(num_tokens=num_tokens, timeout_s=timeout_s, ticket=ticket)
        self.add(handle, prompt, max_tokens, kv_receive=receive, **fields)

    def tell(self, message: Any) -> None:
        self.core.apply_kv(message)
        if pieces := self.core.take_pieces():
            self.link.apply(KvCommands(loads=pieces))
        self.take()

    def abort(self, *handles: int) -> None:
        self.core.abort(handles)
        self.take()

    # ------------------------------------------------------------ the loop

    def turn(self) -> StepPlan | None:
        """One turn of the engine's loop; a step takes STEP_S."""
        plan = self.core.begin()
        if plan is not None:
            self.executor.submit(plan)
        self.take()
        if plan is not None and len(plan.slots) and self.core.num_in_flight < self.depth:
            return plan
        if self.core.num_in_flight:
            self.finish()
        return plan

    def finish(self) -> None:
        """The oldest step in flight runs, and its result is in."""
        self.executor.start()
        self.sleep(STEP_S)
        self._note(self.core.finish(self.executor.collect()))

    def preempt(self) -> None:
        """Take the blocks and the seat of the first running request, as a lack of blocks would.

        As then, what is in flight ends before it runs again.
        """
        self.core.state.preempt(0)
        while self.core.num_in_flight:
            self.finish()

    def run(self, turns: int = 1000) -> "Party":
        """Turn until it has nothing to do."""
        for _ in range(turns):
            if not self.core.has_work() and not self.core.num_in_flight:
                self.core.check_integrity()
                return self
            self.turn()
        raise AssertionError(f"not done after {turns} turns: {self.core.slots()}")

    def sleep(self, seconds: float) -> None:
        """Let time pass; only the network moves."""
        end_s = self.clock.now() + seconds
        self.network.run(lambda: False, end_s)
        self.clock.advance_to(end_s)

    def sleep_until_deadline(self) -> None:
        """What the process does when it has no work, and no message comes."""
        assert not self.core.has_work()
        deadline_s = self.core.next_deadline_s()
        assert deadline_s is not None, "it would sleep for ever"
        self.sleep(max(0.0, deadline_s - self.clock.now()))
        self.turn()

    def take(self) -> None:
        if (outputs := self.core.take_outputs()) is not None:
            self._note(outputs)

    def _note(self, outputs: EngineOutputs) -> None:
        start = 0
        for handle, count in zip(
            outputs.handles.tolist(), outputs.num_tokens.tolist(), strict=True
        ):
            self.tokens.setdefault(handle, []).extend(
                outputs.token_ids[start : start + count].tolist()
            )
            start += count
        for end in outputs.finished:
            assert end.handle not in self.finished, "ended twice"
            self.finished[end.handle] = end
        if outputs.events is not None:
            kinds = [EventKind(kind) for kind in outputs.events.kinds.tolist()]
            self.events += zip(outputs.events.handles.tolist(), kinds, strict=True)
        self.ready += outputs.kv_ready
        self.received += outputs.kv_received
        self.cached |= {info.handle: info.cached_tokens for info in outputs.prefills}

    # ------------------------------------------------------------ looking

    def events_of(self, handle: int) -> list[EventKind]:
        return [kind for who, kind in self.events if who == handle]

    @property
    def num_free(self) -> int:
        return self.core.state.kv.num_free

    @property
    def counts(self):
        return self.connector.counts()

    def ticket_for(self, handle: int, prompt: list[int], **fields: Any) -> KvTicket:
        """Compute a prompt here and hold it."""
        self.send(handle, prompt, **fields)
        self.run()
        (ready,) = [ready for ready in self.ready if ready.handle == handle and ready.is_last]
        return ready.ticket

    def check_answer(self, handle: int, prompt: list[int], count: int = 4) -> None:
        assert self.tokens[handle] == continuation(prompt, count)

    def check_empty(self) -> None:
        self.core.check_integrity()
        assert self.core.is_empty(), (self.core.slots(), self.core.state.held)
        assert self.num_free == self.core.state.kv.pool.num_usable
        assert self.counts.num_holds == 0


def make_pair(p: dict | None = None, d: dict | None = None, **network: Any) -> tuple[Party, Party]:
    """P and D with their settings."""
    net = FakeNetwork(VirtualClock(), **network)
    return Party(net, "p", **(p or {})), Party(net, "d", **(d or {}))


def faulty(
    *faults: Fault, p: dict | None = None, d: dict | None = None, **network: Any
) -> tuple[Party, Party]:
    """P and D; the loads, in order, go wrong as told, and those after them do not."""
    queue = list(faults)
    return make_pair(p, d, fault=lambda: queue.pop(0) if queue else Fault.NONE, **network)


def fill(engine: Party) -> None:
    """Leave too few free blocks for another prompt."""
    engine.add(90, prompt_of(90, 56), 6)
    engine.turn()
