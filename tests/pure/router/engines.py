"""Engines of a few lines for the dispatcher: the test says what they do."""

import itertools
from collections.abc import Iterable

import numpy as np

from twostroke.clock import VirtualClock
from twostroke.kv_messages import (
    KvEndpoint,
    KvLayoutRecord,
    KvReady,
    KvReceived,
    KvRelease,
    KvTicket,
)
from twostroke.messages import (
    AbortRequests,
    AddRequest,
    EngineOutputs,
    EngineReady,
    EngineStats,
    EventKind,
    Events,
    Finished,
    FinishReason,
    SamplingParams,
    ToEngine,
)
from twostroke.router.dispatch import Dispatcher, DispatchSettings

LENGTH, ERROR, ABORT = FinishReason.LENGTH, FinishReason.ERROR, FinishReason.ABORT
BLOCK = 16


def ask(handle: int, num_prompt: int = 40, max_tokens: int = 8, **fields) -> AddRequest:
    return AddRequest(
        handle=handle,
        request_id=f"r{handle}",
        prompt_token_ids=np.arange(num_prompt, dtype=np.int32) + 1000 * (handle % 1000),
        params=fields.pop("params", SamplingParams()),
        max_tokens=max_tokens,
        **fields,
    )


def outputs(
    tokens: dict[int, list[int]] | None = None,
    *,
    events: Iterable[tuple[int, int, float]] = (),
    ends: Iterable[tuple] = (),
    **fields,
) -> EngineOutputs:
    tokens = tokens or {}
    columns = list(zip(*events, strict=True)) or [(), (), ()]
    return EngineOutputs(
        handles=np.array(list(tokens), np.int64),
        num_tokens=np.array([len(ids) for ids in tokens.values()], np.int32),
        token_ids=np.array([i for ids in tokens.values() for i in ids], np.int32),
        events=Events(
            np.array(columns[0], np.int64),
            np.array(columns[1], np.uint8),
            np.array(columns[2], np.float64),
        ),
        finished=[Finished(*end) for end in ends],
        **fields,
    )


class World:
    """A dispatcher, and what it has sent so far to each engine."""

    def __init__(self, *roles: str, num_blocks: int = 101, **settings) -> None:
        self.clock = VirtualClock()
        self.dispatcher = Dispatcher(self.clock, DispatchSettings(**settings))
        self.sent: dict[int, list[ToEngine]] = {}
        self.ids: dict[int, str] = {}
        self._starts = itertools.count()
        self._tickets = itertools.count(1)
        self.lost: list[Finished] = []
        for index, role in enumerate(roles):
            self.start(index, role, num_blocks)

    def start(self, index: int, role: str, num_blocks: int = 101) -> None:
        """An engine that starts, or is back."""
        self.ids[index] = f"e{index}.{next(self._starts)}"
        self.sent[index] = []
        self.dispatcher.add_engine(index, role)
        self.dispatcher.engine_ready(
            index, EngineReady(index, 8192, num_blocks, BLOCK, kv=self.endpoint(index, num_blocks))
        )
        self.flush()

    def endpoint(self, index: int, num_blocks: int = 101) -> KvEndpoint:
        layout = KvLayoutRecord(
            model="m",
            dtype="bfloat16",
            num_layers=2,
            num_kv_heads=2,
            head_dim=64,
            block_size=BLOCK,
            num_blocks=num_blocks,
        )
        return KvEndpoint(
            engine_id=self.ids[index], transport="shm", addresses=["a"], layout=layout
        )

    def flush(self) -> list[tuple[int, ToEngine]]:
        """Deliver what is to be sent; returns it."""
        messages = self.dispatcher.take_messages()
        for index, message in messages:
            self.sent[index].append(message)
        return messages

    def submit(self, *requests: AddRequest, **fields) -> None:
        for request in requests:
            self.dispatcher.submit(request, **fields)
        self.flush()

    def say(self, index: int, said: EngineOutputs) -> EngineOutputs:
        """An engine's outputs; returns what is left for the clients."""
        left = self.dispatcher.on_outputs(index, said)
        self.flush()
        return left

    def die(self, index: int) -> list[Finished]:
        ended = self.dispatcher.engine_died(index, "killed")
        self.flush()
        return ended

    def sleep(self, seconds: float) -> EngineOutputs | None:
        """Let time pass, with every deadline on the way."""
        end_s, said = self.clock.now() + seconds, None
        while (due_s := self.dispatcher.next_deadline_s()) is not None and due_s <= end_s:
            self.clock.advance_to(max(due_s, self.clock.now()))
            if (now_said := self.dispatcher.on_time()) is not None:
                self.take(now_said)
                said = now_said
            self.flush()
        self.clock.advance_to(end_s)
        return said

    def take(self, left: EngineOutputs) -> None:
        """What clients are told because it was time."""

    # ------------------------------------------------------------ what engines say

    def ticket(self, index: int, num_tokens: int = 40) -> KvTicket:
        return KvTicket(
            transfer_id=next(self._tickets).to_bytes(16, "big"),
            endpoint=self.endpoint(index),
            lease_slot=0,
            num_tokens=num_tokens,
            block_ids=np.arange(1, 1 + -(-num_tokens // BLOCK), dtype=np.int32),
        )

    def prefilled(self, index: int, leg: AddRequest, **fields) -> KvTicket:
        """The prefill leg is done: its token, its ticket and its end, all at once."""
        ticket = self.ticket(index, len(leg.prompt_token_ids))
        now_s = self.clock.now()
        kinds = (EventKind.FIRST_TOKEN, EventKind.FINISHED)
        said = outputs(
            {leg.handle: [7]},
            events=[(leg.handle, kind, now_s) for kind in kinds],
            ends=[(leg.handle, LENGTH)],
            kv_ready=[KvReady(leg.handle, ticket, True)],
            **fields,
        )
        left = self.say(index, said)
        assert not left.handles.size
        assert not left.finished
        return ticket

    def loaded(self, index: int, leg: AddRequest, **fields) -> EngineOutputs:
        """The decode leg has its KV and its first token."""
        fields.setdefault("num_bytes", 1000)
        gauges = fields.pop("stats", None)
        received = KvReceived(handle=leg.handle, num_tokens=40, ended_s=0.5, **fields)
        events = [
            (leg.handle, kind, self.clock.now())
            for kind in (EventKind.LOADED, EventKind.SCHEDULED, EventKind.FIRST_TOKEN)
        ]
        said = outputs({leg.handle: [5]}, events=events, kv_received=[received], stats=gauges)
        return self.say(index, said)

    def failed(self, index: int, leg: AddRequest, error: str = "no route") -> EngineOutputs:
        """The decode leg's load failed."""
        received = KvReceived(handle=leg.handle, error=error)
        events = [(leg.handle, EventKind.FINISHED, self.clock.now())]
        ends = [(leg.handle, ERROR, None, "load: no route")]
        return self.say(index, outputs(events=events, ends=ends, kv_received=[received]))

    def finished(self, index: int, leg: AddRequest, reason=LENGTH, error=None) -> EngineOutputs:
        return self.say(index, outputs({leg.handle: [6]}, ends=[(leg.handle, reason, None, error)]))

    # ------------------------------------------------------------ what they were told

    def of(self, index: int, kind: type) -> list:
        return [message for message in self.sent[index] if isinstance(message, kind)]

    def added(self, index: int) -> list[AddRequest]:
        return self.of(index, AddRequest)

    def aborted(self, index: int) -> list[int]:
        return [handle for it in self.of(index, AbortRequests) for handle in it.handles]

    def released(self, index: int) -> list[bytes]:
        return [tid for it in self.of(index, KvRelease) for tid in it.transfer_ids]

    def check_empty(self) -> None:
        """Nothing is left of any request."""
        assert self.dispatcher.num_holds == self.dispatcher.num_waiting == 0
        for engine in self.dispatcher.fleet:
            if engine.state == "gone":
                continue
            assert engine.is_idle, engine
            counts = (engine.committed_blocks, engine.arriving_blocks, engine.growth_blocks)
            assert counts == (0, 0, 0), engine
            assert self.dispatcher.routing.load(engine.index) == 0


def stats(**fields) -> EngineStats:
    return EngineStats(**fields)
