"""An engine without processes: an `EngineCore` and an executor as a task on the caller's loop.

With `FakeExecutor` it needs no model and no torch; with a real executor it is a whole engine in
one thread. Messages pass through their encoding in both directions, as they would between
processes.
"""

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from twostroke.errors import EngineDeadError
from twostroke.kv_messages import KvConnect, KvDisconnect, KvReady, KvRelease, KvRenew
from twostroke.messages import (
    AbortRequests,
    AddRequest,
    EngineReady,
    FromEngine,
    Shutdown,
    ToEngine,
    UtilityCall,
    UtilityReply,
    decoder_for,
    encode,
)

if TYPE_CHECKING:
    from twostroke.core.executor import Executor
    from twostroke.core.loop import EngineCore


class InProcessChannel:
    """An `EngineChannel` whose engine runs one step per turn of the event loop.

    `depth` steps are in flight at once (2: as with asynchronous scheduling). `kill` ends the engine
    as a crash would.
    """

    def __init__(
        self, core: "EngineCore", executor: "Executor", ready: EngineReady, *, depth: int = 2
    ) -> None:
        self._core = core
        self._executor = executor
        self._depth = depth
        self._inbox: deque[ToEngine] = deque()
        self._wake = asyncio.Event()
        self._outbox: asyncio.Queue[bytes | EngineDeadError] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._to_engine = decoder_for(ToEngine)
        self._from_engine = decoder_for(FromEngine)
        self.sent: list[ToEngine] = []  # everything the client sent, for tests to look at
        self._emit(ready)

    def send(self, message: ToEngine) -> None:
        decoded: ToEngine = self._to_engine.decode(encode(message))
        self.sent.append(decoded)
        self._inbox.append(decoded)
        self._wake.set()

    async def receive(self) -> FromEngine:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="engine in process")
        data = await self._outbox.get()
        if isinstance(data, EngineDeadError):
            raise data
        message: FromEngine = self._from_engine.decode(data)
        return message

    def kill(self, reason: str = "killed") -> None:
        """What was already sent is still received, then `receive` raises EngineDeadError."""
        self.close()
        self._outbox.put_nowait(EngineDeadError(reason))

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _emit(self, message: msgspec.Struct) -> None:
        self._outbox.put_nowait(encode(message))

    async def _run(self) -> None:
        core = self._core
        while True:
            if not core.num_in_flight and not core.has_work() and not self._inbox:
                core.check_integrity()
                await self._sleep()
            while self._inbox:
                self._apply(self._inbox.popleft())
            plan = core.begin() if core.num_in_flight < self._depth else None
            if plan is not None:
                self._executor.submit(plan)
            if core.num_in_flight == self._depth or (plan is None and core.num_in_flight):
                self._emit(core.finish(self._executor.collect()))
            if (outputs := core.take_outputs()) is not None:
                self._emit(outputs)
            await asyncio.sleep(0)

    async def _sleep(self) -> None:
        """Until a message comes, or something expires."""
        self._wake.clear()
        deadline_s = self._core.next_deadline_s()
        timeout_s = None if deadline_s is None else max(0.0, deadline_s - self._core.now())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), timeout_s)

    def _apply(self, message: ToEngine) -> None:
        match message:
            case AddRequest():
                self._core.add(message)
            case AbortRequests(handles):
                self._core.abort(handles)
            case KvReady() | KvRelease() | KvRenew() | KvConnect() | KvDisconnect():
                self._core.apply_kv(message)
            case UtilityCall(call_id, method, args):
                self._emit(self._call(call_id, method, args))
            case Shutdown():
                self._core.abort([slot["handle"] for slot in self._core.slots()])

    def _call(self, call_id: int, method: str, args: list[Any]) -> UtilityReply:
        if method not in ("slots", "reset_prefix_cache", "check_integrity"):
            return UtilityReply(call_id, error=f"the engine has no method {method!r}")
        return UtilityReply(call_id, result=getattr(self._core, method)(*args))
