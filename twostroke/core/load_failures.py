"""KV that did not arrive: who is affected, and from where they must compute again.

A connector reports the blocks (or the requests) whose load failed. With policy `fail` every
affected request ends. With `recompute` it is cut back to before its first invalid block.

vLLM 0.22.1 recomputes in place, also where that cannot be right: a result that is in flight was
computed from what did not arrive, and another request that shares the block reads it meanwhile.
Then (and with a window, whose earlier blocks are gone) the request is preempted here and starts
again from what the prefix cache still holds, without loading; invalid blocks leave the cache.
`faithful` keeps vLLM's rule.
"""

from twostroke.core.request import Request, Status
from twostroke.core.state import EngineState
from twostroke.core.step import Step
from twostroke.kv.blocks import NULL_BLOCK
from twostroke.kv_messages import KvReport


def fail_loads(state: EngineState, step: Step, report: KvReport) -> dict[int, Request]:
    """Apply a report to all it affects, before the results of the same step.

    Returns the requests whose row of this step is void, or which must end, by uid.
    """
    loading = [r for r in state.queues.skipped() if r.status is Status.WAITING_FOR_REMOTE_KVS]
    invalid = _invalid_blocks(state, report, loading)
    if not invalid:
        return {}
    void: dict[int, Request] = {}
    marked: set[int] = set()
    for request in loading:
        cut = _cut(state, request, 0, invalid, marked)
        if cut is None:
            continue
        if state.config.kv_load_failure_policy == "fail":
            void[request.uid] = request
            continue
        request.load_failed = True
        shared = request.num_computed < request.num_local_hit or cut == len(request.table.blocks)
        if not state.faithful and (shared or state.kv.windowed):
            request.num_computed = 0
    _fail_running(state, step, invalid, void)
    if not state.faithful:
        state.kv.forget(invalid)
    return void


def _invalid_blocks(state: EngineState, report: KvReport, loading: list[Request]) -> set[int]:
    invalid = set(report.invalid_block_ids)
    failed = set(report.failed_recving)
    for request in loading:
        if request.request_id in failed:
            first = request.num_local_hit // state.config.block_size
            invalid.update(request.table.blocks[first:])
    if not state.faithful:
        invalid.discard(NULL_BLOCK)
    return invalid


def _fail_running(
    state: EngineState, step: Step, invalid: set[int], void: dict[int, Request]
) -> None:
    scheduled = dict(zip(step.uids.tolist(), step.num_scheduled.tolist(), strict=True))
    marked: set[int] = set()
    forgotten: set[int] = set()
    restart: list[Request] = []
    for slot in state.running.tolist():
        request = state.request_at(slot)
        state.seats.read(request)
        cut = _cut(state, request, scheduled.get(request.uid, 0), invalid, marked)
        if cut is None:
            continue
        void[request.uid] = request
        forgotten.update(request.table.blocks[cut:])
        if not state.faithful and _cannot_recompute_in_place(state, request, invalid):
            restart.append(request)
        state.seats.write(request)
    if state.config.kv_load_failure_policy == "fail":
        state.kv.forget(sorted(forgotten))
        return
    if restart:
        state.kv.forget(sorted(forgotten))
    for request in reversed(restart):
        state.preempt(state.running.tolist().index(request.slot))
        state.void_results(request)
        request.may_load = False


def _cannot_recompute_in_place(state: EngineState, request: Request, invalid: set[int]) -> bool:
    references = state.kv.pool.references
    shared = any(references[block] > 1 for block in invalid.intersection(request.table.blocks))
    return shared or state.config.async_scheduling or state.kv.windowed


def _cut(
    state: EngineState, request: Request, num_scheduled: int, invalid: set[int], marked: set[int]
) -> int | None:
    """Lower `num_computed` to the first invalid block that nobody before has marked.

    Returns the index from which blocks are invalid, the number of blocks when only blocks that
    were marked already are, or None when the request is not affected.
    """
    base = request.num_computed - num_scheduled
    blocks = request.table.blocks
    affected, cut = False, None
    for index in range(state.kv.blocks_for(base)):
        if blocks[index] not in invalid:
            continue
        affected = True
        if blocks[index] in marked:
            continue
        marked.add(blocks[index])
        if cut is None:
            cut = index
            request.num_computed = index * state.config.block_size
    if not affected:
        return None
    if cut is None:
        request.num_computed = base
        return len(blocks)
    return cut
