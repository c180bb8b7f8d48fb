import pytest

from tests.pure.core.driver import Engine, expected_tokens
from twostroke.core.request import Status
from twostroke.kv.manager import IntegrityError
from twostroke.messages import FinishReason


def test_integrity_sees_a_lost_seat():
    engine = Engine()
    engine.add(0)
    engine.begin()
    engine.core.state.num_running = 0
    with pytest.raises(IntegrityError, match="1 requests have seats; 0 run"):
        engine.core.check_integrity()


def test_integrity_sees_a_lost_request():
    engine = Engine()
    engine.add(0)
    state = engine.core.state
    state.queues.remove(next(state.queues.waiting()))
    with pytest.raises(IntegrityError, match="0 waiting and 0 running requests; 1 are unfinished"):
        engine.core.check_integrity()


def test_a_reset_voids_results_in_flight():
    engine = Engine()
    engine.add(0, prompt=8, max_tokens=6)
    engine.begin()
    engine.begin()
    assert engine.core.reset_prefix_cache(preempt_running=True)
    engine.finish()
    engine.run()
    assert engine.tokens[0] == expected_tokens(0, 8, 6)


@pytest.mark.parametrize("again", [False, True])
def test_a_window_that_the_pool_cannot_hold_ends_the_request(again):
    # A sequence of 20 tokens must hold 5 blocks at once, and there are 4. `again`: it is admitted
    # again and again and gets to the same point; otherwise it is not even admitted.
    engine = Engine(
        num_blocks=5,
        sliding_window=14,
        async_scheduling=False,
        reserve_full_isl=not again,
        enable_prefix_caching=not again,
    )
    engine.add(0, prompt=8, max_tokens=30)
    engine.run()
    assert engine.finished[0].reason is FinishReason.LENGTH
    assert engine.tokens[0] == expected_tokens(0, 8, len(engine.tokens[0]))
    assert engine.num_free == 4


def test_a_lone_request_goes_on_without_room_for_drafts():
    engine = Engine(
        num_blocks=6,
        num_spec_tokens=3,
        spec_method="eagle",
        max_num_batched_tokens=6,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )
    engine.add(0, prompt=8, max_tokens=12)
    engine.run()
    assert engine.tokens[0] == expected_tokens(0, 8, 12)


def test_a_request_that_outgrew_the_budget_runs_in_a_step_of_its_own():
    engine = Engine(
        num_blocks=7,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        max_num_batched_tokens=8,
        max_num_seqs=2,
    )
    for handle in (0, 1):
        engine.add(handle, prompt=6, max_tokens=14)
    engine.run()
    for handle in (0, 1):
        assert engine.tokens[handle] == expected_tokens(handle, 6, 14)


def test_statuses_in_order():
    assert Status.WAITING < Status.RUNNING < Status.FINISHED
