import pytest

from tests.pure.core.connectors import Offers, Reporting
from tests.pure.core.driver import Engine, expected_tokens
from twostroke.kv_messages import KvReport
from twostroke.messages import FinishReason


def start(policy="recompute", *, prompt=12, is_async=True, settings=None, **offers):
    """An engine in which r0 loads all but the last token of its prompt."""
    offers = offers or {"r0": (prompt - 1, is_async)}
    connector = Offers(**offers)
    engine = Engine(
        connector=connector,
        executor=Reporting(),
        kv_load_failure_policy=policy,
        **({"async_scheduling": False} | (settings or {})),
    )
    return engine, connector


def turn(engine, **report):
    """One step whose result carries this report."""
    step = engine.core.stats().num_steps
    if report:
        engine.executor.reports[step] = KvReport(**report)
    engine.turn()


def test_a_failed_request_is_named_by_id():
    engine, connector = start()
    engine.add(0, prompt=12)
    turn(engine)
    turn(engine, failed_recving=["r0"])
    engine.run()
    assert engine.tokens[0] == expected_tokens(0, 12, 4)
    assert connector.reports[-1].failed_recving == ["r0"]


def test_invalid_blocks_are_computed_again():
    engine, connector = start()
    engine.add(0, prompt=12)
    turn(engine)
    bad = connector.blocks["r0"][1]
    turn(engine, finished_recving=["r0"], invalid_block_ids=[bad, 0])
    plan = engine.turn()
    assert plan.num_computed.tolist() == [4]
    engine.run()
    assert engine.tokens[0] == expected_tokens(0, 12, 4)


def test_a_report_of_nothing_invalid_changes_nothing():
    engine, _ = start()
    engine.add(0, prompt=12)
    turn(engine)
    turn(engine, finished_recving=["r0"], invalid_block_ids=[15])
    assert engine.turn().num_computed.tolist() == [11]
    engine.run()


def test_policy_fail_ends_the_request():
    engine, connector = start("fail")
    engine.add(0, prompt=12)
    turn(engine)
    turn(engine, finished_recving=["r0"], invalid_block_ids=connector.blocks["r0"][:1])
    assert engine.finished[0].reason is FinishReason.ERROR
    assert "KV transfer failed" in engine.finished[0].error
    engine.run()
    assert engine.num_free == 16


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_synchronous_load_fails_in_its_own_step(policy):
    engine, _ = start(policy, is_async=False)
    engine.add(0, prompt=12)
    turn(engine, invalid_block_ids=[2])
    engine.run()
    if policy == "fail":
        assert engine.finished[0].reason is FinishReason.ERROR
        # What was computed on top is no prefix for others.
        engine.add(1, prompt=list(range(12)), max_tokens=1)
        engine.run()
        assert engine.cached[1] == 4
    else:
        assert engine.tokens[0] == expected_tokens(0, 12, 4)
        assert engine.core.stats().num_preemptions == 0


def test_a_result_in_flight_is_void_too():
    engine, connector = start(is_async=False, settings={"async_scheduling": True})
    engine.add(0, prompt=12)
    engine.begin()
    engine.begin()
    engine.executor.reports[0] = KvReport(invalid_block_ids=connector.blocks["r0"][:1])
    engine.finish()
    engine.finish()
    assert 0 not in engine.tokens
    engine.run()
    assert engine.tokens[0] == expected_tokens(0, 12, 4)
    assert engine.core.stats().num_preemptions == 1


def test_requests_that_share_an_invalid_block_start_again():
    engine, connector = start(
        is_async=False, settings={"max_num_batched_tokens": 32}, r0=(8, False)
    )
    prompt = list(range(12))
    engine.add(0, prompt)
    engine.add(1, prompt)
    turn(engine, invalid_block_ids=connector.blocks.get("r0", [1])[:1])
    assert engine.core.stats().num_preemptions == 2
    engine.run()
    for handle in (0, 1):
        assert engine.tokens[handle] == expected_tokens(handle, 12, 4)


def test_a_load_on_top_of_an_invalid_shared_block_starts_again():
    engine, connector = start(r0=(4, False), r1=(8, True))
    prompt = list(range(12))
    engine.add(0, prompt, max_tokens=1)
    turn(engine)
    engine.add(1, [*prompt[:4], 70, 71, 72, 73, 74], max_tokens=2)
    turn(engine)
    shared = connector.blocks["r1"][0]
    turn(engine, invalid_block_ids=[shared])
    turn(engine, finished_recving=["r1"])
    engine.run()
    assert engine.tokens[1] == expected_tokens(1, 9, 2)
    assert engine.cached[1] == 0


def test_a_load_that_keeps_failing_is_given_up():
    engine, connector = start()
    engine.add(0, prompt=12, max_tokens=1)
    for _ in range(3):
        connector.offers["r0"] = (11, True)
        turn(engine)
        turn(engine, failed_recving=["r0"])
    connector.offers["r0"] = (11, True)
    engine.run()
    assert engine.tokens[0] == expected_tokens(0, 12, 1)


def test_with_a_window_the_request_starts_again():
    engine, connector = start(settings={"sliding_window": 8}, prompt=20)
    engine.add(0, prompt=20)
    turn(engine)
    bad = connector.blocks["r0"][-1]
    turn(engine, finished_recving=["r0"], invalid_block_ids=[bad])
    plan = engine.turn()
    assert plan.num_computed.tolist() == [0]
    engine.run()
    assert engine.tokens[0] == expected_tokens(0, 20, 4)
