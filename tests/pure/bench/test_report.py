import json

from twostroke.bench import report, stats
from twostroke.bench.load import Outcome

RESULT = {
    "request_rate": 2.0,
    "max_concurrency": 4,
    **stats.summarise(
        [Outcome(10, 3, start_s=0.0, chunk_times_s=[0.1, 0.3, 0.5])],
        2.0,
        metrics=["ttft", "itl"],
        percentiles=[50, 99.9],
        goodput_ms={"ttft": 200},
    ),
    "first_error": None,
}


def test_the_block_is_vllms():
    assert report.serving_block(RESULT) == "\n".join(
        [
            "============ Serving Benchmark Result ============",
            "Successful requests:                     1",
            "Failed requests:                         0",
            "Maximum request concurrency:             4",
            "Request rate configured (RPS):           2.00",
            "Benchmark duration (s):                  2.00",
            "Total input tokens:                      10",
            "Total generated tokens:                  3",
            "Request throughput (req/s):              0.50",
            "Request goodput (req/s):                 0.50",
            "Output token throughput (tok/s):         1.50",
            "Peak output token throughput (tok/s):    3.00",
            "Peak concurrent requests:                1",
            "Total token throughput (tok/s):          6.50",
            "---------------Time to First Token----------------",
            "Mean TTFT (ms):                          100.00",
            "Median TTFT (ms):                        100.00",
            "P50 TTFT (ms):                           100.00",
            "P99.9 TTFT (ms):                         100.00",
            "---------------Inter-token Latency----------------",
            "Mean ITL (ms):                           200.00",
            "Median ITL (ms):                         200.00",
            "P50 ITL (ms):                            200.00",
            "P99.9 ITL (ms):                          200.00",
            "==================================================",
        ]
    )


def test_what_was_not_asked_for_is_not_shown():
    block = report.serving_block({**RESULT, "request_rate": "inf", "max_concurrency": None})
    assert "configured" not in block
    assert "concurrency:" not in block


def test_a_server_that_does_not_keep_up_and_failures_are_noted():
    saturated, failed = report.notes({**RESULT, "failed": 3, "first_error": "HTTP 429: full"})
    assert "2.00 requests/s were offered and 0.50 completed" in saturated
    assert failed == "note: the first of 3 failures: HTTP 429: full"
    assert report.notes({**RESULT, "request_rate": 0.5}) == []


def test_a_table_is_aligned():
    assert report.table(["case", "tok/s"], [["a", "1"], ["longer", "12,345"]]) == "\n".join(
        ["case     tok/s", "------  ------", "a            1", "longer  12,345"]
    )


def test_json_is_one_line():
    line = report.json_line(RESULT)
    assert "\n" not in line
    assert json.loads(line) == RESULT
