"""One engine of the twin: an `EngineCore` and its device, driven as `proc.core_main` drives them.

    turn    take the inbox, begin a step, submit it; with room for one more in flight, again;
            else wait for the end of the oldest
    wake    (the oldest has ended) take the inbox, finish it, say what came of it; then a turn

Our own engines put who comes into the second step in flight as long as it has not begun
(`EngineCore.extend`), which is as if they planned it when the first is over (`plans_late`); in
vLLM's it stands once it is planned.

Where nothing but decodes lies ahead the engine *cruises*: the ends of many turns are computed at
once, and they are taken together when the last of them is over, or before, when a message comes.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from twostroke.arrays import Float64s, Int64s, ones, total
from twostroke.clock import VirtualClock
from twostroke.core.fast_forward import Outlook
from twostroke.core.loop import EngineCore
from twostroke.messages import (
    NO_TOKENS,
    AbortRequests,
    AddRequest,
    EngineOutputs,
    EngineStats,
    EventKind,
    Events,
    Shutdown,
    StepPlan,
    ToEngine,
    UtilityCall,
)
from twostroke.twin.executor import CostExecutor

MIN_TURNS, MAX_TURNS = 2, 512  # taken at once: what is computed ahead and then cut is in vain
_FIRST_TOKEN = int(EventKind.FIRST_TOKEN)
NO_HANDLES: Int64s = np.empty(0, np.int64)


class EngineSink(Protocol):
    """Who is told what an engine does."""

    def outputs(self, engine: int, outputs: EngineOutputs) -> None: ...

    def decoded(
        self, engine: int, handles: Int64s, times_s: Float64s, stats: EngineStats | None
    ) -> None:
        """Each of these requests got one token at each of these times; the stats then, or None:
        they follow."""
        ...


class TwinEngine:
    """`next_s` is when `wake` is due; inf: only a message or a transfer can change anything."""

    def __init__(
        self,
        index: int,
        core: EngineCore,
        executor: CostExecutor,
        clock: VirtualClock,
        sink: EngineSink,
        *,
        fast_forward: bool = True,
        plans_late: bool = False,
    ) -> None:
        self.index = index
        self.core = core
        self.executor = executor
        self.clock = clock
        self.next_s = math.inf
        self.is_waiting = True  # for anything at all: no step is in flight
        self.is_cruising = False  # steps have ended, or may have, that were not taken yet
        self.num_skipped = 0
        self._sink = sink
        self._depth = 2 if core.config.async_scheduling else 1
        self._fast_forward = fast_forward
        self._plans_late = plans_late and self._depth > 1 and core.state.handoff is None
        self.on_plan: Callable[[StepPlan], None] | None = None  # is shown each plan
        self._inbox: deque[ToEngine] = deque()
        self._ends: Float64s | None = None  # while cruising: of its turns
        self._turns = 0
        self._end_turn = 0  # in which requests end by length; 0: in none
        self._first_tokens: list[int] = []  # handles: those of its first turn, not told yet
        self._tokens_told = 0  # turns of which the tokens were told
        self._turns_told = 0  # of them, to the router
        self._outlook: Outlook | None = None

    # ------------------------------------------------------------ from outside

    def deliver(self, message: ToEngine, now: float) -> bool:
        """A message arrives. True: the engine waits for it, and is to be woken now."""
        self._inbox.append(message)
        delays = self.executor.arrivals_delay and isinstance(message, AddRequest)
        is_waiting = self._disturb(now, at_once=delays or isinstance(message, AbortRequests))
        if delays and self.executor.request_arrives(now):
            self.next_s = self.executor.end_of_oldest_s
        return is_waiting

    def transfer_ended(self, now: float) -> bool:
        """One of its loads is over. True: it waits for anything, and is to be woken now."""
        if self._disturb(now, at_once=False):
            return True
        if self._ends is None:
            self.clock.advance_to(now)
            self.executor.transfer_ended()
            self.next_s = self.executor.end_of_oldest_s
        return False

    def _disturb(self, now: float, *, at_once: bool) -> bool:
        if self._ends is not None:
            # Turns that have ended by now; the next one is under way and runs to its end.
            turns = int(self._ends[: self._turns].searchsorted(now, side="right"))
            if at_once or self._plans_late:
                # What has come counts before the tokens of the step under way do, or is in the plan
                # that is made at its end.
                self._skip(turns)
                self._turn(heeding=False)
            else:
                # Whether it is heard before or after they are counted makes no difference.
                self._turns = min(self._turns, turns + 1)
                self._set_next()
            return False
        if not self.is_waiting and self.executor.end_of_oldest_s == math.inf:
            self.next_s = min(self.next_s, self.executor.looked_up_s(now))
        return self.is_waiting

    @property
    def has_queue(self) -> bool:
        """Whether requests wait in it, so that its memory matters to the router."""
        state = self.core.state
        return len(state.requests) > state.num_running

    def stats_at(self, now: float) -> EngineStats | None:
        """What it would say of itself at `now`, if that differs from what it has said."""
        if self._ends is None:
            return None
        turns = int(self._ends[: self._turns].searchsorted(now, side="right"))
        if self._end_turn:  # that turn the engine tells of itself
            turns = min(turns, self._end_turn - 1)
        if turns == self._turns_told:
            return None
        self._turns_told = turns
        return self._stats_after(turns)

    def _stats_after(self, turns: int) -> EngineStats:
        """What it will say of itself after so many turns of its cruise."""
        if self._outlook is None:
            self._outlook = self.core.outlook()
        return self._outlook.after(turns)

    def rouse(self, now: float) -> None:
        """It waited for anything, and something has come (perhaps more than one thing)."""
        if self.is_waiting:
            self.clock.advance_to(now)
            self._turn()

    def wake(self, now: float) -> None:
        """What it waited for is due: the end of its oldest step, or a deadline."""
        if self._ends is not None:
            if self._first_tokens:
                self._tell_first_turn(float(self._ends[0]))
                if self._turns > 1:
                    self._set_next()
                    return
            self._skip(self._turns, heeding=True)
            self._turn()
            return
        self.clock.advance_to(now)
        if not self.is_waiting:
            if not self.executor.is_due:
                self.next_s = self.executor.end_of_oldest_s
                return
            if self._holds_back:
                self._take_inbox()
                self._begin()
            result = self.executor.collect()
            self._take_inbox()
            self._tell(self.core.finish(result))
        self._turn()

    def _tell(self, outputs: EngineOutputs) -> None:
        """What came of a step; if it was the last for now, the engine is idle at once."""
        if self._fast_forward and self.core.drain():
            self.executor.shutdown()
            outputs.stats = self.core.stats()
        self._sink.outputs(self.index, outputs)

    # ------------------------------------------------------------ the loop

    @property
    def _holds_back(self) -> bool:
        in_flight = self.core.state.in_flight
        return self._plans_late and len(in_flight) == 1 and len(in_flight[0].slots) > 0

    def _begin(self) -> StepPlan | None:
        plan = self.core.begin()
        if plan is not None:
            if self.on_plan is not None:
                self.on_plan(plan)
            self.executor.submit(plan)
        return plan

    def _turn(self, *, heeding: bool = True) -> None:
        """Begin what can be begun now; not `heeding` what has come since."""
        core = self.core
        while True:
            if heeding:
                self._take_inbox()
                if self._fast_forward and self._cruise():
                    return
            if self._holds_back:
                break
            plan = self._begin()
            if core.state.handoff is not None:  # what it says of KV cannot wait for a result
                self._take_outputs()
            if plan is not None and len(plan.slots) and core.num_in_flight < self._depth:
                continue
            break
        self.is_waiting = not core.num_in_flight
        self.next_s = math.inf if self.is_waiting else self.executor.end_of_oldest_s
        deadline_s = core.next_deadline_s()
        if self.next_s == math.inf and deadline_s is not None and deadline_s < math.inf:
            deadline_s = max(deadline_s, self.clock.now())
            self.next_s = deadline_s if self.is_waiting else self.executor.looked_up_s(deadline_s)

    def _take_inbox(self) -> None:
        if self._inbox:
            self._hear()
        if self.executor.reads_ahead and (pieces := self.core.take_pieces()):
            self.executor.read(pieces)
        # A process tells its events at once; where nobody acts on them, they can wait for a step.
        if self._tells_at_once:
            self._take_outputs()

    @property
    def _tells_at_once(self) -> bool:
        return self.core.state.handoff is not None or self.core.has_ends

    def _hear(self) -> None:
        core = self.core
        while self._inbox:
            message = self._inbox.popleft()
            match message:
                case AddRequest():
                    core.add(message)
                case AbortRequests(handles):
                    core.abort(handles)
                case UtilityCall() | Shutdown():
                    raise ValueError(f"the twin's engines are not asked for {message}")
                case _:
                    core.apply_kv(message)

    def _take_outputs(self) -> None:
        if (outputs := self.core.take_outputs()) is not None:
            self._sink.outputs(self.index, outputs)

    # ------------------------------------------------------------ cruising

    def _cruise(self) -> bool:
        """Begin to cruise if there is anything to gain."""
        core = self.core
        turns = min(core.skippable_turns, MAX_TURNS)
        if turns < MIN_TURNS:
            return False
        slots = core.state.running
        context_tokens = total(core.state.seats.computed[slots])
        ends = self.executor.ends_of_decodes(len(slots), context_tokens, turns)
        if (deadline_s := core.next_deadline_s()) is not None:
            # Turn i begins at the end of turn i - 1; one that begins at the deadline is not plain.
            if self.clock.now() >= deadline_s:
                return False
            turns = min(turns, int(ends.searchsorted(deadline_s, side="left")) + 1)
            if turns < MIN_TURNS:
                return False
        self._take_outputs()
        self._ends, self._turns, self.is_cruising = ends, turns, True
        self._end_turn = turns if core.ends_in(turns) else 0
        self._outlook, self._turns_told, self._tokens_told = None, 0, 0
        self._first_tokens = core.first_tokens_due
        self.is_waiting = False
        self._set_next()
        return True

    def _set_next(self) -> None:
        """The cruise goes on to its last turn; but the router must hear of first tokens at once."""
        assert self._ends is not None
        self.next_s = float(self._ends[0 if self._first_tokens else self._turns - 1])

    def _tell_first_turn(self, time_s: float) -> None:
        """The tokens of the first turn, some of which are the first of their requests."""
        slots, due = self.core.state.running, self._first_tokens
        handles = self.core.state.seats.handle[slots]
        kinds, times = np.array([_FIRST_TOKEN] * len(due), np.uint8), np.array([time_s] * len(due))
        self._sink.outputs(
            self.index,
            EngineOutputs(
                handles=handles,
                num_tokens=ones(len(slots)),
                token_ids=self.executor.tokens_of(slots),
                events=Events(np.array(due, np.int64), kinds, times),
                stats=self.stats_at(time_s),
                time_s=time_s,
            ),
        )
        self._first_tokens, self._tokens_told = [], 1

    def _skip(self, turns: int, *, heeding: bool = False) -> None:
        """Take `turns` turns of the cruise, which then is over; the clock goes to their end.

        With `heeding` what has come is heard, as it is at the end of a step before its tokens are
        counted. For them that makes no difference, but what the engine says of itself has it.
        """
        assert self._ends is not None
        ends, self._ends, self.is_cruising = self._ends, None, False
        told, self._first_tokens = self._tokens_told, []
        if turns == 0:
            return
        if turns == self._end_turn:
            self._skip_to_ends(turns, ends, told)
            return
        slots = self.core.state.running
        handles = self.core.state.seats.handle[slots]
        self.clock.advance_to(float(ends[turns - 1]))
        report = self.executor.skip(turns, ends)
        self.core.skip(turns, self.executor.tokens_of(slots), report=report)
        self.num_skipped += turns
        hears = heeding and bool(self._inbox)
        tells_later = hears or turns == told
        if hears:
            self._hear()
        # What is said of what was heard goes before the last turn's tokens, as in single turns.
        heard = turns - 1 if hears and self._tells_at_once else turns
        if heard > told:
            stats = None if tells_later else self.core.stats()
            self._sink.decoded(self.index, handles, ends[told:heard], stats)
        if heeding:
            self._take_inbox()
        if max(heard, told) < turns:
            self._sink.decoded(self.index, handles, ends[turns - 1 : turns], None)
        if tells_later:
            said = EngineOutputs(
                handles=NO_HANDLES,
                num_tokens=NO_TOKENS,
                token_ids=NO_TOKENS,
                stats=self.core.stats(),
                time_s=self.clock.now(),
            )
            self._sink.outputs(self.index, said)

    def _skip_to_ends(self, turns: int, ends: Float64s, told: int) -> None:
        """The same for a cruise to the end of requests, which is told as a step's outputs are."""
        core, state = self.core, self.core.state
        slots = state.running
        handles, tokens = state.seats.handle[slots], self.executor.tokens_of(slots)
        if turns - 1 > told:
            self.clock.advance_to(float(ends[turns - 2]))
            stats = self._stats_after(turns - 1)
            self._sink.decoded(self.index, handles, ends[told : turns - 1], stats)
        self.clock.advance_to(float(ends[turns - 1]))
        self._take_inbox()
        core.skip(turns, tokens)
        self.executor.skip_to_ends(turns, ends, core.last_step if core.num_in_flight else None)
        self.num_skipped += turns
        outputs = core.take_outputs()
        assert outputs is not None
        outputs.handles, outputs.token_ids = handles, tokens
        outputs.num_tokens, outputs.stats = ones(len(slots)), core.stats()
        self._tell(outputs)
