import numpy as np
import pytest

from tests.pure.core.connectors import Offers, Reporting
from tests.pure.core.driver import Engine, expected_tokens
from twostroke.kv_messages import KvCommands, KvReport
from twostroke.messages import FinishReason
from twostroke.testing.fake_executor import FakeExecutor, simulated_token


@pytest.mark.parametrize("method", ["ngram", "eagle", "draft_model"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_drafts_change_the_number_of_steps_and_no_token(method, async_scheduling):
    def run(**fields):
        executor = FakeExecutor(
            block_size=4,
            num_drafts=0 if async_scheduling else fields.get("num_spec_tokens", 0),
            accept=lambda request_id, drafts: min(drafts, int(request_id[1:])),
        )
        engine = Engine(
            executor=executor, async_scheduling=async_scheduling, num_blocks=30, **fields
        )
        for handle in range(4):
            engine.add(handle, prompt=6, max_tokens=15)
        return engine.run()

    plain, drafted = run(), run(num_spec_tokens=3, spec_method=method)
    assert plain.tokens == drafted.tokens
    assert drafted.core.stats().num_steps < plain.core.stats().num_steps


def test_a_stop_among_accepted_drafts_drops_the_rest():
    executor = FakeExecutor(block_size=4, num_drafts=3)
    engine = Engine(
        executor=executor, async_scheduling=False, num_spec_tokens=3, spec_method="ngram"
    )
    stop = simulated_token("r0", 6 + 2)
    engine.add(0, prompt=6, max_tokens=15, stop_token_ids=(stop,))
    engine.add(1, prompt=6, max_tokens=15)
    engine.run()
    assert engine.tokens[0] == expected_tokens(0, 6, 3)
    assert engine.tokens[1] == expected_tokens(1, 6, 15)
    assert engine.finished[0].stop_token_id == stop


def test_the_plan_names_the_drafts():
    executor = FakeExecutor(block_size=4, num_drafts=2)
    engine = Engine(
        executor=executor, async_scheduling=False, num_spec_tokens=2, spec_method="ngram"
    )
    engine.add(0, prompt=6, max_tokens=9)
    engine.turn()
    plan = engine.turn()
    assert plan.num_drafts.tolist() == [2]
    assert plan.draft_token_ids.tolist() == expected_tokens(0, 7, 2)
    stats = engine.core.stats()
    assert stats.spec_decode_num_drafts == 1
    assert stats.spec_decode_num_draft_tokens == stats.spec_decode_num_accepted_tokens == 2


def test_tokens_of_a_preempted_request_still_count():
    engine = Engine(num_blocks=7)
    engine.add(0, prompt=8, max_tokens=9)
    engine.add(1, prompt=8, max_tokens=9)
    engine.run()
    assert engine.core.stats().num_preemptions == 1
    assert engine.tokens[1] == expected_tokens(1, 8, 9)


def test_a_preempted_request_can_end_by_the_token_in_flight():
    # Block 3 is needed for token 9; r1 is preempted while its last token is in flight.
    engine = Engine(num_blocks=5)
    stop = simulated_token("r1", 8)
    engine.add(0, prompt=7, max_tokens=6)
    engine.add(1, prompt=8, max_tokens=6, stop_token_ids=(stop,))
    engine.run()
    assert engine.finished[1].reason is FinishReason.STOP
    assert engine.tokens[1] == [stop]
    assert engine.num_free == 4


# ---------------------------------------------------------------- transfers


def remote(**offers):
    connector = Offers(**offers)
    engine = Engine(connector=connector, executor=Reporting(), async_scheduling=False)
    return engine, connector


def report(engine, **fields):
    engine.executor.reports[engine.core.stats().num_steps] = KvReport(**fields)
    return engine.turn()


def test_a_load_runs_once_it_is_reported():
    engine, connector = remote(r0=(12, True))
    engine.add(0, prompt=12, max_tokens=2)
    plan = engine.turn()
    assert plan.kv == KvCommands(given_up=[7])
    assert len(plan.slots) == 0
    assert engine.core.stats().num_loading == 1
    report(engine, finished_recving=["r0", "unknown"])
    report(engine, finished_recving=["r0"])  # late: it runs already
    engine.run()
    assert engine.cached[0] == 11
    assert engine.tokens[0] == expected_tokens(0, 12, 2)
    assert connector.finished == {"r0": 4}


def test_others_pass_while_the_connector_cannot_say():
    engine, connector = remote(r0=(None, False))
    engine.add(0, prompt=8)
    engine.add(1, prompt=8)
    engine.turn()
    assert 1 in engine.tokens
    connector.offers.clear()
    engine.run()
    assert engine.tokens[0] == expected_tokens(0, 8, 4)


def test_a_synchronous_load_leaves_a_token_to_compute():
    engine, _ = remote(r0=(50, False))
    engine.add(0, prompt=12, max_tokens=2)
    plan = engine.turn()
    assert plan.num_computed.tolist() == [11]
    engine.run()


def test_an_aborted_load_keeps_its_blocks_until_it_ends():
    engine, _ = remote(r0=(8, True))
    engine.add(0, prompt=8)
    engine.turn()
    engine.core.abort([0])
    engine.turn()
    assert engine.num_free == 14
    assert engine.core.has_work()
    report(engine, finished_recving=["r0"])
    assert engine.num_free == 16
    engine.run()


def test_blocks_stay_until_they_are_sent():
    engine, connector = remote()
    connector.keep.add("r0")
    engine.add(0, prompt=8, max_tokens=1)
    engine.turn()
    assert engine.num_free == 14
    report(engine, finished_sending=["r0", "unknown"])
    assert engine.num_free == 16
    engine.run()


def test_a_loaded_one_token_prompt_is_not_loaded_again():
    engine, connector = remote(r0=(1, True))
    engine.add(0, prompt=1, max_tokens=2)
    engine.turn()
    connector.offers["r0"] = (1, True)
    report(engine, finished_recving=["r0"])
    engine.run()
    assert engine.tokens[0] == expected_tokens(0, 1, 2)


def test_columns_of_an_empty_step():
    engine, _ = remote(r0=(8, True))
    engine.add(0, prompt=8)
    plan = engine.turn()
    assert plan.num_scheduled.dtype == np.int32
    assert plan.samples.dtype == np.bool_
    assert engine.core.stats().step_tokens == 0
