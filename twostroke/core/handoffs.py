"""What the core does about hand-offs: the router's messages, ended transfers, what can be read.

The connector's half decides about transfers; this applies what follows for requests.
"""

from twostroke.connector.base import KvHandoffScheduler
from twostroke.core.request import Request
from twostroke.core.state import EngineState
from twostroke.core.step import Step
from twostroke.kv_messages import KvConnect, KvDisconnect, KvReady, KvRelease, KvRenew
from twostroke.messages import EventKind, Finished, FinishReason

KvMessage = KvReady | KvRelease | KvRenew | KvConnect | KvDisconnect


class Handoffs:
    """Hand-offs of one engine, from the core's side."""

    def __init__(self, state: EngineState, connector: KvHandoffScheduler) -> None:
        self._state = state
        self._connector = connector

    def apply(self, message: KvMessage) -> None:
        """Pass a message of the router on. Unknown names are counted and ignored."""
        match message:
            case KvReady():
                self._connector.ready(message)
            case KvRelease(transfer_ids):
                self._connector.release(transfer_ids)
            case KvRenew(transfer_ids):
                self._connector.renew(transfer_ids)
            case KvConnect(endpoint):
                self._connector.connect(endpoint)
            case _:
                self._connector.disconnect(message.engine_id)

    def settle(self) -> tuple[list[Finished], list[tuple[int, EventKind]]]:
        """Apply what is over: requests that can run, those that end, and blocks to free.

        Returns the ends and, before them, the events of live requests (handle, kind).
        """
        finished: list[Finished] = []
        events: list[tuple[int, EventKind]] = []
        ends = self._connector.take_ends()
        if ends is None:
            return finished, events
        state = self._state
        state.is_stalled = False
        for uid in ends.loaded:
            request = state.loading.pop(uid)
            state.loaded[uid] = request
            request.load_reported = True
            state.queues.wake(request)
            events.append((request.handle, EventKind.LOADED))
        for uid, error in ends.failed:
            request = state.requests[uid]
            if uid in state.loading:
                events.append((request.handle, EventKind.LOADED))
            state.queues.remove(request)
            state.finish(request, FinishReason.ERROR)
            finished.append(Finished(request.handle, FinishReason.ERROR, error=error))
        for uid in ends.freed:
            state.release_held(state.held[uid])
        return finished, events

    def report_chunks(self, step: Step) -> None:
        """What the step has computed of prompts that are fetched while they are computed."""
        state = self._state
        for row, uid in enumerate(step.uids.tolist()):
            if state.streaming.get(uid, step.number + 1) <= step.number:
                request: Request = state.requests[uid]
                num_tokens = int(step.num_computed[row] + step.num_scheduled[row])
                self._connector.chunk_computed(request, request.table.blocks, num_tokens)
