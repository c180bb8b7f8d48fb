"""Loads of KV that have ended: what has arrived counts as computed, and holds blocks meanwhile.

Between its end and its admission a load owns blocks without running. Where such loads fill the pool
together, the last of them gives its blocks back: nothing else would ever let one of them on.
"""

from twostroke.core.policy import MAX_FAILED_LOADS
from twostroke.core.request import Request, Status
from twostroke.core.state import EngineState
from twostroke.core.step import Step
from twostroke.messages import Finished, FinishReason


def end_load(state: EngineState, request: Request) -> None:
    """An asynchronous load was reported: what arrived counts as computed."""
    if request.load_failed and request.num_computed == 0:
        state.kv.free(request.table)
    else:
        state.kv.register(request.table, request.num_computed)
    if request.load_failed:
        request.num_failed_loads += 1
        if request.num_failed_loads == MAX_FAILED_LOADS and not state.faithful:
            request.may_load = False
    request.load_failed = request.load_reported = False
    if request.num_computed == request.num_known:
        request.num_computed -= 1  # one token must run, to sample the next
        if request.num_computed == 0 and not state.faithful:
            request.may_load = False  # or it would be asked for again
    request.status = Status.PREEMPTED if request.num_preemptions else Status.WAITING


def take_from_ended_load(state: EngineState, step: Step) -> bool:
    """Take the blocks of the last request whose load has ended and which does not run yet."""
    holders = [
        request
        for request in state.queues.skipped()
        if request.table.blocks and not state.queues.is_blocked(request)
    ]
    if holders:
        holders[-1].may_load = False
        state.lose_blocks(holders[-1])
        step.preempted.append(holders[-1])
    return bool(holders)


def break_deadlock(state: EngineState, step: Step, blocked: Request) -> None:
    """If nothing runs, loads or is sent, and `blocked` lacks blocks, nothing will ever change.

    Either ended loads hold the pool: each owns blocks and needs more (two remote prefixes that
    fill the pool together are enough). The last of them gives its blocks back and recomputes.
    Or nobody holds anything, and the request needs more than the pool.
    """
    if state.num_running or state.held or state.queues.num_blocked or len(step.slots):
        return
    if not take_from_ended_load(state, step):
        state.queues.remove(blocked)
        give_up(state, step, blocked)


def give_up(state: EngineState, step: Step, request: Request) -> None:
    """End a request that the whole pool cannot carry further, as if at its length."""
    state.finish(request, FinishReason.LENGTH)
    state.compact()
    step.ended.append(Finished(request.handle, FinishReason.LENGTH))
