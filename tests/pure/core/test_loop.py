import numpy as np
import pytest

from tests.pure.core.driver import Engine, expected_tokens, make_request
from twostroke.clock import VirtualClock
from twostroke.config import SchedulerConfig
from twostroke.core.loop import EngineCore
from twostroke.kv.manager import IntegrityError
from twostroke.messages import (
    EventKind,
    FinishReason,
    RowError,
    RowLogprobs,
    StepResult,
    TokenLogprobs,
)
from twostroke.testing.fake_executor import FakeExecutor, simulated_token

QUEUED, SCHEDULED, FIRST, PREEMPTED, FINISHED, *_ = EventKind


class Tampering(FakeExecutor):
    """A fake device whose results a test can change."""

    def __init__(self, change) -> None:
        super().__init__(block_size=4)
        self._change = change

    def collect(self) -> StepResult:
        plan = self._submitted[0]
        result = super().collect()
        self._change(plan, result)
        return result


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_requests_get_their_tokens_whatever_the_schedule(async_scheduling):
    engine = Engine(async_scheduling=async_scheduling)
    for handle in range(8):
        engine.add(handle, prompt=5 + handle, max_tokens=12)
    engine.run()
    for handle in range(8):
        assert engine.tokens[handle] == expected_tokens(handle, 5 + handle, 12)
        assert engine.finished[handle].reason is FinishReason.LENGTH
    assert engine.num_free == 16
    assert engine.executor.num_seated == 0
    assert engine.core.stats().num_preemptions > 0


def test_nothing_to_do():
    engine = Engine()
    assert engine.begin() is None
    assert engine.core.take_outputs() is None
    assert not engine.core.has_work()


def test_events_in_order():
    engine = Engine(async_scheduling=False)
    engine.add(0, prompt=20, max_tokens=3)
    engine.run()
    assert engine.events_of(0) == [QUEUED, SCHEDULED, FIRST, FINISHED]


def test_preemption_events():
    engine = Engine(num_blocks=7, async_scheduling=False)
    engine.add(0, prompt=8, max_tokens=10)
    engine.add(1, prompt=8, max_tokens=10)
    engine.run()
    assert engine.events_of(1) == [QUEUED, SCHEDULED, FIRST, PREEMPTED, SCHEDULED, FINISHED]
    assert engine.tokens[1] == expected_tokens(1, 8, 10)


def test_first_admission_reports_cached_tokens():
    engine = Engine(async_scheduling=False)
    prompt = list(range(12))
    engine.add(0, prompt, max_tokens=1)
    engine.run()
    engine.add(1, prompt, max_tokens=1)
    engine.run()
    assert engine.cached == {0: 0, 1: 8}
    stats = engine.core.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (24, 8)


def test_prompt_logprobs_do_not_read_the_cache():
    engine = Engine(async_scheduling=False)
    prompt = list(range(12))
    engine.add(0, prompt, max_tokens=1)
    engine.add(1, prompt, max_tokens=1, prompt_logprobs=1)
    engine.run()
    assert engine.cached == {0: 0, 1: 0}


def test_cache_salt_separates():
    engine = Engine(async_scheduling=False)
    prompt = list(range(12))
    for handle, salt in enumerate(("", "a", "b", "a")):
        engine.add(handle, prompt, max_tokens=1, cache_salt=salt)
        engine.run()
    assert engine.cached == {0: 0, 1: 0, 2: 0, 3: 8}


@pytest.mark.parametrize(
    ("settings", "prompt", "fields", "words"),
    [
        ({}, 0, {}, "prompt is empty"),
        ({}, 64, {}, "prompt has 64 tokens but at most 63"),
        ({"num_blocks": 5}, 17, {}, "needs 5 KV blocks; limit: the pool has 4"),
        ({"enable_chunked_prefill": False}, 17, {}, "limit: 16 tokens a step"),
        ({"sliding_window": 8, "num_blocks": 5}, 40, {}, "needs 7 KV blocks"),
    ],
)
def test_what_can_never_run_is_refused_at_once(settings, prompt, fields, words):
    engine = Engine(**settings)
    engine.add(0, prompt=prompt, **fields)
    end = engine.finished[0]
    assert end.reason is FinishReason.ERROR
    assert words in end.error
    assert engine.events_of(0) == [QUEUED, FINISHED]
    assert not engine.core.has_work()


def test_threshold_lets_a_long_prompt_run_without_chunked_prefill():
    engine = Engine(enable_chunked_prefill=False, long_prefill_token_threshold=8)
    engine.add(0, prompt=30, max_tokens=2)
    engine.run()
    assert engine.tokens[0] == expected_tokens(0, 30, 2)


def test_a_sequence_that_outgrows_the_pool_ends_by_length():
    engine = Engine(num_blocks=5)
    engine.add(0, prompt=10, max_tokens=50)
    engine.run()
    # 16 tokens of KV and the last token, which needs none.
    assert engine.tokens[0] == expected_tokens(0, 10, 7)
    assert engine.finished[0].reason is FinishReason.LENGTH


def test_a_prompt_that_fills_the_pool_gets_one_token():
    engine = Engine(num_blocks=5)
    engine.add(0, prompt=16, max_tokens=5)
    engine.run()
    assert len(engine.tokens[0]) == 1


def test_faithful_keeps_a_request_that_never_fits():
    engine = Engine(num_blocks=5, faithful=True, async_scheduling=False)
    engine.add(0, prompt=30)
    for _ in range(5):
        engine.turn()
    assert not engine.finished
    assert engine.core.has_work()


def test_stop_rules():
    eos = simulated_token("r0", 9)
    engine = Engine()
    engine.add(0, eos_token_ids=(eos,), max_tokens=9)
    stop = simulated_token("r1", 10)
    engine.add(1, stop_token_ids=(stop,), max_tokens=9)
    early = simulated_token("r2", 8)
    engine.add(2, stop_token_ids=(early,), min_tokens=3, max_tokens=9)
    engine.add(3, prompt=58, max_tokens=90)
    engine.run()
    assert engine.tokens[0] == expected_tokens(0, 8, 2)
    assert (engine.finished[0].reason, engine.finished[0].stop_token_id) == (
        FinishReason.STOP,
        None,
    )
    assert engine.tokens[1] == expected_tokens(1, 8, 3)
    assert engine.finished[1].stop_token_id == stop
    assert engine.tokens[2] == expected_tokens(2, 8, 9)
    assert engine.tokens[3] == expected_tokens(3, 58, 6)


def test_min_tokens_beyond_the_longest_sequence_still_ends():
    engine = Engine()
    engine.add(0, prompt=60, max_tokens=100, min_tokens=50)
    engine.run()
    assert len(engine.tokens[0]) == 4
    assert engine.finished[0].reason is FinishReason.LENGTH


@pytest.mark.parametrize("turns", range(7))
def test_abort_in_any_state(turns):
    engine = Engine(num_blocks=9)
    for handle in range(4):
        engine.add(handle, prompt=12, max_tokens=10)
    for _ in range(turns):
        engine.turn()
    engine.core.abort([0, 2, 77, 0])
    engine.take()
    assert engine.finished[0].reason is FinishReason.ABORT
    engine.run()
    assert engine.events_of(2)[-1] is FINISHED
    assert engine.num_free == 8
    for handle in (1, 3):
        assert engine.tokens[handle] == expected_tokens(handle, 12, 10)


def test_an_abort_beats_a_result_in_flight():
    engine = Engine(async_scheduling=False)
    engine.add(0)
    engine.begin()
    engine.core.abort([0])
    engine.finish()
    assert 0 not in engine.tokens
    assert engine.finished[0].reason is FinishReason.ABORT
    engine.core.abort([0])
    assert engine.core.take_outputs() is None


def test_a_failed_row_harms_nobody_else():
    def fail_first(plan, result):
        if plan.step == 2:
            result.errors = [RowError(0, "logits are not finite")]

    engine = Engine(executor=Tampering(fail_first), async_scheduling=False)
    for handle in range(3):
        engine.add(handle, prompt=4, max_tokens=5)
    engine.run()
    assert engine.finished[0].reason is FinishReason.ERROR
    assert engine.finished[0].error == "logits are not finite"
    assert engine.tokens[0] == expected_tokens(0, 4, 2)
    for handle in (1, 2):
        assert engine.tokens[handle] == expected_tokens(handle, 4, 5)


def test_logprobs_travel_by_handle():
    def add_logprobs(plan, result):
        entry = TokenLogprobs([5], [-0.5], 1)
        result.logprobs = [RowLogprobs(0, [entry, entry], 1), RowLogprobs(0, [entry])]

    engine = Engine(executor=Tampering(add_logprobs), async_scheduling=False)
    engine.add(7, prompt=20, max_tokens=1)
    engine.turn()
    assert [(entry.handle, entry.prompt_start) for entry in engine.logprobs] == [(7, 1)]
    engine.turn()
    assert [entry.prompt_start for entry in engine.logprobs] == [1, 1, None]


def test_handles_must_be_unique():
    engine = Engine()
    engine.add(0)
    with pytest.raises(ValueError, match="handle 0"):
        engine.add(0)


def test_results_must_be_in_order():
    engine = Engine()
    engine.add(0)
    engine.begin()
    with pytest.raises(IntegrityError, match="result of step 5"):
        engine.core.finish(StepResult(step=5, num_sampled=np.zeros(1, np.int32), token_ids=[]))


def test_slots_show_every_live_request():
    engine = Engine(max_num_seqs=1, async_scheduling=False)
    engine.add(0, prompt=6)
    engine.add(1, prompt=8)
    engine.turn()
    engine.clock.advance_to(10)
    running, waiting = engine.core.slots()
    assert running["state"] == "running"
    assert (running["num_computed_tokens"], running["num_output_tokens"]) == (6, 1)
    assert (running["handle"], running["num_blocks"], running["age_s"]) == (0, 2, 10)
    assert (waiting["state"], waiting["num_blocks"]) == ("waiting", 0)


def test_stats():
    engine = Engine(max_num_seqs=1, async_scheduling=False)
    engine.add(0, prompt=6, max_tokens=3)
    engine.add(1, prompt=6, max_tokens=3)
    engine.turn()
    stats = engine.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_loading) == (1, 1, 0)
    assert stats.kv_usage == pytest.approx(2 / 16)
    engine.run()
    stats = engine.core.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (12, 6)
    assert stats.step_tokens == 16
    assert stats.kv_usage == 0


def test_reset_prefix_cache():
    engine = Engine()
    prompt = list(range(12))
    engine.add(0, prompt, max_tokens=20)
    engine.turn()
    assert not engine.core.reset_prefix_cache()
    assert engine.core.reset_prefix_cache(preempt_running=True)
    engine.run()
    assert PREEMPTED in engine.events_of(0)
    assert engine.tokens[0] == expected_tokens(0, 12, 20)
    assert engine.core.reset_prefix_cache()
    engine.add(1, prompt, max_tokens=1)
    engine.run()
    assert engine.cached[1] == 0


def test_grammar_wait_lets_others_pass():
    engine = Engine(max_num_seqs=1, async_scheduling=False)
    engine.core.add(make_request(0), waits_for_grammar=True)
    engine.add(1)
    engine.turn()
    assert 1 in engine.tokens
    engine.core.grammar_ready(0)
    engine.core.grammar_ready(0)
    engine.core.grammar_ready(5)
    engine.run()
    assert engine.tokens[0] == expected_tokens(0, 8, 4)


def test_a_request_that_waits_for_its_grammar_can_be_aborted():
    engine = Engine()
    engine.core.add(make_request(0), waits_for_grammar=True)
    engine.core.abort([0])
    engine.run()
    assert engine.finished[0].reason is FinishReason.ABORT


def test_without_checks_the_core_decides_the_same():
    checked, plain = (
        Engine(),
        EngineCore(
            SchedulerConfig(
                block_size=4,
                num_blocks=17,
                max_num_seqs=4,
                max_num_batched_tokens=16,
                max_model_len=64,
            ),
            VirtualClock(),
        ),
    )
    for handle in range(3):
        request = checked.add(handle)
        plain.add(request)
    assert np.array_equal(checked.core.begin().num_scheduled, plain.begin().num_scheduled)


# ---------------------------------------------------------------- the step that has not begun


def two_in_flight(**settings) -> Engine:
    """Request 0 decodes; a step of it runs, and another is planned."""
    engine = Engine(**({"check": False, "async_scheduling": True} | settings))
    engine.add(0, prompt=8, max_tokens=12)
    engine.begin()
    engine.begin()
    return engine


def extend(engine: Engine):
    plan = engine.core.extend()
    if plan is not None:
        engine.executor.recall()
        engine.executor.submit(plan)
    return plan


def test_who_comes_is_put_into_the_step_that_has_not_begun():
    engine = two_in_flight()
    assert extend(engine) is None, "nobody has come"
    tokens = engine.core.stats().step_tokens
    engine.add(1, prompt=6, max_tokens=5)
    plan = extend(engine)
    assert plan.step == 1
    assert plan.num_scheduled.tolist() == [1, 6]
    assert plan.num_computed.tolist() == [8, 0]
    assert [new.request_id for new in plan.new] == ["r1"]
    engine.add(2, prompt=20, max_tokens=5)
    plan = extend(engine)
    assert plan.num_scheduled.tolist() == [1, 6, 9], "what the step's budget leaves"
    assert plan.samples.tolist() == [True, True, False]
    assert [new.request_id for new in plan.new] == ["r1", "r2"]
    assert engine.core.stats().step_tokens == tokens + 15
    engine.finish()
    engine.run()
    for handle, prompt, count in ((0, 8, 12), (1, 6, 5), (2, 20, 5)):
        assert engine.tokens[handle] == expected_tokens(handle, prompt, count)
        assert engine.events_of(handle) == [QUEUED, SCHEDULED, FIRST, FINISHED]
    assert engine.num_free == 16


def test_a_step_without_rows_is_extended_too():
    engine = Engine(check=False, async_scheduling=True)
    engine.add(0, prompt=8, max_tokens=1)
    engine.begin()
    assert len(engine.begin().slots) == 0, "its only token comes of the step before"
    engine.add(1, prompt=6, max_tokens=2)
    assert extend(engine).num_scheduled.tolist() == [6]
    engine.finish()
    engine.run()
    assert engine.tokens[1] == expected_tokens(1, 6, 2)


def test_a_step_stands_that_left_somebody_waiting():
    engine = two_in_flight(max_num_seqs=1)
    engine.add(1, prompt=6, max_tokens=2)
    assert extend(engine).num_scheduled.tolist() == [1], "no seat is free"
    engine.add(2, prompt=6, max_tokens=2)
    assert extend(engine) is None
    engine.finish()
    engine.run()
    assert engine.tokens[2] == expected_tokens(2, 6, 2)


def test_a_seat_with_a_row_is_nobody_elses():
    engine = two_in_flight()
    engine.core.abort([0])
    engine.add(1, prompt=6, max_tokens=2)
    assert extend(engine) is None
    engine.finish()
    engine.run()
    assert engine.tokens[1] == expected_tokens(1, 6, 2)
    assert engine.finished[0].reason is FinishReason.ABORT


def test_a_plan_that_was_checked_stands():
    engine = two_in_flight(check=True)
    engine.add(1, prompt=6, max_tokens=2)
    assert extend(engine) is None


def test_drafts_of_an_extended_step_are_those_of_the_step():
    engine = two_in_flight(num_spec_tokens=2)
    engine.add(1, prompt=6, max_tokens=5)
    plan = extend(engine)
    assert plan.num_scheduled.tolist() == [3, 6]
    assert plan.num_drafts.tolist() == [2, 0]
    engine.finish()
    engine.run()
    assert engine.tokens[1] == expected_tokens(1, 6, 5)
