"""Numbers of deployments whose engines have roles, on the page and in the log."""

import pytest

from tests.pure.test_metrics import record, samples
from twostroke.kv_messages import KvEndpoint, KvLayoutRecord, KvReceived
from twostroke.ledger import Boundary, RequestLedger
from twostroke.log_lines import StatusLine, request_line
from twostroke.messages import EngineReady, EngineStats
from twostroke.metrics import Metrics, SampleRecord
from twostroke.metrics_handoff import EngineRole, HandoffNumbers, load_ratio


def numbers(busy_p: float = 0.0, busy_d: float = 0.0, **fields) -> HandoffNumbers:
    def engine(role: str, busy_s: float, **gauges) -> EngineRole:
        return EngineRole(role=role, state="ready", stats=EngineStats(**gauges), busy_s=busy_s)

    return HandoffNumbers(
        engines={
            0: engine("prefill", busy_p, num_running=2, num_waiting=3, num_holds=4, hold_usage=0.5),
            1: engine("decode", busy_d, num_running=9, kv_usage=0.5, num_failed_loads=2),
            2: engine("decode", busy_d, num_running=1, kv_usage=0.3),
        },
        **fields,
    )


def handed_over() -> SampleRecord:
    ledger = RequestLedger(0)
    for at_s, name in enumerate(
        ("SENT", "PREFILL_SCHEDULED", "PREFILL_FINISHED", "DECODE_LOADING", "DECODE_LOADED",
         "DECODE_SCHEDULED", "FIRST_TOKEN", "FINISHED", "CLOSED"), start=1
    ):  # fmt: skip
        ledger.mark(Boundary[name], at_s)
    return SampleRecord(
        prompt_tokens=100,
        cached_tokens=0,
        output_tokens=5,
        max_tokens=16,
        finish_reason="stop",
        ledger=ledger,
        transfer_bytes=2_000_000,
        transfer_s=0.001,
    )


def ready(kv: KvEndpoint | None) -> EngineReady:
    return EngineReady(0, 128, num_blocks=9, block_size=16, kv=kv)


def test_what_the_router_counts_is_on_the_page():
    metrics = Metrics(model_name="m", num_engines=3)
    assert not any("handoff" in name for name in samples(metrics))
    metrics.handoff = lambda: numbers(
        1.5,
        num_waiting=7,
        num_tickets=2,
        decisions={("whole", "cached"): 3, ("handed_over", "cheaper"): 4},
        retries={"decode_died": 1},
        failures={"lease_ended": 5, "transfer": 6},
        transfer_bytes=1000,
    )
    found = samples(metrics)
    assert found["twostroke:handoff_queue_depth"] == 7
    assert found["twostroke:handoff_tickets"] == 2
    assert found["twostroke:routing_decisions_total|cached|whole"] == 3
    assert found["twostroke:routing_decisions_total|cheaper|handed_over"] == 4
    assert found["twostroke:handoff_retries_total|decode_died"] == 1
    assert found["twostroke:kv_transfer_failures_total|lease_ended"] == 5
    assert found["twostroke:kv_transfer_failures_total|transfer"] == 6
    assert found["twostroke:kv_transfer_bytes_total"] == 1000
    text = metrics.render().decode()
    of_p = '{engine="0",model_name="m"}'
    assert f"twostroke:kv_holds{of_p} 4.0" in text
    assert f"twostroke:kv_hold_usage{of_p} 0.5" in text
    assert f"twostroke:engine_busy_seconds_total{of_p} 1.5" in text
    assert 'twostroke:kv_failed_loads_total{engine="1",model_name="m"} 2.0' in text
    assert "twostroke:kv_expired_leases_total" in text
    role = 'engine="0",model_name="m",role="prefill",state="ready"'
    assert f"twostroke:engine_role{{{role}}} 1.0" in text


def test_intervals_and_transfers_are_told_of_engines_that_hand_over():
    metrics = Metrics(model_name="m")
    metrics.engines[0].observe_request([handed_over(), record()])
    moved = KvReceived(handle=1, num_bytes=1 << 20, started_s=1.0, ended_s=1.002)
    metrics.engines[0].observe_transfer(moved)
    metrics.engines[0].observe_transfer(KvReceived(handle=1, error="no"))
    metrics.engines[0].engine_ready(ready(None))
    assert "twostroke:request_held_time_seconds_sum" not in samples(metrics)
    layout = KvLayoutRecord(
        model="m", dtype="float16", num_layers=1, num_kv_heads=1, head_dim=1, block_size=16,
        num_blocks=9,
    )  # fmt: skip
    endpoint = KvEndpoint(engine_id="e", transport="shm", addresses=["a"], layout=layout)
    metrics.engines[0].engine_ready(ready(endpoint))
    found = samples(metrics)
    assert found["twostroke:request_held_time_seconds_sum"] == 1
    assert found["twostroke:request_transfer_time_seconds_sum"] == 1
    assert found["twostroke:request_decode_queue_time_seconds_count"] == 1
    assert found["twostroke:kv_transfer_size_bytes_sum"] == 1 << 20
    assert found["twostroke:kv_transfer_time_seconds_sum"] == pytest.approx(0.002)
    assert found["twostroke:kv_transfer_rate_bytes_per_second_bucket|1e+09"] == 1
    spent = [v for k, v in found.items() if k.startswith("twostroke:request_interval_seconds")]
    assert sum(spent) == pytest.approx(9 + 4.5)


def test_the_line_of_a_request_that_two_engines_served():
    assert request_line("r", [handed_over()]) == (
        "r: stop, 100 + 5 tokens, first token 7000 ms, 4.0 tok/s, KV 2.0 MB at 2.00 GB/s, 9000 ms "
        "(frontend 1000, queue 1000, prefill 1000, held 1000, transfer 1000, decode_queue 1000, "
        "decode 2000, preempted 0, egress 1000)"
    )


def test_the_status_line_has_totals_by_role():
    status = StatusLine(0.0)
    assert status.line(EngineStats(), 10.0, HandoffNumbers()) is None
    line = status.line(EngineStats(num_running=1), 20.0, numbers(4, 8, num_waiting=5))
    assert line.endswith(
        "1 P 2 running 3 waiting 0% KV, 2 D 10 running 0 waiting 40% KV, hand-offs queued 5 held 0"
    )
    after = numbers(8, 10, transfer_bytes=5 * 10**9, failures={"transfer": 2})
    line = status.line(EngineStats(num_running=1), 30.0, after)
    assert line.endswith(
        "hand-offs queued 0 held 0, KV moved 0.50 GB/s, load P:D 2.00, failed loads 2"
    )
    line = StatusLine(0.0).line(EngineStats(), 10.0, HandoffNumbers(num_waiting=1))
    assert line.endswith("hand-offs queued 1 held 0")


def test_no_ratio_of_what_did_nothing():
    assert load_ratio(numbers(), numbers(1, 0)) is None
    assert load_ratio(HandoffNumbers(), numbers(1, 1)) is None
    assert load_ratio(numbers(1, 1), numbers(2, 3)) == 0.5


def test_advice_is_on_the_page_once_there_is_any():
    metrics = Metrics(model_name="m", num_engines=3)
    metrics.handoff = lambda: numbers(verdicts={"ratio": 1.0, "layout": 0.0}, advised=(2, 1))
    found = samples(metrics)
    assert found["twostroke:advice|ratio"] == 1.0
    assert found["twostroke:advice|layout"] == 0.0
    assert found["twostroke:advised_prefill_engines"] == 2
    assert found["twostroke:advised_decode_engines"] == 1
