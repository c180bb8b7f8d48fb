"""Ended loads that hold the pool: deadlocks that vLLM 0.22.1 keeps."""

import pytest

from tests.replay import Replay

TWO_LOADS = {
    "name": "two loads fill the pool",
    "config": {
        "block_size": 4,
        "num_gpu_blocks": 8,
        "max_model_len": 64,
        "reserve_full_isl": False,
        "max_steps": 200,
    },
    "requests": [
        {
            "id": f"r{index}",
            "prompt": [{"seed": index, "len": length}],
            "max_tokens": 3,
            "external": {"matched_tokens": length - 1, "ready_after_steps": 2},
        }
        for index, length in enumerate((17, 13))
    ],
}


def with_lookahead():
    """The same through speculative slots: 4 + 1 and 3 + 1 blocks of 7."""
    workload = TWO_LOADS | {"config": TWO_LOADS["config"] | {"num_spec_tokens": 3}}
    workload["config"] |= {"spec_method": "eagle", "reserve_full_isl": True}
    workload["requests"] = [
        request | {"prompt": [{"seed": index, "len": length}]}
        for index, (request, length) in enumerate(zip(TWO_LOADS["requests"], (16, 12), strict=True))
    ]
    return workload


@pytest.mark.parametrize("workload", [TWO_LOADS, with_lookahead()])
def test_loads_that_fill_the_pool_do_not_wait_for_ever(workload):
    assert Replay(workload).run()["stuck"]
    replay = Replay(workload, faithful=False, check=True)
    trace = replay.run()
    assert not trace["stuck"]
    assert [output["n"] for output in trace["outputs"].values()] == [3, 3]
    assert replay.core.state.kv.num_free == 7


def lone_and_a_load(ready_after_steps):
    """With one seat, a long request needs the blocks that a loaded one holds."""
    return {
        "config": {
            "block_size": 2,
            "num_gpu_blocks": 24,
            "max_num_seqs": 1,
            "max_num_batched_tokens": 12,
            "max_model_len": 64,
            "policy": "priority",
            "enable_prefix_caching": False,
            "reserve_full_isl": False,
            "max_steps": 1000,
        },
        "requests": [
            {
                "id": "r0",
                "arrival_step": 1,
                "prompt": [{"seed": 100, "len": 20}],
                "max_tokens": 22,
            },
            {
                "id": "r1",
                "prompt": [{"seed": 101, "len": 6}],
                "max_tokens": 1,
                "external": {"matched_tokens": 5, "ready_after_steps": ready_after_steps},
            },
        ],
    }


@pytest.mark.parametrize("ready_after_steps", [0, 300])
def test_a_lone_request_does_not_preempt_itself_for_ever(ready_after_steps):
    trace = Replay(lone_and_a_load(ready_after_steps), faithful=False, check=True).run()
    assert not trace["stuck"]
    assert [output["n"] for output in trace["outputs"].values()] == [22, 1]
