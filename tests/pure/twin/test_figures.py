"""Figures, waits, reports and the command line, of runs whose cause is known."""

import json
import re

import numpy as np
import pytest

from tests.pure.twin.deployments import TOKEN_BYTES, group, run
from twostroke.bench.report import serving_block
from twostroke.cost import BandwidthCurve
from twostroke.ledger import Interval
from twostroke.twin import waits
from twostroke.twin.figures import figures_of, recorded, summary, text_report
from twostroke.twin.transfers import Link

APART = [group("prefill"), group("decode")]


@pytest.fixture(scope="module")
def result():
    return run(APART, "poisson:8/s,in=300,out=50,n=60")


def test_figures_are_those_of_bench_serve(result):
    figures = figures_of(result, goodput="ttft:1000000")
    assert figures["completed"] == 60
    assert figures["total_input_tokens"] == 18_000
    assert figures["total_output_tokens"] == 3000
    assert figures["request_throughput"] == pytest.approx(60 / result.duration_s)
    assert figures["request_goodput"] == figures["request_throughput"]
    assert figures["mean_ttft_ms"] == pytest.approx(1000 * result.ttft_s.mean())
    gaps = np.repeat(result.itl_s, result.itl_counts) * 1000
    assert len(gaps) == 60 * 49
    assert figures["mean_itl_ms"] == pytest.approx(gaps.mean())
    assert figures["p99_itl_ms"] == pytest.approx(np.percentile(gaps, 99))
    assert "Mean TPOT (ms)" in serving_block(figures)


def test_requests_at_every_moment_add_up_to_the_ledger(result):
    table = waits.request_seconds(result, waits.edges_of(result, 37))
    assert table.sum(axis=0) == pytest.approx(result.intervals_s.sum(axis=0))


def test_gauges_are_weighted_by_time(result):
    edges = waits.edges_of(result, 10)
    for engine in result.engines:
        running = waits.gauge_means(engine, "running", edges)
        assert (running >= 0).all()
        assert running.max() <= engine.timeline["running"].max()
    shares = waits.link_shares(result, edges)
    moved = shares["D0 in"] * np.diff(edges) * 1e9
    assert moved.sum() == pytest.approx(60 * 304 * TOKEN_BYTES)  # whole blocks


@pytest.mark.parametrize(
    ("engines", "load", "link", "constraint"),
    [
        (
            [group("prefill"), group("decode", num_blocks=9000, max_num_seqs=128)],
            "poisson:100/s,in=500,out=5,n=80",
            None,
            "compute on P",
        ),
        (APART, "poisson:20/s,in=500,out=5,n=60", 3e6, "link"),
        (
            [group("prefill"), group("decode", num_blocks=90)],
            "poisson:20/s,in=500,out=200,n=40",
            None,
            "KV on D",
        ),
        ([group("both", max_num_seqs=2)], "poisson:20/s,in=20,out=80,n=60", None, "seats on"),
        ([group()], "poisson:1/s,in=20,out=20,n=20", None, "none"),
    ],
)
def test_what_binds_is_named(engines, load, link, constraint):
    fields = {} if link is None else {"link": Link(bandwidth=BandwidthCurve((0.0,), (link,)))}
    found = waits.binding_over_time(run(engines, load, **fields))
    length = {}
    for it in found:
        length[it.constraint] = length.get(it.constraint, 0.0) + it.end_s - it.start_s
    length.pop("no load", None)
    if constraint != "none":
        length.pop("none", None)
    assert max(length, key=length.__getitem__).startswith(constraint)
    assert found[0].start_s <= found[-1].end_s


def test_the_text_says_where_time_went(result):
    text = text_report(result, figures_of(result))
    for words in (
        "Serving Benchmark Result",
        "ledger (ms)",
        "transfer",
        "D0",
        "bound by",
        "steps, in",
    ):
        assert words in text


def test_the_summary_is_json(result):
    whole = json.loads(json.dumps(summary(result, figures_of(result))))
    assert whole["completed"] == 60
    assert whole["links"]["D0 in"]["bytes"] == 60 * 304 * TOKEN_BYTES
    assert sum(whole["mean_interval_s"].values()) == pytest.approx(result.e2e_s.mean(), rel=1e-6)
    assert {engine["name"] for engine in whole["engines"]} == {"P0", "D0"}


def test_a_run_can_be_kept_as_a_ledger(result):
    rows = recorded(result)
    assert len(rows) == 60
    for row in rows:
        assert sum(row.intervals.values()) == pytest.approx(row.e2e_s, abs=1e-8)
        assert Interval[next(iter(row.intervals)).upper()] in Interval


def test_the_page_is_whole(result, tmp_path):
    pytest.importorskip("plotly")
    from twostroke.twin.page import write_page

    write_page(result, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert text.count("<section>") == 6
    assert not re.search(r"<(script|link)[^>]+(src|href)=", text)  # nothing is fetched


def test_the_trace_has_every_interval(result, tmp_path):
    from twostroke.twin.page import write_trace

    write_trace(result, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())
    spans = [event for event in events if event["ph"] == "X"]
    assert sum(span["dur"] for span in spans) == pytest.approx(1e6 * result.e2e_s.sum(), rel=1e-4)
