"""One of the server's engines as process 1 sees it, and how the answers of several become one."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from twostroke.errors import EngineDeadError, TwostrokeError
from twostroke.messages import (
    EngineProgress,
    EngineReady,
    EngineStats,
    FromEngine,
    ToEngine,
    UtilityCall,
    UtilityReply,
)
from twostroke.transport import EngineChannel

Fact = tuple[str, str, str]  # name, value, reason


class EngineLink:
    """An engine's channel, and what the engine said of itself."""

    def __init__(self, index: int, channel: EngineChannel) -> None:
        self.index = index
        self.ready: EngineReady | None = None
        self.dead: EngineDeadError | None = None
        self.stats = EngineStats()
        self.progress: dict[str, EngineProgress] = {}  # the latest of each stage
        self._channel = channel
        self._call_ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}

    def send(self, message: ToEngine) -> None:
        """Queue a message. EngineDeadError when the engine is gone."""
        self._channel.send(message)

    async def receive(self) -> FromEngine:
        """The next message. Raises EngineDeadError once the engine is gone."""
        return await self._channel.receive()

    async def call(self, method: str, args: list[Any]) -> Any:
        """Ask the engine core; see `AsyncEngine.call`."""
        if self.dead is not None:
            raise EngineDeadError(self.dead.message, hint=self.dead.hint)
        call_id = next(self._call_ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._channel.send(UtilityCall(call_id, method, args))
            return await future
        finally:
            del self._calls[call_id]

    def on_reply(self, reply: UtilityReply) -> None:
        """Wake the call that it answers, if that still waits."""
        future = self._calls.get(reply.call_id)
        if future is None or future.done():
            return
        if reply.error is None:
            future.set_result(reply.result)
        else:
            future.set_exception(TwostrokeError(reply.error))

    def die(self, error: EngineDeadError) -> None:
        """The engine is gone: its calls end, now, and it does nothing any more."""
        self.dead = error
        for gauge in ("num_running", "num_waiting", "num_loading", "kv_usage"):
            setattr(self.stats, gauge, 0)
        self.stats.num_holds, self.stats.hold_usage = 0, 0.0
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(error.message, hint=error.hint))


def total_progress(links: Sequence[EngineLink], stage: str) -> EngineProgress:
    """The units of a stage over all engines that have told of it."""
    parts = [link.progress[stage] for link in links if stage in link.progress]
    return EngineProgress(stage, sum(p.done for p in parts), sum(p.total for p in parts))


def join_ready(engines: Sequence[EngineReady]) -> EngineReady:
    """What any of the engines can do, and their facts: those that they share are told once."""
    first = engines[0]
    if len(engines) == 1:
        return first
    return EngineReady(
        engine=first.engine,
        max_model_len=min(it.max_model_len for it in engines),
        num_blocks=min(it.num_blocks for it in engines),
        block_size=first.block_size,
        facts=[
            ("Engines", f"{len(engines)}, each with the whole model", "--data-parallel-size"),
            *_join_facts(engines),
        ],
    )


def _join_facts(engines: Sequence[EngineReady]) -> list[Fact]:
    """Rows in the order in which they first come. A value that not all have names its engines."""
    told_by: dict[tuple[str, str], dict[int, str]] = {}  # name, value -> reason by engine
    for it in engines:
        for name, value, reason in it.facts:
            told_by.setdefault((name, value), {})[it.engine] = reason
    names = list(dict.fromkeys(name for name, _ in told_by))
    rows = []
    for (name, value), reasons in sorted(told_by.items(), key=lambda it: names.index(it[0][0])):
        first, reason = next(iter(reasons.items()))
        if len(set(reasons.values())) > 1:
            reason += f" in engine {first}"
        if len(reasons) < len(engines):
            name += f", engine {', '.join(map(str, reasons))}"
        rows.append((name, value, reason))
    return rows


def join_answers(method: str, answers: Mapping[int, Any]) -> Any:
    """One answer of several engines, by index, to the same `UtilityCall`."""
    match method:
        case "slots":
            return [slot | {"engine": i} for i, slots in answers.items() for slot in slots]
        case "reset_prefix_cache":
            return all(answers.values())
    values = list(answers.values())
    return values[0] if len(values) == 1 else values
