from twostroke.client.link import join_answers, join_ready
from twostroke.messages import EngineReady

DEVICE = ("Device", "cpu, 1 thread", "2 cores among 2 engines")


def ready(engine: int, num_blocks: int, max_model_len: int, *facts) -> EngineReady:
    return EngineReady(engine, max_model_len, num_blocks, 16, [DEVICE, *facts])


def test_a_single_engine_is_told_as_it_is():
    one = ready(0, 100, 1000)
    assert join_ready([one]) is one


def test_what_all_can_do_and_facts_told_once():
    joined = join_ready(
        [
            ready(0, 100, 1000, ("Weights", "5 MiB", "loaded in 1 s"), ("KV pool", "9", "memory")),
            ready(1, 90, 1200, ("Weights", "5 MiB", "loaded in 2 s"), ("KV pool", "8", "memory")),
            ready(2, 95, 1100, ("Weights", "5 MiB", "loaded in 2 s"), ("KV pool", "9", "memory")),
        ]
    )
    assert (joined.num_blocks, joined.max_model_len, joined.block_size) == (90, 1000, 16)
    assert joined.facts == [
        ("Engines", "3, each with the whole model", "--data-parallel-size"),
        DEVICE,
        ("Weights", "5 MiB", "loaded in 1 s in engine 0"),
        ("KV pool, engine 0, 2", "9", "memory"),
        ("KV pool, engine 1", "8", "memory"),
    ]


def test_answers_of_several_become_one():
    slots = {0: [{"handle": 1}], 1: [], 2: [{"handle": 2}, {"handle": 3}]}
    assert join_answers("slots", slots) == [
        {"handle": 1, "engine": 0},
        {"handle": 2, "engine": 2},
        {"handle": 3, "engine": 2},
    ]
    assert join_answers("reset_prefix_cache", {0: True, 1: False}) is False
    assert join_answers("reset_prefix_cache", {0: True, 1: True}) is True
    assert join_answers("ping", {1: "pong"}) == "pong"
    assert join_answers("ping", {0: "pong", 1: "pong"}) == ["pong", "pong"]
