"""The world: engines, router, links and arrivals on one virtual clock.

    time ─▶  step ends (by engine) ─▶ transfers ─▶ messages ─▶ arrivals ─▶ whoever waited for them

At one moment events happen in that order, and within a kind in that of their making, so a run is a
function of its scenario. The router, the schedulers and the connector's half are those of the
engine; only devices, links and clients are played.
"""

import contextlib
import gc
import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from twostroke.arrays import Float64s, Int32s, Int64s, ones
from twostroke.clock import VirtualClock
from twostroke.config import SchedulerConfig
from twostroke.connector.handoff import HandoffScheduler
from twostroke.connector.layout import record_of
from twostroke.core.loop import EngineCore
from twostroke.errors import ConfigError, EngineDeadError
from twostroke.kv_messages import TRANSFER_ID_BYTES, KvEndpoint
from twostroke.ledger import Boundary
from twostroke.messages import (
    AddRequest,
    EngineOutputs,
    EngineReady,
    EngineStats,
    FinishReason,
    SamplingParams,
    ToEngine,
)
from twostroke.router.dispatch import Dispatcher
from twostroke.twin.engine import TwinEngine
from twostroke.twin.executor import CostExecutor
from twostroke.twin.front import FrontEnd, delayed
from twostroke.twin.hasher import NumberMap, RunHasher, RunKeys
from twostroke.twin.host import SharedHost, SharedHostExecutor, inward_s
from twostroke.twin.lockstep import Lockstep, LockstepExecutor
from twostroke.twin.outcome import engine_result, result_of
from twostroke.twin.record import Requests, Timeline
from twostroke.twin.scenario import EngineGroup, Result, Scenario
from twostroke.twin.transfers import EngineTransfers, Fabric

# Kinds of events in the order in which they happen at one moment.
_STEP, _NETWORK, _MESSAGE, _ARRIVAL, _TIMER, _ROUSE = range(6)
ROUTER = -1  # in the place of an engine's number: to the router, or from it alone
_PARAMS = SamplingParams(temperature=0.0, ignore_eos=True)


class World:
    """One run of a scenario."""

    def __init__(
        self, scenario: Scenario, *, on_done: Callable[[int], None] = lambda count: None
    ) -> None:
        self.scenario = scenario
        self.clock = VirtualClock()
        self.dispatcher = Dispatcher(self.clock, scenario.settings)
        self.dispatcher.routing.use_keys(RunKeys)
        self.engines: list[TwinEngine] = []
        self._groups: list[EngineGroup] = []
        self._transfers: list[EngineTransfers] = []
        self._timelines: list[Timeline] = []
        self._on_done = on_done
        self._fabric = Fabric(scenario.link, record=scenario.record_timelines)
        self._heap: list[tuple[float, int, int, object]] = []
        self._order = itertools.count()
        self._last_output_s: list[float] = []
        self._last_input_s: list[float] = []
        self._preempted: set[int] = set()  # and without a token since
        self._network_s = math.inf
        self._timer_s = math.inf
        self._num_done = 0
        self._end_s = 0.0
        self._followers = _followers(scenario.workload.after)
        self._counter = itertools.count(1)
        self._rounds: dict[int, Lockstep] = {}  # of groups that step together
        self._build()

    # ------------------------------------------------------------ set-up

    def _build(self) -> None:
        groups = [group for group in self.scenario.engines for _ in range(group.count)]
        if not groups:
            raise ConfigError("there is no engine", hint="name some with --both, or --prefill")
        roles = {group.role for group in groups}
        if not roles - {"prefill"}:
            raise ConfigError("no engine decodes", hint="add some with --decode or --both")
        has_handoffs = roles != {"both"}
        host = groups[0].host
        self.requests = Requests(len(self.scenario.workload), host.deliver_first_s)
        self._front, self._host = FrontEnd(host), SharedHost(host)
        for index, group in enumerate(groups):
            self._add_engine(index, group, has_handoffs=has_handoffs)
        self._send_messages()

    def _add_engine(self, index: int, group: EngineGroup, *, has_handoffs: bool) -> None:
        config, layout = group.config, group.layout
        if layout.block_size != config.block_size:
            raise ConfigError(
                f"blocks hold {layout.block_size} tokens in the layout and {config.block_size} in "
                "the scheduler's settings"
            )
        clock = VirtualClock()
        endpoint, connector, transfers = None, None, None
        if has_handoffs:
            endpoint = KvEndpoint(
                engine_id=f"engine-{index}",
                transport="twin",
                addresses=[""] * layout.tensor_parallel_size,
                layout=record_of(layout, config.num_blocks, "twin"),
            )
            connector = HandoffScheduler(
                clock,
                endpoint,
                max_hold_share=group.max_hold_share,
                step_cost=group.cost if self.scenario.settings.pd_policy == "cost" else None,
                new_transfer_id=lambda: next(self._counter).to_bytes(TRANSFER_ID_BYTES, "big"),
            )
            transfers = self._fabric.add(index, endpoint, clock.now)
            self._transfers.append(transfers)
        shares_host = group.host.beside_s + group.host.interrupted_s > 0
        make_executor: Callable[..., CostExecutor] = CostExecutor
        if group.steps_together:
            rounds = self._rounds.setdefault(id(group), Lockstep(group.cost))
            make_executor = partial(LockstepExecutor, rounds)
        elif shares_host:
            make_executor = partial(SharedHostExecutor, self._host)
        executor = make_executor(
            clock,
            group.cost,
            max_num_seqs=config.max_num_seqs,
            token_of=self._token_of,
            host=group.host,
            transfers=transfers,
            engine=index,
        )
        engine = TwinEngine(
            index,
            self._core(config, clock, connector),
            executor,
            clock,
            self,
            # Engines whose steps depend on each other's cannot be taken many steps at a time.
            fast_forward=self.scenario.fast_forward and not (shares_host or group.steps_together),
            plans_late=group.plans_late and not group.steps_together,
        )
        self.engines.append(engine)
        self._groups.append(group)
        self._timelines.append(Timeline())
        self._last_output_s.append(0.0)
        self._last_input_s.append(0.0)
        self.dispatcher.add_engine(index, group.role)
        ready = EngineReady(index, config.max_model_len, config.num_blocks, config.block_size)
        ready.kv = endpoint
        self.dispatcher.engine_ready(index, ready)

    def _core(
        self, config: SchedulerConfig, clock: VirtualClock, connector: HandoffScheduler | None
    ) -> EngineCore:
        core = EngineCore(config, clock, connector=connector)
        hasher = RunHasher(config.block_size)
        core.state.kv.use_keys(hasher, NumberMap(config.num_blocks, hasher))
        return core

    def _token_of(self, request_id: str) -> int:
        return self.scenario.workload.output_value(int(request_id.partition("#")[0]))

    # ------------------------------------------------------------ the loop

    def run(self) -> Result:
        """To the end, or to the scenario's `until_s`."""
        started_s = time.perf_counter()
        with _rare_collections():
            self._run()
        engines = [
            engine_result(
                engine,
                self._groups,
                self._timelines[engine.index],
                self._transfers[engine.index] if self._transfers else None,
            )
            for engine in self.engines
        ]
        return result_of(
            self.scenario,
            self.requests,
            engines,
            self._fabric.network,
            self._groups,
            counters=vars(self.dispatcher.counters),
            ended_s=self._end_s,
            wall_s=time.perf_counter() - started_s,
        )

    def _run(self) -> None:
        workload, heap = self.scenario.workload, self._heap
        first = np.flatnonzero(workload.after < 0).tolist()
        arrivals = iter(sorted(first, key=workload.arrival_s.__getitem__))
        self._next_arrival(arrivals)
        while heap:
            time_s, kind, key, what = heapq.heappop(heap)
            if time_s > self.scenario.until_s:
                break
            if kind == _STEP:
                engine = self.engines[key]
                if engine.next_s == time_s:
                    self.clock.advance_to(time_s)
                    engine.wake(time_s)
                    self._after(engine)
                continue
            self.clock.advance_to(time_s)
            if kind == _NETWORK:
                if time_s == self._network_s:
                    self._advance_network(time_s)
            elif kind == _MESSAGE:
                self._message(what, time_s)
            elif kind == _ARRIVAL:
                self._arrive(key, time_s)
                if what is None:
                    self._next_arrival(arrivals)
            elif kind == _TIMER:
                if time_s == self._timer_s:
                    self._on_timer()
            else:
                engine = self.engines[key]
                engine.rouse(time_s)
                self._after(engine)

    def _push(self, time_s: float, kind: int, key: int, what: object = None) -> None:
        heapq.heappush(self._heap, (time_s, kind, key, what))

    def _next_arrival(self, arrivals: Iterator[int]) -> None:
        index = next(arrivals, None)
        if index is not None:
            self._push(float(self.scenario.workload.arrival_s[index]), _ARRIVAL, index)

    def _after(self, engine: TwinEngine) -> None:
        """An engine has done something: note when it goes on, and what that meant for the links."""
        if engine.next_s < math.inf:
            self._push(engine.next_s, _STEP, engine.index)
        if self._transfers:
            self._note_network()

    # ------------------------------------------------------------ links

    def _note_network(self) -> None:
        next_s = self._fabric.network.next_event_s()
        if next_s != self._network_s:
            self._network_s = next_s
            if next_s < math.inf:
                self._push(next_s, _NETWORK, next(self._order))

    def _advance_network(self, time_s: float) -> None:
        for owner in self._fabric.advance(time_s):
            engine = self.engines[owner.index]
            if engine.transfer_ended(time_s):
                self._push(time_s, _ROUSE, engine.index)
            elif engine.next_s < math.inf:
                self._push(engine.next_s, _STEP, engine.index)
        self._network_s = math.inf
        self._note_network()

    # ------------------------------------------------------------ messages

    def _send_messages(self) -> None:
        """What the router has to say goes to the engines, and its deadline on the heap."""
        for index, message in self.dispatcher.take_messages():
            self._post(index, message)
        deadline_s = self.dispatcher.next_deadline_s()
        if deadline_s is not None and deadline_s < self._timer_s:
            self._timer_s = max(deadline_s, self.clock.now())
            self._push(self._timer_s, _TIMER, 0)

    def _post(self, index: int, message: ToEngine) -> None:
        delay_s = inward_s(self._groups[index].host, message)
        at_s = max(self.clock.now() + delay_s, self._last_input_s[index])
        self._last_input_s[index] = at_s
        self._push(at_s, _MESSAGE, next(self._order), (index, message))

    def _message(self, what: object, time_s: float) -> None:
        """To an engine a message, from an engine what it did, from a client a request."""
        assert isinstance(what, tuple)
        index, message = what[:2]
        if index == ROUTER:
            if message is None:
                self._advance_front(time_s)
            else:
                self._submit(message, time_s)
        elif len(what) == 3:
            self._take_decoded(index, message, what[2])
        elif isinstance(message, EngineOutputs):
            self._take_outputs(index, message, time_s)
        else:
            engine = self.engines[index]
            if engine.deliver(message, time_s):
                self._push(time_s, _ROUSE, index)
            elif engine.next_s < math.inf:
                self._push(engine.next_s, _STEP, index)

    def _on_timer(self) -> None:
        self._timer_s = math.inf
        self._refresh_stats()
        outputs = self.dispatcher.on_time()
        if outputs is not None:
            self._take_clients(ROUTER, outputs, self.clock.now())
        self._send_messages()

    # ------------------------------------------------------------ clients

    def _arrive(self, index: int, time_s: float) -> None:
        """A client sends a request."""
        workload = self.scenario.workload
        request = AddRequest(
            handle=index,
            request_id=str(index),
            prompt_token_ids=workload.prompt(index),
            params=_PARAMS,
            max_tokens=int(workload.output_tokens[index]),
            arrival_s=time_s,
        )
        self.requests.arrived(index, time_s)
        if self._front.takes_time:
            self._front.send(request, time_s)
            self._push(self._front.next_s, _MESSAGE, next(self._order), (ROUTER, None))
        else:
            self._submit(request, time_s)

    def _advance_front(self, time_s: float) -> None:
        """The front end may be done with a request, unless others have come meanwhile."""
        if self._front.next_s != time_s:
            return
        for at_s, request in self._front.done(time_s):
            self._push(at_s, _MESSAGE, next(self._order), (ROUTER, request))
        if self._front.next_s < math.inf:
            self._push(self._front.next_s, _MESSAGE, next(self._order), (ROUTER, None))

    def _submit(self, request: AddRequest, time_s: float) -> None:
        """The router has a client's request."""
        index = request.handle
        ledger = self.requests.ledgers[index]
        assert ledger is not None
        self._refresh_stats()
        try:
            ledger.mark(self.dispatcher.submit(request), time_s)
        except EngineDeadError as error:
            self._ended(index, time_s, str(error))
        self._send_messages()

    def _ended(self, index: int, time_s: float, error: str) -> None:
        """A request's client has its answer, or an error."""
        requests = self.requests
        ledger = requests.ledgers[index]
        assert ledger is not None
        time_s = max(time_s, requests.last_s.item(index))  # a lone first token takes longer
        ledger.mark(Boundary.CLOSED, time_s)
        requests.end_s[index] = time_s
        if error:
            requests.errors[index] = error
        self._num_done += 1
        self._end_s = max(self._end_s, time_s)
        self._on_done(self._num_done)
        workload = self.scenario.workload
        for follower in self._followers.get(index, ()):
            at_s = max(
                float(workload.arrival_s[follower]), time_s + float(workload.gap_s[follower])
            )
            self._push(at_s, _ARRIVAL, follower, True)

    # ------------------------------------------------------------ what engines say

    def outputs(self, engine: int, outputs: EngineOutputs) -> None:
        """A step's outputs leave the engine."""
        now = self.clock.now()
        if outputs.stats is not None:
            self._timelines[engine].note(outputs.time_s, outputs.stats)
        out_s = self._out_s(engine, outputs.time_s, len(outputs.handles))
        if out_s <= now:
            self._take_outputs(engine, outputs, now)
        else:
            self._push(out_s, _MESSAGE, next(self._order), (engine, outputs))

    def decoded(
        self, engine: int, handles: Int64s, times_s: Float64s, stats: EngineStats | None
    ) -> None:
        """Many plain decode steps have ended, the last of them now or a while ago."""
        rows = EngineOutputs(
            handles=handles,
            num_tokens=ones(len(handles)),
            token_ids=ones(len(handles)),  # whatever they are
            stats=stats,
            time_s=self.engines[engine].clock.now(),
        )
        if stats is not None:
            self._timelines[engine].note(rows.time_s, stats)
        host = self._groups[engine].host
        delay_s = host.egress_s + host.egress_row_s * len(handles)
        times_s = delayed(times_s, delay_s, self._last_output_s[engine])
        out_s = self._last_output_s[engine] = times_s.item(-1)
        if out_s <= self.clock.now():
            self._take_decoded(engine, rows, times_s)
        else:
            self._push(out_s, _MESSAGE, next(self._order), (engine, rows, times_s))

    def _out_s(self, engine: int, time_s: float, rows: int) -> float:
        """When the router and the client have what an engine says at `time_s`."""
        host = self._groups[engine].host
        out_s = time_s + (host.egress_s + host.egress_row_s * rows)
        out_s = self._last_output_s[engine] = max(out_s, self._last_output_s[engine])
        return out_s

    def _take_outputs(self, engine: int, outputs: EngineOutputs, time_s: float) -> None:
        if self.dispatcher.num_waiting or outputs.finished:
            self._refresh_stats(but=engine)
        self._take_clients(engine, self.dispatcher.on_outputs(engine, outputs), time_s)
        self._send_messages()

    def _take_decoded(self, engine: int, rows: EngineOutputs, times_s: Float64s) -> None:
        # The router drops or renames what is not under its client's handle.
        handles = self.dispatcher.on_outputs(engine, rows).handles
        if len(handles):
            self._resumed(handles, times_s.item(0))
            times_s = self._front.delivered_many(engine, times_s, len(handles))
            self.requests.tokens_many(handles, times_s)
        self._send_messages()

    def _take_clients(self, engine: int, outputs: EngineOutputs, time_s: float) -> None:
        """What is left for clients, who have it a little later."""
        requests = self.requests
        client_s = self._front.delivered_s(engine, time_s, len(outputs.handles))
        if (events := outputs.events) is not None:
            for index, kind, at_s in zip(
                events.handles.tolist(), events.kinds.tolist(), events.times_s.tolist(), strict=True
            ):
                if (ledger := requests.ledgers[index]) is not None:
                    ledger.mark(kind, at_s)
                    if ledger.awaits_token:
                        self._preempted.add(index)
        for prefill in outputs.prefills:
            requests.cached_tokens[prefill.handle] = prefill.cached_tokens
        if len(outputs.handles):
            self._resumed(outputs.handles, time_s)
            requests.tokens(outputs.handles, client_s)
        for end in outputs.finished:
            failed = end.reason in (FinishReason.ERROR, FinishReason.ABORT)
            self._ended(end.handle, client_s, (end.error or "aborted") if failed else "")

    def _resumed(self, handles: Int64s, time_s: float) -> None:
        """Preempted requests that have a token again."""
        if not self._preempted:
            return
        for index in self._preempted & set(handles.tolist()):
            ledger = self.requests.ledgers[index]
            assert ledger is not None
            ledger.mark(Boundary.TOKEN, time_s)
            if not ledger.awaits_token:
                self._preempted.discard(index)

    def _refresh_stats(self, but: int = -1) -> None:
        """Tell the router of steps that were not taken yet, where it may act on that."""
        now, has_handoffs = self.clock.now(), bool(self._transfers)
        for engine in self.engines:
            if not engine.is_cruising or engine.index == but:
                continue
            if not (has_handoffs or engine.has_queue):
                continue
            host = self._groups[engine.index].host
            stats = engine.stats_at(now - host.egress_s)
            if stats is not None:
                self.dispatcher.fleet[engine.index].stats = stats
                self.dispatcher.routing.engine_stats(engine.index, stats)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Next to nothing here is garbage in cycles, and what lives is walked in vain each time."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _followers(after: Int32s) -> dict[int, list[int]]:
    """Requests that come after each."""
    followers: dict[int, list[int]] = {}
    for index in np.flatnonzero(after >= 0).tolist():
        followers.setdefault(int(after[index]), []).append(index)
    return followers
