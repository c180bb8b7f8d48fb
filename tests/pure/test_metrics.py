import pytest
from prometheus_client.parser import text_string_to_metric_families

from twostroke.ledger import Boundary, RequestLedger
from twostroke.log_lines import StatusLine, request_line
from twostroke.messages import EngineReady, EngineStats
from twostroke.metrics import (
    Histogram,
    Metrics,
    SampleRecord,
    token_buckets,
    total_stats,
)


def record(reason: str = "stop", output_tokens: int = 5) -> SampleRecord:
    ledger = RequestLedger(10.0)
    times = {"SENT": 10.5, "SCHEDULED": 11, "FIRST_TOKEN": 12, "FINISHED": 14, "CLOSED": 14.5}
    for name, time_s in times.items():
        ledger.mark(Boundary[name], time_s)
    return SampleRecord(
        prompt_tokens=100,
        cached_tokens=64,
        output_tokens=output_tokens,
        max_tokens=16,
        finish_reason=reason,
        ledger=ledger,
    )


def samples(metrics: Metrics) -> dict[str, float]:
    """name{label, ...} without the labels that all have -> value."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name + "".join(f"|{v}" for v in labels.values())] = sample.value
    return found


def test_names_are_those_of_vllm_under_either_prefix():
    for prefix in ("vllm", "twostroke"):
        metrics = Metrics(model_name="m", prefix=prefix)
        metrics.engines[0].observe_stats(
            EngineStats(
                num_running=3, num_waiting=2, kv_usage=0.5, prompt_tokens=7, num_preemptions=1
            )
        )
        metrics.engines[0].engine_ready(EngineReady(0, 128, num_blocks=9, block_size=16))
        found = samples(metrics)
        assert found[f"{prefix}:num_requests_running"] == 3
        assert found[f"{prefix}:num_requests_waiting"] == 2
        assert found[f"{prefix}:kv_cache_usage_perc"] == 0.5
        assert found[f"{prefix}:prompt_tokens_total"] == 7
        assert found[f"{prefix}:num_preemptions_total"] == 1
        assert found[f"{prefix}:request_success_total|stop"] == 0
        assert found[f"{prefix}:cache_config_info|16|9"] == 1
        assert f'{prefix}:generation_tokens_total{{engine="0",model_name="m"}} 0.0' in (
            metrics.render().decode()
        )


def test_a_request_is_counted_once_per_sample():
    metrics = Metrics(model_name="m", prefix="vllm")
    metrics.engines[0].observe_request([record(), record("length", output_tokens=1)])
    metrics.engines[0].observe_tokens([2.0], [0.5, 0.02])
    metrics.engines[0].observe_rejection()
    found = samples(metrics)
    assert found["vllm:request_success_total|stop"] == 1
    assert found["vllm:request_success_total|length"] == 1
    assert found["vllm:e2e_request_latency_seconds_sum"] == 9.0
    assert found["vllm:request_params_n_sum"] == 2
    assert found["vllm:request_params_n_count"] == 1
    assert found["vllm:request_queue_time_seconds_sum"] == 1.0
    assert found["vllm:request_prefill_time_seconds_sum"] == 2.0
    assert found["vllm:request_decode_time_seconds_sum"] == 4.0
    assert found["vllm:request_time_per_output_token_seconds_count"] == 1
    assert found["vllm:request_time_per_output_token_seconds_sum"] == 0.5
    assert found["vllm:request_max_num_generation_tokens_sum"] == 5
    assert found["vllm:request_prefill_kv_computed_tokens_sum"] == 72
    assert found["vllm:prompt_tokens_cached_total"] == 128
    assert found["vllm:time_to_first_token_seconds_count"] == 1
    assert found["vllm:inter_token_latency_seconds_bucket|0.025"] == 1
    assert found["vllm:inter_token_latency_seconds_bucket|+Inf"] == 2
    assert found["vllm:admission_rejections_total|queue_full"] == 1
    intervals = [v for k, v in found.items() if k.startswith("vllm:request_interval_seconds_total")]
    assert sum(intervals) == 9.0


def test_step_sizes_come_from_the_totals():
    metrics = Metrics(model_name="m")
    metrics.engines[0].observe_stats(EngineStats(num_steps=1, step_tokens=100))
    metrics.engines[0].observe_stats(EngineStats(num_steps=3, step_tokens=116))
    metrics.engines[0].observe_stats(EngineStats(num_steps=3, step_tokens=116))
    found = samples(metrics)
    assert found["twostroke:iteration_tokens_total_count"] == 3
    assert found["twostroke:iteration_tokens_total_sum"] == 116
    assert found["twostroke:iteration_tokens_total_bucket|8.0"] == 2


def test_a_value_on_a_bound_belongs_to_its_bucket():
    histogram = Histogram("h", (1, 2, 5))
    histogram.observe(2)
    histogram.observe_many([0.5, 2.0, 2.5, 9.0])
    histogram.observe_many([])
    assert histogram.buckets() == [("1.0", 1), ("2.0", 3), ("5.0", 4), ("+Inf", 5)]
    assert histogram.sum == pytest.approx(16)
    assert token_buckets(120) == (1, 2, 5, 10, 20, 50, 100)


def test_the_line_of_a_request():
    assert request_line("r", [record()]) == (
        "r: stop, 100 (64 cached) + 5 tokens, first token 2000 ms, 2.0 tok/s, 4500 ms "
        "(frontend 500, queue 500, prefill 1000, decode 2000, preempted 0, egress 500)"
    )
    silent = SampleRecord(
        prompt_tokens=1, cached_tokens=0, output_tokens=0, max_tokens=1, finish_reason="abort",
        ledger=RequestLedger(0),
    )  # fmt: skip
    assert request_line("r", [silent]).startswith("r: abort, 1 + 0 tokens, 0 ms (")


def test_the_status_line_gives_rates_and_is_silent_when_idle():
    status = StatusLine(0.0)
    assert status.line(EngineStats(), 10.0) is None
    busy = EngineStats(
        num_running=2, num_waiting=1, kv_usage=0.123, prompt_tokens=50, generation_tokens=200,
        prefix_cache_queries=40, prefix_cache_hits=10, num_preemptions=3,
    )  # fmt: skip
    assert status.line(busy, 20.0) == (
        "prompt 5.0 tok/s, generation 20.0 tok/s, running 2, waiting 1, KV 12.3%, "
        "prefix hits 25.0%, preemptions 3"
    )
    ended = EngineStats(prompt_tokens=50, generation_tokens=210, prefix_cache_queries=40,
                        prefix_cache_hits=10, num_preemptions=3)  # fmt: skip
    assert (
        status.line(ended, 30.0)
        == "prompt 0.0 tok/s, generation 1.0 tok/s, running 0, waiting 0, KV 0.0%"
    )
    assert status.line(ended, 40.0) is None


def test_drafts_are_shown_once_there_are_any():
    metrics, status = Metrics(model_name="m", prefix="vllm"), StatusLine(0.0)
    metrics.engines[0].observe_stats(EngineStats(num_running=1))
    assert not any("spec_decode" in name for name in samples(metrics))
    assert "drafts" not in status.line(EngineStats(num_running=1), 1.0)
    stats = EngineStats(
        num_running=1,
        spec_decode_num_drafts=10,
        spec_decode_num_draft_tokens=40,
        spec_decode_num_accepted_tokens=30,
    )
    metrics.engines[0].observe_stats(stats)
    found = samples(metrics)
    assert found["vllm:spec_decode_num_drafts_total"] == 10
    assert found["vllm:spec_decode_num_draft_tokens_total"] == 40
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == 30
    assert status.line(stats, 2.0).endswith("drafts accepted 75.0%")
    assert "drafts" not in status.line(stats, 3.0)


def test_each_engine_has_its_label_and_each_family_comes_once():
    metrics = Metrics(model_name="m", prefix="vllm", num_engines=2)
    metrics.engines[0].observe_stats(EngineStats(num_running=1))
    metrics.engines[1].observe_stats(EngineStats(num_running=3))
    metrics.engines[1].observe_request([record()])
    text = metrics.render().decode()
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1
    for engine, running, ended in ((0, 1, 0), (1, 3, 1)):
        labels = f'{{engine="{engine}",model_name="m"}}'
        assert f"vllm:num_requests_running{labels} {running}.0" in text
        assert f"vllm:e2e_request_latency_seconds_count{labels} {ended}.0" in text
    families = [family.name for family in text_string_to_metric_families(text)]
    assert len(families) == len(set(families))


def test_totals_sum_and_the_kv_usage_is_a_mean():
    one = EngineStats(num_running=1, kv_usage=0.5, prompt_tokens=10)
    two = EngineStats(num_running=2, kv_usage=0.25, prompt_tokens=20)
    total = EngineStats(num_running=3, kv_usage=0.375, prompt_tokens=30)
    assert total_stats([one, two]) == total
    assert total_stats([one]) == one
