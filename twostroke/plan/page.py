"""Reports as one HTML file that needs nothing else: tables and plots (plotly, inlined)."""

import html
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from twostroke.plan import render
from twostroke.plan.search import Option, Plan

if TYPE_CHECKING:
    from twostroke.plan.article import Cell

STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:70em;padding:0 1em;
color:#222}h1{font-size:1.3em}pre{background:#f5f5f5;padding:1em;overflow-x:auto}
table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right}
td:first-child,th:first-child{text-align:left}"""


def page(title: str, text: str, figures: Sequence[Any]) -> str:
    """A page with a text report and plotly figures. The first carries the library for all."""
    parts = [
        figure.to_html(full_html=False, include_plotlyjs="inline" if index == 0 else False)
        for index, figure in enumerate(figures)
    ]
    answer, _, rest = text.partition("\n\n")
    heading, _, more = answer.partition("\n")
    body = rest.partition("\nJSON: ")[0]  # which is beside the text's terminal, not this page
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{html.escape(title)}"
        f"</title><style>{STYLE}</style></head><body><h1>{html.escape(heading)}</h1>"
        f"<p>{html.escape(more)}</p>{''.join(parts)}<pre>{html.escape(body.strip())}</pre>"
        "</body></html>"
    )


def plan_page(plan: Plan) -> str:
    """A plan: the pareto plot, the constraints of the best, what each change does; and the text."""
    figures = [pareto(plan.options), constraints(plan.best), changes(plan)] if plan.options else []
    return page("twostroke plan", render.text(plan, "", plot=False), figures)


def pareto(options: Sequence[Option]) -> Any:
    """Speed for one user against good requests per GPU."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for is_pd, name in ((True, "prefill and decode apart"), (False, "together")):
        chosen = [
            it for it in options if it.is_disaggregated == is_pd and 0 < it.tpot_within_s < math.inf
        ]
        figure.add_scatter(
            x=[1 / it.tpot_within_s for it in chosen],
            y=[it.within_slo_per_s / it.num_gpus for it in chosen],
            text=[f"{it.layout.name}<br>{it.analysis.binding.name} binds" for it in chosen],
            mode="markers",
            name=name,
        )
    best = options[0]
    if 0 < best.tpot_within_s < math.inf:
        figure.add_scatter(
            x=[1 / best.tpot_within_s],
            y=[best.within_slo_per_s / best.num_gpus],
            text=[best.layout.name],
            mode="markers+text",
            textposition="top right",
            marker={"symbol": "star", "size": 14, "color": "#222"},
            name="the answer",
        )
    figure.update_layout(
        title="Every layout, at the most that it carries",
        xaxis_title="tokens/s for one user",
        yaxis_title="requests/s within the SLO, per GPU",
    )
    return figure


def constraints(option: Option) -> Any:
    """How far each constraint is used when the first binds."""
    import plotly.graph_objects as go

    found = option.analysis.constraints[::-1]
    first = option.analysis.capacity_per_s
    figure = go.Figure()
    figure.add_bar(
        x=[first / it.capacity_per_s if it.capacity_per_s else 0 for it in found],
        y=[it.name for it in found],
        orientation="h",
    )
    figure.update_layout(
        title=f"{option.layout.name}: what is used when the first constraint binds",
        xaxis={"title": "share used", "tickformat": ".0%"},
    )
    return figure


def changes(plan: Plan) -> Any:
    """What one change does to the rate within the SLO."""
    import plotly.graph_objects as go

    base, *others = plan.changes
    figure = go.Figure()
    figure.add_bar(
        x=[it.knob for it in others],
        y=[it.within_slo_per_s / base.within_slo_per_s - 1 for it in others],
        text=[f"then {it.binding}" for it in others],
        textposition="outside",
        cliponaxis=False,
    )
    figure.update_layout(
        title="What one change does", yaxis={"title": "requests/s", "tickformat": "+.0%"}
    )
    return figure


def overlap_map(cells: "Sequence[Cell]") -> Any:
    """How much of the shorter of transfer and decoding is hidden, over KV and link."""
    import plotly.graph_objects as go

    links = list(dict.fromkeys(cell.link_bytes_per_s for cell in cells))
    sizes = list(dict.fromkeys(cell.kv_gib for cell in cells))
    by_place = {(cell.kv_gib, cell.link_bytes_per_s): cell for cell in cells}
    grid = [[by_place[size, link] for link in links] for size in sizes]
    figure = go.Figure()
    figure.add_heatmap(
        x=[f"{link / 1e9:g} GB/s" for link in links],
        y=[f"{row[0].kv_gib:g} GiB ({row[0].slots} requests)" for row in grid],
        z=[[cell.overlap for cell in row] for row in grid],
        text=[
            [f"{cell.overlap:.2f}<br>{cell.total_s:.0f} s in all" for cell in row] for row in grid
        ],
        texttemplate="%{text}",
        zmin=0,
        zmax=1,
        colorscale="Viridis",
    )
    figure.update_layout(
        title="Overlap of transfer and decoding: 1 hidden, 0 one after the other",
        xaxis_title="link between P and D",
        yaxis_title="KV on each of D's GPUs",
    )
    return figure
