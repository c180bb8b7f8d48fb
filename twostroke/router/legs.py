"""Legs on engines, tickets that are out, and the messages that follow from both.

Handles: the leg that serves the client has the client's, so that most outputs pass untouched; other
legs, and those of a later try, get ours (`FIRST_OWN_HANDLE` on). A request id gets "#p" for its
prefill leg and "#n" for try n, since an engine may still hold what an earlier one left.
"""

import itertools
from collections import Counter

import msgspec

from twostroke.kv_messages import (
    KvConnect,
    KvDisconnect,
    KvReceive,
    KvRelease,
    KvRenew,
    KvSend,
    KvTicket,
)
from twostroke.messages import AbortRequests, AddRequest, SamplingParams, ToEngine
from twostroke.router.engines import Engine, Fleet, Need
from twostroke.router.jobs import FIRST_OWN_HANDLE, Job, Leg, LegKind
from twostroke.router.policy import RoutingPolicy


class Legs:
    """Opens and closes legs. Every way out goes through `unwind`."""

    def __init__(self, fleet: Fleet, routing: RoutingPolicy) -> None:
        self.messages: list[tuple[int, ToEngine]] = []
        self.special: dict[int, dict[int, Leg]] = {}  # what does not pass untouched
        self._fleet = fleet
        self._routing = routing
        self._legs: dict[int, dict[int, Leg]] = {}  # by engine, and its handle
        self._holds: dict[bytes, Engine] = {}  # by transfer id: who keeps KV for us
        self._readers: Counter[str] = Counter()  # loads under way, by the engine id read from
        self._gone_ids: set[str] = set()  # gone, but perhaps still being read from
        self._own_handles = itertools.count(FIRST_OWN_HANDLE)

    # ------------------------------------------------------------ engines

    def add_engine(self, engine: int) -> None:
        self._legs[engine], self.special[engine] = {}, {}

    def engine_died(self, engine: Engine) -> list[Leg]:
        """Forget what it had; returns its open legs, which are still to be closed."""
        self.messages = [message for message in self.messages if message[0] != engine.index]
        self._holds = {tid: holder for tid, holder in self._holds.items() if holder is not engine}
        legs = [leg for leg in self._legs[engine.index].values() if leg.is_open]
        self.add_engine(engine.index)
        if engine.endpoint is not None:
            self._gone_ids.add(engine.endpoint.engine_id)
            self._disconnect(engine.endpoint.engine_id)
        return legs

    def introduce(self, now_s: float) -> None:
        """Tell readers of those that they may have to read from."""
        for reader, endpoint in self._fleet.introductions(now_s):
            self.send(reader, KvConnect(endpoint))

    def _disconnect(self, engine_id: str) -> None:
        """Tell those that read from a dead engine, once none of their loads needs it any more."""
        if engine_id in self._gone_ids and not self._readers[engine_id]:
            self._gone_ids.discard(engine_id)
            for reader in self._fleet.forget(engine_id):
                self.send(reader, KvDisconnect(engine_id))

    def send(self, engine: Engine, message: ToEngine) -> None:
        if engine.state != "gone":
            self.messages.append((engine.index, message))

    # ------------------------------------------------------------ legs

    def get(self, engine: Engine, handle: int) -> Leg | None:
        """The leg that an engine knows by that handle, open or given up."""
        return self._legs[engine.index].get(handle)

    def prefill(self, job: Job, engine: Engine, send: KvSend) -> None:
        """Send the prefill leg. Its token is nobody's: the one that counts is drawn on D."""
        request = msgspec.structs.replace(
            job.request,
            handle=next(self._own_handles),
            request_id=f"{_request_id(job)}#p",
            params=SamplingParams(temperature=0.0, max_tokens=1),
            max_tokens=1,
            eos_token_ids=(),
            kv_send=send,
        )
        job.prefill = self._open(job, engine, LegKind.PREFILL, request)

    def serve(self, job: Job, kind: LegKind, receive: KvReceive | None = None) -> None:
        """Send the leg whose tokens are the client's, to the engine that is reserved."""
        assert job.reader is not None
        request = msgspec.structs.replace(
            job.request,
            handle=job.handle if job.num_retries == 0 else next(self._own_handles),
            request_id=_request_id(job),
            kv_receive=receive,
        )
        job.serving = self._open(job, job.reader, kind, request)
        if receive is not None and receive.ticket is not None:
            self.reads(job.serving, receive.ticket)

    def _open(self, job: Job, engine: Engine, kind: LegKind, request: AddRequest) -> Leg:
        leg = Leg(job, engine, request.handle, kind)
        self._legs[engine.index][leg.handle] = leg
        if kind is not LegKind.WHOLE or leg.handle != job.handle:
            self.special[engine.index][leg.handle] = leg
        engine.num_legs += 1
        if kind is LegKind.PREFILL:
            self._routing.sent(leg.handle, engine.index, job.num_prompt_tokens, job.keys)
        self.send(engine, request)
        return leg

    def close(self, leg: Leg) -> None:
        """A leg has ended, or counts as if."""
        if leg.is_open:
            leg.is_open = False
            leg.engine.num_legs -= 1
            self._routing.ended(leg.handle if leg.kind is LegKind.PREFILL else leg.job.handle)
            self.has_read(leg)

    def mute(self, leg: Leg) -> None:
        """What its engine yet says of it is for nobody."""
        leg.is_muted = True
        self.special[leg.engine.index][leg.handle] = leg

    def forget(self, leg: Leg) -> None:
        """Its engine has said the last of it."""
        self.close(leg)
        self._legs[leg.engine.index].pop(leg.handle, None)
        self.special[leg.engine.index].pop(leg.handle, None)

    def unwind(self, job: Job) -> None:
        """Take a job from all engines, tickets and reservations included."""
        if job.serving is not None:
            self._give_up(job.serving)
        self.drop_prefill(job)
        self.unreserve(job)
        job.serving = job.ticket = job.deadline_s = None
        job.is_prefilled = False

    def drop_prefill(self, job: Job) -> None:
        """Nobody needs what P computes, or keeps, for this job."""
        if job.prefill is not None:
            self._give_up(job.prefill)
        job.prefill = job.source = None
        for transfer_id in job.holds:
            if (engine := self._holds.pop(transfer_id, None)) is not None:
                engine.num_holds -= 1
                self.send(engine, KvRelease([transfer_id]))
        job.holds.clear()

    def _give_up(self, leg: Leg) -> None:
        if leg.is_open:
            self.close(leg)
            if leg.engine.state != "gone":
                self.mute(leg)
                self.send(leg.engine, AbortRequests([leg.handle]))

    def reserve(self, job: Job, reader: Engine, need: Need, *, is_whole: bool) -> None:
        """It will be served there, and counts from now on: what is sent later looks at it."""
        job.reader, job.need = reader, need
        reader.reserve(need)
        num_prompt = job.num_prompt_tokens if is_whole else 0
        self._routing.sent(job.handle, reader.index, num_prompt, job.keys)

    def unreserve(self, job: Job) -> None:
        """Its room on the engine that was to serve it is free again."""
        if job.reader is not None and job.need is not None:
            job.reader.unreserve(job.need, has_arrived=job.has_streamed)
            job.reader = job.need = None
            self._routing.ended(job.handle)

    def first_token(self, leg: Leg) -> None:
        """Its prompt is computed, or has come."""
        job = leg.job
        if leg.kind is LegKind.PREFILL:
            self._routing.first_token(leg.handle)
        if leg.kind is LegKind.PREFILL or not leg.is_open or job.has_streamed:
            return
        self._routing.first_token(job.handle)
        job.has_streamed, job.deadline_s = True, None
        self.drop_prefill(job)
        if job.reader is not None and job.need is not None:
            job.reader.arrived(job.need)

    def pass_untouched(self, leg: Leg) -> None:
        """From its first token on, a leg under the client's own handle is like any other."""
        if leg.handle == leg.job.handle and not leg.is_muted:
            self.special[leg.engine.index].pop(leg.handle, None)

    # ------------------------------------------------------------ tickets

    @property
    def num_holds(self) -> int:
        return len(self._holds)

    def hold(self, leg: Leg, transfer_id: bytes) -> None:
        """A ticket came of a prefill leg: keep it for the job, or release it if that is over."""
        if transfer_id in leg.transfer_ids:
            return  # of an earlier chunk, or told twice
        leg.transfer_ids.add(transfer_id)
        if leg.is_open:
            leg.job.holds.append(transfer_id)
            self._holds[transfer_id] = leg.engine
            leg.engine.num_holds += 1
        else:
            self.send(leg.engine, KvRelease([transfer_id]))

    def holder(self, ticket: KvTicket) -> Engine | None:
        """Who keeps the KV behind a ticket."""
        return self._holds.get(ticket.transfer_id)

    def renew(self) -> None:
        """Begin the leases of all tickets anew."""
        by_engine: dict[Engine, list[bytes]] = {}
        for transfer_id, engine in self._holds.items():
            by_engine.setdefault(engine, []).append(transfer_id)
        for engine, transfer_ids in by_engine.items():
            self.send(engine, KvRenew(transfer_ids))

    def reads(self, leg: Leg, ticket: KvTicket) -> None:
        """The leg's load has begun."""
        if not leg.reads_from:
            leg.reads_from = ticket.endpoint.engine_id
            leg.num_bytes = leg.job.num_prompt_tokens * ticket.endpoint.layout.bytes_per_token
            self._readers[leg.reads_from] += 1
            self._fleet.pair(leg.engine, leg.reads_from).bytes_under_way += leg.num_bytes

    def has_read(self, leg: Leg) -> None:
        """The leg's load is over."""
        if leg.reads_from:
            engine_id, leg.reads_from = leg.reads_from, ""
            self._readers[engine_id] -= 1
            if (pair := self._fleet.known_pair(leg.engine, engine_id)) is not None:
                pair.bytes_under_way -= leg.num_bytes
            self._disconnect(engine_id)


def _request_id(job: Job) -> str:
    name = job.request.request_id
    return f"{name}#{job.num_retries}" if job.num_retries else name
