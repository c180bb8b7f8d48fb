import math

import pytest

from twostroke.advice.online import Advisor, SteadyRatio
from twostroke.arrays import NO_TOKENS
from twostroke.clock import VirtualClock
from twostroke.kv_messages import KvEndpoint, KvLayoutRecord, KvLink, KvReceived
from twostroke.messages import EngineOutputs, EngineReady, EngineStats, StepSample

P, D = 0, 1
LINK = KvLink(engine_id="0", message_s=1e-6, bytes_per_s=1e9)


def received(started_s: float, seconds: float) -> KvReceived:
    return KvReceived(
        handle=1, num_tokens=4096, num_bytes=10**6, num_messages=2,
        started_s=started_s, ended_s=started_s + seconds,
    )  # fmt: skip


def outputs(**fields: object) -> EngineOutputs:
    return EngineOutputs(handles=NO_TOKENS, num_tokens=NO_TOKENS, token_ids=NO_TOKENS, **fields)


def ready(engine: int) -> EngineReady:
    layout = KvLayoutRecord(
        model="m", dtype="bfloat16", num_layers=48, num_kv_heads=4, head_dim=128,
        block_size=16, num_blocks=1001, tensor_parallel_size=8,
    )  # fmt: skip
    endpoint = KvEndpoint(engine_id=str(engine), transport="shm", addresses=[], layout=layout)
    return EngineReady(engine, 8192, 1001, 16, [], endpoint, max_num_seqs=64, max_hold_share=0.4)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(100.0)


def busy_minute(advisor: Advisor, clock: VirtualClock, kv_usage: float = 0.97) -> None:
    """P computes half the time; D decodes batches of 10 to 29 rows at 10 ms + 1 ms a row."""
    for second in range(60):
        advisor.on_outputs(P, outputs(step=StepSample(4096, 1, 1, 0, 0, 0.5)))
        for step in range(20):
            rows = 10 + (second + step) % 20
            sample = StepSample(rows, rows, rows, 0, 0, 0.010 + 0.001 * rows)
            stats = EngineStats(num_running=rows, num_waiting=2, kv_usage=kv_usage)
            advisor.on_outputs(D, outputs(step=sample, stats=stats))
        # Every tenth second the link does a fifth of what it can.
        load = received(clock.now(), 0.05 if second % 10 == 9 else 0.01)
        advisor.on_outputs(D, outputs(kv_received=[load]))
        advisor.on_ended(
            4096,
            0,
            33,
            {"queue": 0.1, "prefill": 0.5, "decode": 0.96, "held": 0.2, "transfer": 0.02},
        )
        clock.advance_to(clock.now() + 1.0)
        advisor.update()


def test_what_engines_report_becomes_an_observation(clock: VirtualClock) -> None:
    advisor = Advisor(clock)
    advisor.set_engine(P, "prefill", ready(P))
    advisor.set_engine(D, "decode", ready(D))
    advisor.on_outputs(D, outputs(kv_links=[LINK, KvLink(engine_id="x", error="no")]))
    busy_minute(advisor, clock)
    seen = advisor.observe(clock.now())
    assert (seen.num_prefill, seen.num_decode) == (1, 1)
    assert seen.requests_per_s == pytest.approx(1.0)
    assert seen.prefill_busy == pytest.approx(0.5)
    assert seen.prefill_tokens_per_s == pytest.approx(8192)
    assert seen.tpot_s == pytest.approx(0.03)
    assert seen.room_wait_s == pytest.approx(0.2)
    assert seen.transfer_s == pytest.approx(0.02)
    assert seen.read_s == pytest.approx(0.014)
    assert seen.transfer_messages == 2
    assert seen.transfer_bytes_per_s == pytest.approx(1e6)
    assert seen.decode_running == pytest.approx(19.5)
    assert seen.decode_elasticity == pytest.approx(19.5 / 29.5, abs=0.01)
    assert seen.link_bytes_per_s == 1e9
    # Of looks with five transfers each, every second one has a slow one: 5 MB in 90 ms.
    assert seen.link_low_bytes_per_s == pytest.approx(5e6 / 0.09)
    assert seen.decode_max_num_seqs == 64
    assert seen.prefill_pin_limit == 0.4
    assert seen.decode_pool_tokens == 16_000
    assert seen.kv_token_bytes == 8 * 48 * 2 * 128 * 2


def test_verdicts_are_gauges(clock: VirtualClock) -> None:
    advisor = Advisor(clock)
    advisor.set_engine(P, "prefill", ready(P))
    advisor.set_engine(D, "decode", ready(D))
    assert advisor.update() is None
    busy_minute(advisor, clock)
    assert advisor.advice is not None
    gauges = advisor.advice.gauges()
    assert gauges["decode_bound"] == 1.0
    assert math.isnan(gauges["append_on_decode"])
    assert advisor.advice.ratio == (1, 1)


def test_old_figures_leave_the_window(clock: VirtualClock) -> None:
    advisor = Advisor(clock)
    advisor.set_engine(P, "prefill")
    advisor.set_engine(D, "decode")
    busy_minute(advisor, clock)
    for _ in range(30):
        clock.advance_to(clock.now() + 5.0)
        advisor.update()
    assert math.isnan(advisor.observe(clock.now()).tpot_s)


def test_engines_come_change_and_go(clock: VirtualClock) -> None:
    advisor = Advisor(clock)
    advisor.on_outputs(7, outputs(stats=EngineStats()))  # unknown: ignored
    advisor.set_engine(P, "prefill")
    advisor.set_engine(D, "prefill")
    advisor.set_engine(D, "decode")
    assert advisor.observe(clock.now()).num_prefill == 1
    advisor.on_outputs(D, outputs(kv_links=[LINK]))
    advisor.engine_gone(D)
    seen = advisor.observe(clock.now())
    assert seen.num_decode == 0
    assert math.isnan(seen.link_bytes_per_s)


def test_the_ratio_changes_only_after_a_minute_of_good_reason() -> None:
    steady = SteadyRatio(patience_s=60.0)
    assert steady.update(0.0, (4, 4), math.nan, 1.0) == (4, 4)
    assert steady.update(5.0, (4, 4), 4.0, 1.0) == (4, 4)
    assert steady.update(60.0, (4, 4), 4.0, 1.0) == (4, 4)
    assert steady.update(61.0, (4, 4), 1.0, 1.0) == (4, 4)  # a wave: begins anew
    assert steady.update(65.0, (4, 4), 4.0, 1.0) == (4, 4)
    assert steady.update(130.0, (4, 4), 4.0, 1.0) == (2, 6)
    # Nearly as good the other way: stays.
    assert steady.update(300.0, (4, 4), 3.0, 1.0) == (2, 6)
    assert steady.update(310.0, (5, 5), 3.0, 1.0) == (5, 5)


def test_what_streams_says_nothing_of_the_link(clock: VirtualClock) -> None:
    advisor = Advisor(clock, streams=True)
    advisor.set_engine(P, "prefill", ready(P))
    advisor.set_engine(D, "decode", ready(D))
    busy_minute(advisor, clock)
    assert math.isnan(advisor.observe(clock.now()).link_low_bytes_per_s)


def test_the_advised_engines_change_after_a_minute_of_another_load(clock: VirtualClock) -> None:
    """P does next to nothing: of four P and two D more should decode, but not at once."""
    advisor = Advisor(clock)
    for engine in range(6):
        advisor.set_engine(engine, "prefill" if engine < 4 else "decode", ready(engine))
    advised = []
    for second in range(150):
        advisor.on_outputs(0, outputs(step=StepSample(4096, 1, 1, 0, 0, 0.1)))
        for step in range(20):
            rows = 10 + (second + step) % 20
            sample = StepSample(rows, rows, rows, 0, 0, 0.010 + 0.001 * rows)
            stats = EngineStats(num_running=rows, num_waiting=2, kv_usage=0.97)
            advisor.on_outputs(4, outputs(step=sample, stats=stats))
        advisor.on_ended(4096, 0, 331, {"queue": 0.1, "prefill": 0.1, "decode": 9.9})
        clock.advance_to(clock.now() + 1.0)
        if (advice := advisor.update()) is not None:
            advised.append(advice.ratio)
    assert advised[0] == (4, 2)
    assert advised[50] == (4, 2)
    prefill, decode = advised[-1] or (0, 0)
    assert prefill + decode == 6
    assert decode > 2
    assert len({*advised}) == 2  # one change, and no way back
