import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from twostroke.errors import ConfigError
from twostroke.plan import own_metrics, vllm_metrics
from twostroke.plan.scrape import Page, Series, metrics_url, read, slope


def page(time_s: float, lines: str) -> Page:
    return Page(lines, "test", time_s)


def vllm(role: str, time_s: float, *, ended: float, names: str = "new", rows: float = 20) -> Page:
    """A vLLM engine's page after `ended` requests of 1,000 + 100 tokens."""
    usage = "kv_cache_usage_perc" if names == "new" else "gpu_cache_usage_perc"
    itl = "inter_token_latency_seconds" if names == "new" else "time_per_output_token_seconds"
    labels = 'engine="0",model_name="m"'
    token_s = 0.001 * rows
    text = f"""
vllm:num_requests_running{{{labels}}} {rows if role == "decode" else 0}
vllm:num_requests_waiting{{{labels}}} 3
vllm:{usage}{{{labels}}} 0.95
vllm:prompt_tokens_total{{{labels}}} {1000 * ended}
vllm:prefix_cache_queries_total{{{labels}}} {1000 * ended}
vllm:prefix_cache_hits_total{{{labels}}} {100 * ended}
vllm:request_prompt_tokens_sum{{{labels}}} {1000 * ended}
vllm:request_prompt_tokens_count{{{labels}}} {ended}
vllm:request_generation_tokens_sum{{{labels}}} {100 * ended}
vllm:request_generation_tokens_count{{{labels}}} {ended}
vllm:request_queue_time_seconds_sum{{{labels}}} {0.5 * ended}
vllm:request_queue_time_seconds_count{{{labels}}} {ended}
vllm:request_prefill_time_seconds_sum{{{labels}}} {0.5 * ended}
vllm:request_prefill_time_seconds_count{{{labels}}} {ended}
vllm:iteration_tokens_total_count{{{labels}}} {ended / 2}
vllm:request_decode_time_seconds_sum{{{labels}}} {2 * ended}
vllm:request_decode_time_seconds_count{{{labels}}} {ended}
vllm:{itl}_sum{{{labels}}} {token_s * 100 * ended}
vllm:{itl}_count{{{labels}}} {100 * ended}
vllm:cache_config_info{{engine="0",num_gpu_blocks="1000",block_size="16"}} 1
"""
    if role == "decode":
        text += f"""
vllm:nixl_xfer_time_seconds_sum{{{labels}}} {0.02 * ended * 2}
vllm:nixl_xfer_time_seconds_count{{{labels}}} {ended * 2}
vllm:nixl_bytes_transferred_sum{{{labels}}} {1e8 * ended}
vllm:nixl_num_descriptors_sum{{{labels}}} {6400 * ended}
"""
    if names == "new":
        text += f"""
vllm:num_requests_kv_fetch_by_stage{{{labels},stage="in_progress"}} 4
vllm:num_requests_waiting_by_reason{{{labels},reason="capacity"}} 2
vllm:num_requests_waiting_by_reason{{{labels},reason="deferred"}} 1
"""
    return page(time_s, text)


@pytest.mark.parametrize("names", ["new", "old"])
def test_a_vllm_deployment_is_observed_by_new_and_old_names(names: str) -> None:
    def series(role: str) -> Series:
        return Series(
            tuple(vllm(role, t, ended=10 + 2 * t, names=names) for t in (0.0, 30.0, 60.0))
        )

    seen = vllm_metrics.observe([series("prefill")], [series("decode"), series("decode")])
    assert (seen.num_prefill, seen.num_decode) == (1, 2)
    assert seen.window_s == 60
    assert seen.requests_per_s == pytest.approx(4.0)
    assert (seen.prompt_tokens, seen.output_tokens) == (1000, 100)
    assert seen.cached_tokens == pytest.approx(100)
    assert seen.tpot_s == pytest.approx(0.02)
    assert seen.decode_kv_usage == pytest.approx(0.95)
    assert seen.decode_running == pytest.approx(20)
    assert seen.decode_pool_tokens == 16_000
    assert seen.transfer_s == pytest.approx(0.02)
    assert seen.transfer_bytes == pytest.approx(1e8)
    assert seen.transfer_messages == pytest.approx(6400)
    assert seen.transfer_bytes_per_s == pytest.approx(4e8)
    assert seen.room_wait_s == pytest.approx(0.48)
    # Its gauges never show a request of one token; a second each of two in a step is half busy.
    assert seen.prefill_running == 0
    assert seen.prefill_busy == pytest.approx(0.5)
    assert seen.prefill_tokens_per_s == pytest.approx(3600)
    assert seen.decode_loading == (
        pytest.approx(4) if names == "new" else pytest.approx(math.nan, nan_ok=True)
    )
    assert seen.decode_waiting == pytest.approx(2 if names == "new" else 3)
    assert math.isnan(seen.link_bytes_per_s)


def test_what_a_batch_costs_is_told_from_a_load_that_varies() -> None:
    pages = [
        vllm("decode", float(i), ended=100.0 * i, rows=rows)
        for i, rows in enumerate([10, 12, 15, 20, 26, 30])
    ]
    seen = vllm_metrics.observe([Series((pages[0],))], [Series(tuple(pages))])
    assert seen.decode_elasticity > 0.5
    assert math.isnan(slope([(1.0, 2.0)] * 10))


def test_a_restart_in_between_is_not_taken_for_a_negative_rate() -> None:
    series = Series((vllm("decode", 0.0, ended=100), vllm("decode", 60.0, ended=5)))
    seen = vllm_metrics.observe([series], [series])
    assert math.isnan(seen.requests_per_s)
    assert seen.decode_kv_usage == pytest.approx(0.95)


def own(time_s: float, ended: float) -> Page:
    labels = 'model_name="m"'
    intervals = {"queue": 0.1, "prefill": 0.2, "held": 0.3, "transfer": 0.05, "decode": 2.0}
    lines = [
        f'twostroke:request_success_total{{{labels},engine="1",finished_reason="length"}} {ended}',
        f'twostroke:engine_role{{{labels},engine="0",role="prefill",state="ready"}} 1',
        f'twostroke:engine_role{{{labels},engine="1",role="decode",state="ready"}} 1',
        f'twostroke:engine_role{{{labels},engine="2",role="decode",state="gone"}} 1',
        f'twostroke:engine_busy_seconds_total{{{labels},engine="0"}} {0.3 * time_s}',
        f'twostroke:engine_busy_seconds_total{{{labels},engine="1"}} {0.9 * time_s}',
        f'twostroke:num_requests_running{{{labels},engine="0"}} 1',
        f'twostroke:num_requests_running{{{labels},engine="1"}} 12',
        f'twostroke:kv_cache_usage_perc{{{labels},engine="1"}} 0.5',
        f'twostroke:kv_hold_usage{{{labels},engine="0"}} 0.2',
        f"twostroke:kv_transfers_total{{{labels}}} {ended}",
        f"twostroke:kv_transfer_bytes_total{{{labels}}} {1e6 * ended}",
        f"twostroke:kv_transfer_seconds_total{{{labels}}} {0.01 * ended}",
        f"twostroke:kv_transfer_messages_total{{{labels}}} {4 * ended}",
        f'twostroke:observed{{{labels},figure="link_bytes_per_s"}} 1e9',
        f'twostroke:observed{{{labels},figure="prefill_pin_limit"}} 0.5',
        f'twostroke:prompt_tokens_total{{{labels},engine="0"}} {300 * ended}',
        f'twostroke:request_generation_tokens_sum{{{labels},engine="1"}} {101 * ended}',
        f'twostroke:request_generation_tokens_count{{{labels},engine="1"}} {ended}',
        *(
            f'twostroke:request_interval_seconds_total{{{labels},engine="1",interval="{name}"}} '
            f"{value * ended}"
            for name, value in intervals.items()
        ),
    ]
    return page(time_s, "\n".join(lines) + "\n")


def test_a_running_server_of_ours_is_observed() -> None:
    seen = own_metrics.observe(Series((own(0.0, 0), own(60.0, 120))))
    assert (seen.num_prefill, seen.num_decode) == (1, 1)
    assert seen.requests_per_s == pytest.approx(2.0)
    assert seen.prefill_busy == pytest.approx(0.3)
    assert seen.room_wait_s == pytest.approx(0.3)
    assert seen.tpot_s == pytest.approx(0.02)
    assert seen.transfer_bytes_per_s == pytest.approx(2e6)
    assert seen.prefill_tokens_per_s == pytest.approx(2000)
    assert seen.prefill_pinned == pytest.approx(0.2)
    assert (seen.transfer_s, seen.read_s) == (pytest.approx(0.05), pytest.approx(0.01))
    assert seen.transfer_messages == 4
    assert (seen.link_bytes_per_s, seen.prefill_pin_limit) == (1e9, 0.5)
    assert math.isnan(seen.link_low_bytes_per_s)


def test_a_server_without_roles_is_refused() -> None:
    with pytest.raises(ConfigError, match="no prefill and decode engines"):
        own_metrics.observe(Series((page(0.0, "twostroke:num_requests_running 1\n"),)))


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://h:8000", "http://h:8000/metrics"),
        ("h:8000", "http://h:8000/metrics"),
        ("https://h/v1/", "https://h/metrics"),
        ("http://h:1/metrics", "http://h:1/metrics"),
    ],
)
def test_addresses(url: str, address: str) -> None:
    assert metrics_url(url) == address


@pytest.mark.parametrize("url", ["ftp://h", "http://", "://"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match="no address of a server"):
        metrics_url(url)


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, body = {
            "/metrics": (200, b"vllm:num_requests_running 1\n"),
            "/page/metrics": (200, b"<html>hello</html>"),
            "/other/metrics": (200, b"up 1\n"),
            "/bytes/metrics": (200, b"\xff\xfe\x00"),
            "/moved/metrics": (302, b""),
        }.get(self.path, (404, b"nothing"))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Tests are silent."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Answers) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def test_pages_are_read_over_a_while(server: str) -> None:
    pauses: list[float] = []
    shares: list[float] = []
    (series,) = read([server], 10.0, pause=pauses.append, progress=shares.append)
    assert len(series.pages) == 5
    assert len(pauses) == 4
    assert shares[-1] == 1.0


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("/page", "serves no metrics of an engine"),
        ("/other", "num_requests_running is not among"),
        ("/bytes", "does not answer text"),
        ("/moved", "it answers 302"),
        ("/nowhere", "it answers 404"),
    ],
)
def test_endpoints_that_are_no_engine(server: str, path: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read([server + path], 0.0)


def test_a_port_where_nobody_listens() -> None:
    with pytest.raises(ConfigError, match=r"cannot read http://127\.0\.0\.1:1/metrics"):
        read(["127.0.0.1:1"], 0.0)
