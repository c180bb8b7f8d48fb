"""Reports as one HTML file that needs nothing else: tables and plots (plotly, inlined)."""

import html
import math
from collections.abc import Sequence
from typing import Any

from twostroke.plan import render
from twostroke.plan.search import Option, Plan

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
    heading, _, rest = text.partition("\n")
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{html.escape(title)}"
        f"</title><style>{STYLE}</style></head><body><h1>{html.escape(heading)}</h1>"
        f"{''.join(parts)}<pre>{html.escape(rest.strip())}</pre></body></html>"
    )


def plan_page(plan: Plan) -> str:
    """A plan: the pareto plot, the constraints of the best, what each change does; and the text."""
    figures = [pareto(plan.options), constraints(plan.best), changes(plan)] if plan.options else []
    return page("twostroke plan", render.text(plan, "plan.json"), figures)


def pareto(options: Sequence[Option]) -> Any:
    """Speed for one user against good requests per GPU."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for is_pd, name in ((True, "prefill and decode apart"), (False, "together")):
        chosen = [
            it
            for it in options
            if it.is_disaggregated == is_pd and math.isfinite(it.analysis.tpot_s.value)
        ]
        figure.add_scatter(
            x=[1 / it.analysis.tpot_s.value for it in chosen],
            y=[it.goodput_per_gpu_s for it in chosen],
            text=[f"{it.layout.name}<br>{it.analysis.binding.name} binds" for it in chosen],
            mode="markers",
            name=name,
        )
    figure.update_layout(
        title="Every layout",
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
        text=[f"bound by {it.binding}" for it in others],
    )
    figure.update_layout(
        title="What one change does", yaxis={"title": "requests/s", "tickformat": "+.0%"}
    )
    return figure
