"""Rules that are better than vLLM's in some situation, each a named option that is off by default.

`admission` (who may pass a head that lacks memory)
    head      nobody (vLLM).
    loads     requests whose remote KV has arrived: they hold their blocks already and need few
              more, so keeping them behind the head only keeps memory idle.
    backfill  anybody who fits, but at most `max_backfills` requests pass one head; so a large
              request waits for a bounded number of smaller ones and does not starve.

`preemption` (whose blocks are taken when a running request needs one)
    last        the last admitted, or the worst by priority (vLLM).
    least_lost  of those whose blocks really become free, the one with the least computed; blocks
                that others share stay in use, so taking such a request frees nothing. With
                policy `priority` only among the worst priority.

`reserve_output_tokens` (admission leaves room for growth)
    0           only the known tokens must fit (vLLM).
    n           so must the next blocks of what runs, up to n output tokens each. Set to the
                typical output length, it admits a little later and preempts far less. Where
                prompts are handed over, 0 stands for the mean output of late.
"""

import numpy as np

from twostroke.core.request import Request
from twostroke.core.state import EngineState

MAX_FAILED_LOADS = 3  # of one request, before it computes its prompt itself
MAX_STALLS = 8  # preemptions of a request by itself, alone and without a new token
MAX_TRIES = 16  # blocked requests that a step looks at before it gives up backfilling


def last_victim(state: EngineState) -> int:
    """Place in `running` of the last admitted, or of the first with the worst priority key."""
    if state.config.policy == "fcfs":
        return state.num_running - 1
    keys = [state.request_at(slot).priority_key[:2] for slot in state.running.tolist()]
    return keys.index(max(keys))


def least_lost_victim(state: EngineState) -> int:
    """Place of the request that loses the least work and whose blocks become free now."""
    running = state.running
    places = np.argsort(state.seats.computed[running], kind="stable")
    if state.config.policy == "priority":
        priorities = np.array([state.request_at(s).priority_key[0] for s in running.tolist()])
        places = places[priorities[places] == priorities.max()]
    references = state.kv.pool.references
    for place in places.tolist():
        blocks = state.request_at(int(running[place])).table.blocks
        if np.count_nonzero(references[blocks] == 1):
            return int(place)
    return last_victim(state)


def reserved_blocks(state: EngineState) -> int:
    """Blocks that running requests will still take, up to the expected output length of each.

    So will those that another engine hands over to us: they have blocks, and cannot be preempted.
    """
    seats, running = state.seats, state.running
    expected = seats.num_prompt[running] + state.reserve_output_tokens
    growth = np.minimum(expected, seats.stop_at[running]) - seats.room[running]
    blocks = int((-(-np.maximum(growth, 0) // state.config.block_size)).sum())
    for request in (*state.loading.values(), *state.loaded.values()):
        whole = state.kv.blocks_for(expected_length(state, request))
        blocks += max(0, whole - len(request.table.blocks))
    return blocks


def expected_length(state: EngineState, request: Request) -> int:
    """Tokens of a request with its expected output, as far as it may go."""
    expected = request.num_prompt_tokens + state.reserve_output_tokens
    longest = min(request.num_prompt_tokens + request.max_tokens, state.max_length)
    return max(request.num_known, min(expected, longest))
