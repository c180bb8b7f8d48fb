"""Each better rule against vLLM's, on a workload that shows the difference."""

import pytest

from tests.pure.core.connectors import Offers, Reporting
from tests.pure.core.driver import Engine, make_request
from tests.replay import Replay
from twostroke.core.policy import MAX_TRIES, least_lost_victim
from twostroke.kv_messages import KvReport


def workload(requests, **config):
    defaults = {"block_size": 4, "max_model_len": 128, "max_num_seqs": 8}
    return {"config": defaults | config, "requests": requests}


def request(index, length, max_tokens, **fields):
    return {
        "id": f"r{index}",
        "prompt": [{"seed": index, "len": length}],
        "max_tokens": max_tokens,
    } | fields


def run(work, **options):
    replay = Replay(work, faithful=False, check=True, **options)
    trace = replay.run()
    assert not trace["stuck"]
    return trace


# A long-running request leaves too little for the large one behind it; small ones follow.
BLOCKED_HEAD = workload(
    [
        request(0, 40, 40),
        request(1, 60, 2, arrival_step=1),
        *(request(index, 8, 2, arrival_step=1) for index in range(2, 10)),
    ],
    num_gpu_blocks=27,
)


def test_backfill_lets_small_requests_pass_a_blocked_head():
    head, backfill = run(BLOCKED_HEAD), run(BLOCKED_HEAD, admission="backfill")
    assert head["finish_order"][:2] == ["r0", "r1"]
    assert backfill["finish_order"] == [f"r{index}" for index in range(2, 10)] + ["r0", "r1"]
    assert backfill["num_steps"] < head["num_steps"]


def test_only_so_many_pass_one_head():
    trace = run(BLOCKED_HEAD, admission="backfill", max_backfills=3)
    assert trace["finish_order"].index("r1") == 4


def test_a_large_request_does_not_starve():
    requests = [request(0, 40, 20), request(1, 90, 2, arrival_step=1)]
    requests += [request(2 + i, 30, 12, arrival_step=1 + i) for i in range(60)]
    order = run(workload(requests, num_gpu_blocks=27), admission="backfill", max_backfills=10)[
        "finish_order"
    ]
    assert order.index("r1") <= 12


# The load that ends first needs more than is free; the others need almost nothing.
ENDED_LOADS = workload(
    [
        request(0, 40, 12),
        request(1, 60, 2, arrival_step=1, external={"matched_tokens": 20}),
        *(request(i, 9, 2, arrival_step=1, external={"matched_tokens": 8}) for i in (2, 3, 4)),
    ],
    num_gpu_blocks=31,
    reserve_full_isl=False,
    max_num_batched_tokens=64,
)


@pytest.mark.parametrize("admission", ["loads", "backfill"])
def test_ended_loads_pass_a_blocked_head(admission):
    head, loads = run(ENDED_LOADS), run(ENDED_LOADS, admission=admission)
    assert head["finish_order"][0] == "r0"
    assert loads["finish_order"][:3] == ["r2", "r3", "r4"]


def test_only_loads_pass_with_loads():
    requests = [*ENDED_LOADS["requests"], request(5, 4, 1, arrival_step=2)]
    trace = run(ENDED_LOADS | {"requests": requests}, admission="loads")
    assert trace["finish_order"].index("r5") > trace["finish_order"].index("r4")


# A long prompt arrives last, so vLLM takes its blocks when the short ones grow.
GROWTH = workload(
    [request(i, 8, 30) for i in range(4)] + [request(4, 60, 12, arrival_step=1)],
    num_gpu_blocks=33,
)


def test_least_lost_work_recomputes_less():
    last, least = run(GROWTH), run(GROWTH, preemption="least_lost")
    assert least["summary"]["scheduled_tokens"] < last["summary"]["scheduled_tokens"]


def test_least_lost_spares_requests_whose_blocks_are_shared():
    engine = Engine(
        num_blocks=10, preemption="least_lost", async_scheduling=False, max_num_batched_tokens=64
    )
    shared = list(range(9))
    engine.add(0, [*shared[:8], 50], max_tokens=12)
    engine.add(1, prompt=12, max_tokens=12)
    engine.add(2, prompt=12, max_tokens=2)
    engine.run()
    assert len(engine.finished) == 3


def test_least_lost_stays_within_the_worst_priority():
    requests = [
        request(0, 30, 30, priority=1),
        request(1, 8, 30, priority=0),
        request(2, 20, 30, priority=1),
    ]
    work = workload(requests, num_gpu_blocks=22, policy="priority")
    trace = run(work, preemption="least_lost")
    assert trace["outputs"]["r1"]["preemptions"] == 0
    assert trace["outputs"]["r2"]["preemptions"] > 0


def test_reserving_output_preempts_less():
    work = workload([request(i, 12, 30) for i in range(12)], num_gpu_blocks=41)
    eager, careful = run(work), run(work, reserve_output_tokens=30)
    assert eager["summary"]["preemptions"] > 5
    assert careful["summary"]["preemptions"] == 0
    assert careful["summary"]["scheduled_tokens"] < eager["summary"]["scheduled_tokens"]


def test_a_step_tries_only_so_many_requests():
    requests = [request(0, 40, 12)]
    requests += [request(1 + i, 60, 1, arrival_step=1) for i in range(MAX_TRIES + 4)]
    engine_steps = run(workload(requests, num_gpu_blocks=21), admission="backfill")
    assert engine_steps["finish_order"] == [f"r{i}" for i in range(MAX_TRIES + 5)]


def test_with_loads_other_skipped_requests_stay_behind_the_head():
    connector = Offers(r1=(20, True), r3=(8, True))
    engine = Engine(
        connector=connector,
        executor=Reporting(),
        admission="loads",
        async_scheduling=False,
        num_blocks=31,
        max_model_len=100,
        reserve_full_isl=False,
        max_num_batched_tokens=64,
    )
    engine.add(0, prompt=72, max_tokens=8)
    engine.turn()
    engine.turn()
    engine.add(1, prompt=60, max_tokens=1)
    engine.add(3, prompt=9, max_tokens=1)
    engine.executor.reports[2] = KvReport(finished_recving=["r1", "r3"])
    engine.turn()
    engine.core.add(make_request(2, prompt=4, max_tokens=1), waits_for_grammar=True)
    engine.core.grammar_ready(2)
    engine.turn()
    assert 3 in engine.finished
    assert 2 not in engine.tokens
    engine.run()
    assert len(engine.finished) == 4


def test_least_lost_looks_for_blocks_that_become_free():
    engine = Engine(num_blocks=30, async_scheduling=False, max_num_batched_tokens=64)
    for handle, prompt in enumerate((4, 8, 12)):
        engine.add(handle, prompt, max_tokens=9)
    engine.turn()
    state = engine.core.state
    assert least_lost_victim(state) == 0
    references = state.kv.pool.references
    for place, victim in ((0, 1), (1, 2), (2, 2)):
        for block in state.request_at(int(state.running[place])).table.blocks:
            references[block] += 1
        assert least_lost_victim(state) == victim
