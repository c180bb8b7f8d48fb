"""The engines of one server as process 1 drives them: channels, the dispatcher, and its timer.

    dispatcher ── messages ──▶ links ──▶ engines        timer ── due ──▶ dispatcher.on_time

In a plain deployment every engine is needed: the first death is the end of the server. Where
engines have roles, the server lives as long as one of them decodes; others come and go.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from twostroke.advice.online import Advice, Advisor
from twostroke.client.link import EngineLink, join_answers, join_ready
from twostroke.clock import Clock
from twostroke.errors import EngineDeadError
from twostroke.messages import AddRequest, EngineOutputs, EngineReady, EngineStats, Finished
from twostroke.metrics import Metrics, SampleRecord, total_stats
from twostroke.metrics_handoff import EngineRole, HandoffNumbers
from twostroke.router.dispatch import Dispatcher, DispatchSettings, Role
from twostroke.transport import EngineChannel


class EngineFleet:
    """Links by index. `roles` None: a plain deployment.

    `on_timer` is given what the dispatcher has for clients when its time has come; `on_unsent` a
    request that could not be sent.
    """

    def __init__(
        self,
        channels: Sequence[EngineChannel],
        roles: Sequence[Role] | None,
        settings: DispatchSettings,
        clock: Clock,
        metrics: Metrics,
        *,
        on_timer: Callable[[EngineOutputs], None],
        on_unsent: Callable[[EngineLink, AddRequest, EngineDeadError], None],
    ) -> None:
        self.has_roles = roles is not None
        self.dispatcher = Dispatcher(clock, settings)
        self.advisor = (
            Advisor(clock, streams=settings.kv_mode == "stream") if self.has_roles else None
        )
        self.links: dict[int, EngineLink] = {}
        self.ready: EngineReady | None = None  # what all can do, once they have loaded
        self.dead: EngineDeadError | None = None
        self.changed = asyncio.Event()  # ready or dead
        self._clock = clock
        self._metrics = metrics
        self._on_timer = on_timer
        self._on_unsent = on_unsent
        self._timer: asyncio.TimerHandle | None = None
        self._due_s: float | None = None
        self._is_sending = False
        if self.has_roles:
            metrics.handoff = self.numbers
        all_both: list[Role] = ["both"] * len(channels)
        for channel, role in zip(channels, all_both if roles is None else roles, strict=True):
            self.add(channel, role)

    def add(self, channel: EngineChannel, role: Role) -> EngineLink:
        """One more engine, in the place of one that is gone if there is any."""
        gone = [link.index for link in self.links.values() if link.dead is not None]
        index = min(gone, default=len(self.links))
        link = self.links[index] = EngineLink(index, channel)
        self._metrics.add_engine(index)
        self.dispatcher.add_engine(index, role)
        self._look_around()
        return link

    # ------------------------------------------------------------ what they are

    @property
    def living(self) -> list[EngineLink]:
        return [link for link in self.links.values() if link.dead is None]

    @property
    def stats(self) -> EngineStats:
        """The latest of every engine, added up."""
        return total_stats([link.stats for link in self.links.values()])

    @property
    def num_of_roles(self) -> tuple[int, int]:
        """Engines that prefill, and that decode, for others."""
        roles = [engine.role for engine in self.dispatcher.fleet if engine.state != "gone"]
        return roles.count("prefill"), roles.count("decode")

    def on_ready(self, link: EngineLink, message: EngineReady) -> None:
        """An engine has loaded."""
        link.ready = message
        self._metrics.engines[link.index].engine_ready(message)
        if self.advisor is not None:
            role = self.dispatcher.fleet[link.index].role
            self.advisor.set_engine(link.index, role, message)
        self.dispatcher.engine_ready(link.index, message)
        self._look_around()
        self.send_all()

    def died(self, link: EngineLink, error: EngineDeadError) -> list[Finished]:
        """An engine is gone. Returns the requests that end by it."""
        ends = self.dispatcher.engine_died(link.index, error.message)
        if len(self.links) > 1:
            error = EngineDeadError(f"engine {link.index}: {error.message}", hint=error.hint)
        link.die(error)
        if not self.has_roles:
            self.dead = self.dead or error
        self._look_around()
        self.send_all()
        return ends

    def _look_around(self) -> None:
        """See whether the server can serve, after an engine came or went."""
        if self.has_roles:
            errors = [link.dead for link in self.links.values() if link.dead is not None]
            lives = self.dispatcher.can_decode or not errors
            self.dead = None if lives else (self.dead or errors[-1])
        loaded = [link.ready for link in self.living if link.ready is not None]
        is_loading = self.ready is None and len(loaded) < len(self.living)
        serves = any(engine.decodes_now for engine in self.dispatcher.fleet)
        if serves and not is_loading and self.dead is None:
            self.ready = join_ready(loaded)
        self.changed.set()
        self.changed = asyncio.Event()

    async def wait_ready(self) -> EngineReady:
        """Wait until every engine has loaded. Raises EngineDeadError when it cannot be."""
        while True:
            if self.dead is not None:
                raise EngineDeadError(self.dead.message, hint=self.dead.hint)
            if self.ready is not None:
                return self.ready
            await self.changed.wait()

    def observe(self, index: int, outputs: EngineOutputs) -> None:
        """What an engine did, for the advice."""
        if self.advisor is not None:
            self.advisor.on_outputs(index, outputs)
            if self.advisor.is_due:
                self.advice()

    def ended(self, records: Sequence[SampleRecord]) -> None:
        """Requests that ended, for the advice: those with an answer."""
        if self.advisor is not None:
            for it in records:
                if it.finish_reason in ("stop", "length"):
                    self.advisor.on_ended(
                        it.prompt_tokens, it.cached_tokens, it.output_tokens, it.ledger.spent()
                    )

    def advice(self) -> Advice | None:
        """Verdicts on how the engines, in the roles that they have now, do their work."""
        if self.advisor is None:
            return None
        for engine in self.dispatcher.fleet:
            if engine.state == "gone":
                self.advisor.engine_gone(engine.index)
            else:
                self.advisor.set_engine(engine.index, engine.role)
        return self.advisor.update()

    def numbers(self) -> HandoffNumbers:
        """What the router counted, for metrics and the status line."""
        dispatcher, advice = self.dispatcher, self.advice()
        counted = dispatcher.counters
        return HandoffNumbers(
            verdicts={} if advice is None else advice.gauges(),
            observed={} if advice is None else advice.seen.figures(),
            advised=None if advice is None else advice.ratio,
            num_waiting=dispatcher.num_waiting,
            num_tickets=dispatcher.num_holds,
            decisions=counted.decisions,
            retries=dict(counted.retries),
            recomputes=dict(counted.recomputes),
            failures=dict(counted.failures),
            num_late=counted.num_late,
            num_unknown_tickets=counted.num_unknown_tickets,
            num_transfers=counted.num_transfers,
            transfer_tokens=counted.transfer_tokens,
            transfer_bytes=counted.transfer_bytes,
            transfer_messages=counted.transfer_messages,
            transfer_s=counted.transfer_s,
            engines={
                it.index: EngineRole(role=it.role, state=it.state, stats=it.stats, busy_s=it.busy_s)
                for it in dispatcher.fleet
            },
        )

    def describe(self) -> list[dict[str, Any]]:
        """Every engine: its role, its state, and what it last said of itself."""
        return [
            {
                "engine": engine.index,
                "role": engine.role,
                "next_role": engine.next_role,
                "state": "leaving" if engine.is_leaving and not engine.error else engine.state,
                "error": engine.error or None,
                "engine_id": None if engine.endpoint is None else engine.endpoint.engine_id,
                "num_requests": engine.num_legs,
                "num_held_prompts": engine.num_holds,
                "stats": {name: getattr(engine.stats, name) for name in _SHOWN},
            }
            for engine in self.dispatcher.fleet
        ]

    # ------------------------------------------------------------ what is sent

    def send_all(self) -> None:
        """Send what the dispatcher has to send, and set the timer by it."""
        if self._is_sending:
            return  # a failure to send has led to more: the loop below sees it
        self._is_sending = True
        try:
            while messages := self.dispatcher.take_messages():
                for index, message in messages:
                    link = self.links[index]
                    try:
                        if link.dead is None:
                            link.send(message)
                    except EngineDeadError as error:
                        # Nobody hears of the others; they are no use to an engine that is gone.
                        if isinstance(message, AddRequest):
                            self._on_unsent(link, message, error)
        finally:
            self._is_sending = False
        self._set_timer()

    def _set_timer(self) -> None:
        due_s = self.dispatcher.next_deadline_s()
        if due_s == self._due_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due_s, self._timer = due_s, None
        if due_s is not None:
            delay_s = max(due_s - self._clock.now(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._ring)

    def _ring(self) -> None:
        self._timer = self._due_s = None
        if (outputs := self.dispatcher.on_time()) is not None:
            self._on_timer(outputs)
        self.send_all()

    async def call(self, method: str, *args: Any) -> Any:
        """Ask every engine something off the hot path; see `AsyncEngine.call`."""
        links = self.living if self.has_roles else list(self.links.values())
        if method == "ping" and self.has_roles:
            return await self._ping()
        asked = [asyncio.create_task(link.call(method, list(args))) for link in links]
        try:
            answers = await asyncio.gather(*asked)
        finally:
            for task in asked:
                task.cancel()
        if method == "reset_prefix_cache":
            for link, is_reset in zip(links, answers, strict=True):
                if is_reset:
                    self.dispatcher.prefixes_reset(link.index)
        indices = [link.index for link in links]
        answer = join_answers(method, dict(zip(indices, answers, strict=True)))
        if method == "slots" and self.has_roles:
            return [slot | {"role": self.dispatcher.fleet[slot["engine"]].role} for slot in answer]
        return answer

    async def _ping(self) -> Any:
        """The first answer of an engine that decodes: the server can do without the others."""
        able = [link for link in self.living if self.dispatcher.fleet[link.index].decodes_now]
        asked = {asyncio.create_task(link.call("ping", [])) for link in able}
        try:
            waiting = asked
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task.exception() is None:
                        return task.result()
        finally:
            for task in asked:
                task.cancel()
        raise EngineDeadError("no engine that decodes answers")

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()


_SHOWN = (
    "num_running",
    "num_waiting",
    "num_loading",
    "kv_usage",
    "num_preemptions",
    "num_holds",
    "hold_usage",
    "num_expired_leases",
    "num_failed_loads",
)
