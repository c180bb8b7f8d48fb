"""The report of a run as one HTML file that needs nothing else, and as a Chrome trace."""

import heapq
import html
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from twostroke.arrays import Float64s
from twostroke.bench.report import serving_block
from twostroke.ledger import Interval
from twostroke.twin import waits
from twostroke.twin.figures import binding_table, engine_table, figures_of, ledger_table
from twostroke.twin.scenario import Result

BUCKETS = 240

# What computes is blue and green, what waits is warm.
COLOURS = {
    Interval.FRONTEND: "#9ca3af",
    Interval.QUEUE: "#f59e0b",
    Interval.PREFILL: "#2563eb",
    Interval.HELD: "#dc2626",
    Interval.TRANSFER: "#7c3aed",
    Interval.DECODE_QUEUE: "#f97316",
    Interval.DECODE: "#10b981",
    Interval.PREEMPTED: "#991b1b",
    Interval.EGRESS: "#d1d5db",
}


def write_page(result: Result, path: Path) -> None:
    """Write the report. OSError when the file cannot be written."""
    from plotly import offline

    figures = [
        ("Requests by what they spend their time on", _stack(result)),
        ("Queues, by engine", _gauges(result, ["running", "waiting"], "requests")),
        ("KV use, by engine", _gauges(result, ["kv_usage"], "share of the pool")),
        ("Link use, by engine", _links(result)),
        ("Latencies", _latencies(result)),
        ("Time per request by interval, in order of arrival", _waits(result)),
    ]
    parts = [
        f"<section><h2>{html.escape(title)}</h2>"
        + offline.plot(figure, output_type="div", include_plotlyjs=False, config=_CONFIG)
        + "</section>"
        for title, figure in figures
        if figure["data"]
    ]
    text = _PAGE.format(
        title=html.escape(result.scenario.name or "twostroke twin"),
        summary=html.escape(_summary(result)),
        script=offline.get_plotlyjs(),
        figures=html.escape(serving_block(figures_of(result))),
        tables=html.escape(
            "\n\n".join(
                [
                    binding_table(waits.binding_over_time(result)),
                    ledger_table(result),
                    engine_table(result),
                ]
            )
        ),
        plots="\n".join(parts),
    )
    path.write_text(text, encoding="utf-8")


def _summary(result: Result) -> str:
    bound = max(waits.binding_over_time(result), key=lambda it: it.share * (it.end_s - it.start_s))
    workload = result.scenario.workload
    what = f"{len(workload):,} requests of {workload.name} on {result.scenario.num_devices} GPUs"
    took = f"{result.duration_s:,.1f} s, {result.request_rate:.2f} requests/s"
    if bound.constraint in ("none", "no load"):
        return f"{what}: {took}; nothing holds requests up."
    return (
        f"{what}: {took}; bound by {bound.constraint} from {bound.start_s:,.1f} to "
        f"{bound.end_s:,.1f} s, where {bound.share:.0%} of the requests' time is spent on it."
    )


# ---------------------------------------------------------------- figures, as plotly's dictionaries


def _layout(y: str, x: str = "seconds", **more: Any) -> dict[str, Any]:
    return {
        "height": 340,
        "margin": {"l": 60, "r": 20, "t": 20, "b": 45},
        "template": "plotly_white",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#333"},
        "xaxis": {"title": {"text": x}, "gridcolor": "#eee"},
        "yaxis": {"title": {"text": y}, "gridcolor": "#eee", "rangemode": "tozero"},
        "legend": {"orientation": "h", "y": 1.12, "x": 0},
        "hovermode": "x unified",
    } | more


def _middles(edges: Float64s) -> list[float]:
    middles: list[float] = ((edges[:-1] + edges[1:]) / 2).tolist()
    return middles


def _rounded(values: Float64s, digits: int = 4) -> list[float]:
    """Fewer digits: a report is read by people, and they make it smaller."""
    rounded: list[float] = np.round(values, digits).tolist()
    return rounded


def _stack(result: Result) -> dict[str, Any]:
    edges = waits.edges_of(result, BUCKETS)
    counts = waits.request_seconds(result, edges) / np.diff(edges)[:, None]
    data = [
        {
            "type": "scatter",
            "mode": "none",
            "stackgroup": "one",
            "name": _name(interval),
            "x": _middles(edges),
            "y": _rounded(counts[:, interval], 2),
            "fillcolor": COLOURS[interval],
        }
        for interval in Interval
        if counts[:, interval].any()
    ]
    layout = _layout("requests")
    layout["yaxis"]["range"] = [0, 1.05 * float(counts.sum(axis=1).max(initial=1.0))]
    return {"data": data, "layout": layout}


def _name(interval: Interval) -> str:
    return interval.name.lower().replace("_", " ")


def _gauges(result: Result, names: list[str], unit: str) -> dict[str, Any]:
    edges = waits.edges_of(result, BUCKETS)
    data = []
    for nth, engine in enumerate(result.engines):
        for dash, name in zip(("solid", "dot"), names, strict=False):
            values = waits.gauge_means(engine, name, edges)
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": engine.name if len(names) == 1 else f"{engine.name} {name}",
                    "x": _middles(edges),
                    "y": _rounded(values),
                    "line": {"color": _LINES[nth % len(_LINES)], "width": 1.5, "dash": dash},
                }
            )
    shares = {"tickformat": ".0%", "range": [0, 1.02]} if unit.startswith("share") else {}
    layout = _layout(unit)
    layout["yaxis"] |= shares
    return {"data": data, "layout": layout}


def _links(result: Result) -> dict[str, Any]:
    edges = waits.edges_of(result, BUCKETS)
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": _middles(edges),
            "y": _rounded(share),
            "line": {"color": _LINES[nth % len(_LINES)], "width": 1.5},
        }
        for nth, (name, share) in enumerate(
            (name, share) for name, share in waits.link_shares(result, edges).items() if share.any()
        )
    ]
    layout = _layout("share of the bandwidth")
    layout["yaxis"] |= {"tickformat": ".0%"}
    return {"data": data, "layout": layout}


def _latencies(result: Result) -> dict[str, Any]:
    """Shares of requests that are at least so fast; times on a logarithmic axis."""
    done = result.done
    data = []
    for nth, (name, values) in enumerate(
        (("TTFT", result.ttft_s), ("TPOT", result.tpot_s), ("end to end", result.e2e_s))
    ):
        ordered = np.sort(values[done & (values > 0)])
        if not len(ordered):
            continue
        places = np.unique(np.linspace(0, len(ordered) - 1, 400).astype(np.int64))
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "x": _rounded(1000 * ordered[places], 3),
                "y": _rounded((places + 1) / len(ordered)),
                "line": {"color": _LINES[nth], "width": 2},
            }
        )
    layout = _layout("share of requests", "milliseconds", hovermode="closest")
    layout["xaxis"] |= {"type": "log"}
    layout["yaxis"] |= {"tickformat": ".0%"}
    return {"data": data, "layout": layout}


def _waits(result: Result) -> dict[str, Any]:
    """Mean seconds in each interval over requests that arrived in a row, stacked."""
    order = np.argsort(result.arrival_s)
    order = order[result.done[order]]
    groups = np.array_split(order, min(len(order), 120)) if len(order) else []
    table = np.array([result.intervals_s[group].mean(axis=0) for group in groups])
    at = [float(result.arrival_s[group].mean()) for group in groups]
    data = [
        {
            "type": "scatter",
            "mode": "none",
            "stackgroup": "one",
            "name": _name(interval),
            "x": _rounded(np.array(at), 3),
            "y": _rounded(table[:, interval]),
            "fillcolor": COLOURS[interval],
        }
        for interval in Interval
        if len(table) and table[:, interval].any()
    ]
    layout = _layout("seconds", "arrival (s)")
    if len(table):
        layout["yaxis"]["range"] = [0, 1.05 * float(table.sum(axis=1).max())]
    return {"data": data, "layout": layout}


# ---------------------------------------------------------------- trace


def write_trace(result: Result, path: Path) -> None:
    """Each request's intervals as a Chrome trace, on as many tracks as requests were there at once.

    Open it at ui.perfetto.dev. The time axis is the virtual clock's.
    """
    from twostroke import trace

    requests, intervals, times = result.changes
    order = np.lexsort((np.arange(len(times)), requests))
    free: list[int] = []
    ends: list[tuple[float, int]] = []
    tracks: dict[int, int] = {}
    first = dict(zip(requests[order][::-1].tolist(), times[order][::-1].tolist(), strict=True))
    last = dict(zip(requests[order].tolist(), times[order].tolist(), strict=True))
    for request in sorted(first, key=first.__getitem__):
        while ends and ends[0][0] <= first[request]:
            heapq.heappush(free, heapq.heappop(ends)[1])
        tracks[request] = heapq.heappop(free) if free else len(ends)
        heapq.heappush(ends, (last[request], tracks[request]))
    trace.begin(path)
    tracer = trace.Tracer(path, result.scenario.name or "twin")
    rows = zip(
        requests[order].tolist(), intervals[order].tolist(), times[order].tolist(), strict=True
    )
    for (request, interval, start_s), (following, _, end_s) in pairwise(rows):
        if request == following and end_s > start_s:
            name = f"{request} {_name(Interval(interval))}"
            tracer.span(f"request {tracks[request]:04}", name, start_s, end_s, request=request)
    tracer.flush()
    trace.finish(path)


_CONFIG = {"displayModeBar": False, "responsive": True}
_LINES = (
    "#2563eb",
    "#dc2626",
    "#059669",
    "#d97706",
    "#7c3aed",
    "#0891b2",
    "#be185d",
    "#4d7c0f",
    "#6b7280",
    "#92400e",
    "#1e40af",
    "#991b1b",
)

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; margin: 0 auto; padding: 24px;
       max-width: 1280px; }}
h1 {{ font-size: 22px; margin: 0 0 4px; }} h2 {{ font-size: 16px; margin: 28px 0 0; }}
.texts {{ display: flex; gap: 32px; flex-wrap: wrap; }}
pre {{ font: 12px/1.45 ui-monospace, monospace; background: #f7f7f8; padding: 14px;
      border-radius: 6px; overflow-x: auto; margin: 12px 0 0; }}
@media (min-width: 1200px) {{ .plots {{ display: grid; grid-template-columns: 1fr 1fr;
      gap: 0 28px; }} section {{ min-width: 0; }} }}
</style><script>{script}</script></head><body>
<h1>{title}</h1><p>{summary}</p>
<div class="texts"><pre>{figures}</pre><pre>{tables}</pre></div>
<div class="plots">{plots}</div>
</body></html>
"""
