"""Engines, links, a router and its clients on one virtual clock, with everything checked."""

import contextlib
from collections import deque
from typing import Literal

import numpy as np

from twostroke.clock import VirtualClock
from twostroke.config import SchedulerConfig
from twostroke.connector.handoff import HandoffScheduler
from twostroke.core.loop import EngineCore
from twostroke.errors import EngineDeadError, RequestError
from twostroke.kv_messages import (
    KvCommands,
    KvConnect,
    KvDisconnect,
    KvEndpoint,
    KvLayoutRecord,
    KvReady,
    KvRelease,
    KvRenew,
)
from twostroke.messages import (
    AbortRequests,
    AddRequest,
    EngineOutputs,
    EngineReady,
    Finished,
    FinishReason,
    SamplingParams,
    ToEngine,
    decoder_for,
    encode,
)
from twostroke.router.dispatch import Dispatcher, DispatchSettings
from twostroke.testing.fake_kv import NO_LEASE, FakePool, KvExecutor, continuation
from twostroke.testing.link_with_faults import FakeNetwork, LinkWithFaults

TO_ENGINE = decoder_for(ToEngine)
FROM_ENGINE = decoder_for(EngineOutputs)
BLOCK = 4
POLL_S = 0.5  # longest step without rows: a worker waits in it for something to report
PATIENCE_S = 0.01  # and no longer than this once something is in the inbox
MESSAGE_S = 0.0005

Role = Literal["prefill", "decode", "both"]


def endpoint_of(engine_id: str, num_blocks: int, block_size: int = BLOCK) -> KvEndpoint:
    layout = KvLayoutRecord(
        model="fake",
        dtype="float32",
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        block_size=block_size,
        num_blocks=num_blocks,
    )
    return KvEndpoint(engine_id=engine_id, transport="fake", addresses=["a"], layout=layout)


class SimEngine:
    """An engine's process: inbox, core, executor; its loop as events of the network."""

    def __init__(self, world: "World", index: int, name: str, **settings) -> None:
        self.world, self.index = world, index
        network = world.network
        fields = {
            "block_size": BLOCK,
            "num_blocks": 17,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "max_model_len": 64,
        } | settings
        quarantine_s = fields.pop("quarantine_s", 2.0)
        share = fields.pop("max_hold_share", 0.5)
        self.config = SchedulerConfig(**fields)
        self.endpoint = endpoint_of(name, self.config.num_blocks, self.config.block_size)
        self.pool = FakePool(self.config.num_blocks, self.config.block_size)
        self.link = LinkWithFaults(network, self.endpoint, self.pool)
        self.link.on_report = self._reported
        count = iter(range(1, 1 << 30))
        self.connector = HandoffScheduler(
            world.clock,
            self.endpoint,
            max_hold_share=share,
            quarantine_s=quarantine_s,
            new_transfer_id=lambda: f"{name}:{next(count)}".encode().ljust(16, b".")[:16],
        )
        self.core = EngineCore(self.config, world.clock, connector=self.connector, check=True)
        self.executor = KvExecutor(self.pool, self.link)
        self.depth = 2 if self.config.async_scheduling else 1
        self.inbox: deque[ToEngine] = deque()
        self.is_dead = False
        self.is_stepping = False
        self._waits = 0
        self._is_draining = False
        self._step = 0  # that is being collected
        self._has_rows = False

    @property
    def ready(self) -> EngineReady:
        return EngineReady(
            engine=self.index,
            max_model_len=self.config.max_model_len,
            num_blocks=self.config.num_blocks,
            block_size=self.config.block_size,
            kv=self.endpoint,
        )

    def send(self, message: ToEngine) -> None:
        data = encode(message)

        def arrive() -> None:
            self.inbox.append(TO_ENGINE.decode(data))
            if self.is_stepping and not self._has_rows:
                self._collect_after(PATIENCE_S)
            self.wake()

        self.world.network.after(MESSAGE_S, arrive)

    def die(self) -> None:
        self.is_dead = True
        self.link.shutdown()

    def wake(self) -> None:
        if not self.is_stepping and not self.is_dead:
            self._waits += 1
            self._turn()

    def _turn(self) -> None:
        """Plan until the pipeline is full, then wait for the oldest step, or for something new."""
        core = self.core
        self._take_inbox()
        self._is_draining = self._is_draining and core.num_in_flight > 0
        while not self._is_draining and (plan := core.begin()) is not None:
            self.executor.submit(plan)
            if not len(plan.slots) or core.num_in_flight == self.depth:
                break
        self._emit(core.take_outputs())
        if core.num_in_flight:
            self.is_stepping = True
            self.executor.start()
            oldest = core.state.in_flight[0]
            self._step, self._has_rows = oldest.number, len(oldest.slots) > 0
            step_s = POLL_S if core.state.handoff.awaits_report else MESSAGE_S
            self._collect_after(self.world.step_s() if self._has_rows else step_s)
        elif (deadline_s := core.next_deadline_s()) is not None:
            self._waits += 1
            waits = self._waits

            def expire() -> None:
                if self._waits == waits:
                    self.wake()

            self.world.network.after(max(0.0, deadline_s - self.world.clock.now()), expire)

    def preempt(self) -> None:
        """As if the first running request lacked a block: what is in flight ends before it runs."""
        if self.core.state.num_running and not self.is_dead:
            self.core.state.preempt(0)
            self._is_draining = True

    def _collect_after(self, seconds: float) -> None:
        step = self._step

        def collect() -> None:
            if self.is_stepping and self._step == step:
                self._collect()

        self.world.network.after(seconds, collect)

    def _reported(self) -> None:
        """The worker has something to say: a step without rows need not wait any longer."""
        if self.is_stepping and not self._has_rows:
            self._collect_after(0.0)

    def _collect(self) -> None:
        if self.is_dead:
            return
        self._take_inbox()
        self._emit(self.core.finish(self.executor.collect()))
        self.is_stepping = False
        self._turn()

    def _take_inbox(self) -> None:
        while self.inbox:
            match self.inbox.popleft():
                case AddRequest() as request:
                    self.core.add(request)
                case AbortRequests(handles):
                    self.core.abort(handles)
                case (
                    KvReady() | KvRelease() | KvRenew() | KvConnect() | KvDisconnect()
                ) as message:
                    self.core.apply_kv(message)
        if pieces := self.core.take_pieces():
            self.link.apply(KvCommands(loads=pieces))

    def _emit(self, outputs: EngineOutputs | None) -> None:
        if outputs is not None:
            data = encode(self.world.tampered(outputs))
            self.world.network.after(
                MESSAGE_S, lambda: self.world.from_engine(self, FROM_ENGINE.decode(data))
            )

    def check_empty(self) -> None:
        """Nothing is left of all that was here."""
        self.core.check_integrity()
        state = self.core.state
        assert self.core.is_empty(), f"engine {self.index}: {self.core.slots()}, {state.held}"
        assert state.kv.num_free == state.kv.pool.num_usable
        assert list(state.seats.requests()) == []
        assert (state.loading, state.loaded, state.streaming) == ({}, {}, {})
        assert self.pool.leases == [NO_LEASE] * len(self.pool.leases)
        counts = self.connector.counts()
        assert counts.num_holds == 0
        assert counts.hold_usage == 0


class World:
    """One dispatcher, its engines and clients."""

    def __init__(self, settings: DispatchSettings, *, step_s=lambda: 0.01, **network) -> None:
        self.clock = VirtualClock()
        self.network = FakeNetwork(self.clock, **network)
        self.dispatcher = Dispatcher(self.clock, settings)
        self.step_s = step_s
        self.engines: dict[int, SimEngine] = {}
        self.tamper = lambda ready: ready
        self.loses_renewal = lambda: False
        self.prompts: dict[int, tuple[list[int], int]] = {}  # by handle: prompt, max_tokens
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Finished] = {}
        self.left: set[int] = set()  # their clients have gone
        self._num_starts = 0
        self._timer_s: float | None = None

    # ------------------------------------------------------------ engines

    def start(self, index: int, role: Role, **settings) -> SimEngine:
        self._num_starts += 1
        engine = SimEngine(self, index, f"engine{index}.{self._num_starts}", **settings)
        self.engines[index] = engine
        self.dispatcher.add_engine(index, role)
        self.dispatcher.engine_ready(index, engine.ready)
        self.relay()
        return engine

    def kill(self, index: int, *, notice_s: float = 0.1) -> None:
        """The engine dies; the router finds out a little later."""
        engine = self.engines[index]
        if not engine.is_dead:
            engine.die()
            self.network.after(notice_s, lambda: self._notice(engine))

    def set_role(self, index: int, role: Role) -> None:
        """As asked for by a person; refused when nobody else would decode."""
        with contextlib.suppress(RequestError):
            self.dispatcher.set_role(index, role)
        self.relay()

    def _notice(self, engine: SimEngine) -> None:
        for end in self.dispatcher.engine_died(engine.index, "killed"):
            self._end(end)
        self.relay()

    def from_engine(self, engine: SimEngine, outputs: EngineOutputs) -> None:
        if self.engines.get(engine.index) is engine:
            self._to_clients(self.dispatcher.on_outputs(engine.index, outputs))
            self.relay()

    def relay(self) -> None:
        """Send what the dispatcher wants sent, and wake it when it wants to be."""
        for index, message in self.dispatcher.take_messages():
            if not (isinstance(message, KvRenew) and self.loses_renewal()):
                self.engines[index].send(message)
        deadline_s = self.dispatcher.next_deadline_s()
        if deadline_s is not None and (self._timer_s is None or deadline_s < self._timer_s):
            self._timer_s = deadline_s
            self.network.after(max(0.0, deadline_s - self.clock.now()), self._on_time)

    def _on_time(self) -> None:
        self._timer_s = None
        if (outputs := self.dispatcher.on_time()) is not None:
            self._to_clients(outputs)
        self.relay()

    def tampered(self, outputs: EngineOutputs) -> EngineOutputs:
        outputs.kv_ready = [self.tamper(ready) for ready in outputs.kv_ready]
        return outputs

    # ------------------------------------------------------------ clients

    def submit(self, handle: int, prompt: list[int], max_tokens: int, request_id: str = "") -> None:
        self.prompts[handle] = (prompt, max_tokens)
        self.tokens[handle] = []
        request = AddRequest(
            handle=handle,
            request_id=request_id or f"r{handle}",
            prompt_token_ids=np.array(prompt, np.int32),
            params=SamplingParams(temperature=0.0, max_tokens=max_tokens),
            max_tokens=max_tokens,
            arrival_s=self.clock.now(),
        )
        try:
            self.dispatcher.submit(request)
        except EngineDeadError as error:
            self._end(Finished(handle, FinishReason.ERROR, error=str(error)))
        self.relay()

    def abort(self, handle: int) -> None:
        if handle not in self.ends:
            self.left.add(handle)
            self.dispatcher.abort([handle])
            self.relay()

    def _to_clients(self, outputs: EngineOutputs) -> None:
        start = 0
        for handle, count in zip(
            outputs.handles.tolist(), outputs.num_tokens.tolist(), strict=True
        ):
            assert handle in self.prompts, f"tokens for {handle}, which nobody asked for"
            if handle not in self.left:
                assert handle not in self.ends, "tokens after the end"
                self.tokens[handle] += outputs.token_ids[start : start + count].tolist()
            start += count
        for end in outputs.finished:
            self._end(end)

    def _end(self, end: Finished) -> None:
        assert end.handle in self.prompts, f"end of {end.handle}, which nobody asked for"
        if end.handle not in self.left:
            assert end.handle not in self.ends, "ended twice"
            self.ends[end.handle] = end

    # ------------------------------------------------------------ the verdict

    @property
    def is_answered(self) -> bool:
        """Every client has its answer, or is gone."""
        return len(self.ends) + len(self.left - self.ends.keys()) == len(self.prompts)

    @property
    def is_quiet(self) -> bool:
        """Nothing is under way anywhere."""
        alive = [engine for engine in self.engines.values() if not engine.is_dead]
        return self.is_answered and all(
            engine.core.is_empty() and not engine.inbox for engine in alive
        )

    def check(self) -> None:
        """No hang, no leak, no wrong token. Call it when all should be over."""
        assert self.is_answered, set(self.prompts) - set(self.ends) - self.left
        for handle, (prompt, max_tokens) in self.prompts.items():
            tokens = self.tokens[handle]
            assert tokens == continuation(prompt, len(tokens)), f"request {handle}: wrong tokens"
            end = self.ends.get(handle)
            if end is not None and end.reason is not FinishReason.ERROR:
                assert end.reason is FinishReason.LENGTH
                assert len(tokens) == max_tokens
        for engine in self.engines.values():
            if not engine.is_dead:
                engine.check_empty()
        assert self.dispatcher.num_holds == 0
