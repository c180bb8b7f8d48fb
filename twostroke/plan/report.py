"""Where reports go: text or JSON on stdout, the JSON in a file too, HTML where it was asked for."""

import json as json_
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from twostroke.errors import ConfigError
from twostroke.plan import render
from twostroke.plan.layout import Layout
from twostroke.plan.search import Option, Plan


def show(
    data: Mapping[str, Any],
    text: str,
    page: Callable[[], str] | None,
    *,
    json: bool,
    html: Path | None,
    name: str,
) -> None:
    """Print a report and keep its files. `text` has a place for the JSON's path: {json}."""
    body = json_.dumps(finite(data), indent=None if json else 1, allow_nan=False)
    if html is not None and page is not None:
        write(html, page())
    if json:
        print(body)
        return
    path = Path(f"{name}.json")
    write(path, body)
    print(text.replace("{json}", str(path)))
    if html is not None:
        print(f"HTML: {html}")


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all. ConfigError says why it cannot be written."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def finite(value: Any) -> Any:
    """The same with None for numbers that JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def show_plan(plan: Plan, *, json: bool, html: Path | None) -> None:
    """Print a plan; see `show`."""
    from twostroke.plan.page import plan_page

    text = render.text(plan, "{json}")
    show(plan_dict(plan), text, lambda: plan_page(plan), json=json, html=html, name="plan")


def plan_dict(plan: Plan) -> dict[str, Any]:
    """All that a plan found, as plain values."""
    it, demand = plan.question, plan.question.demand
    return {
        "answer": render.answer(plan).splitlines() if plan.options else ["no layout fits"],
        "carries_the_load": bool(plan.options) and plan.carries_the_load,
        "question": {
            "model": it.model,
            "gpu": it.gpu.name,
            "num_gpus": it.num_gpus,
            "workload": it.workload.name,
            "rate_per_s": demand.rate_per_s,
            "prompt_tokens": demand.mean_prompt,
            "output_tokens": demand.mean_output,
            "cached_tokens": demand.mean_cached,
            "ttft_slo_s": it.slo.ttft_s,
            "tpot_slo_s": it.slo.tpot_s,
            "nic_bytes_per_s": it.nic_bytes_per_s,
            "cost_error": it.cost_error,
            **asdict(it.engines),
        },
        "prefill_per_decode": plan.ratio,
        "prefill_per_decode_interval": list(plan.ratio_interval),
        "num_layouts": plan.num_layouts,
        "options": [option_dict(option) for option in plan.options],
        "changes": [asdict(change) for change in plan.changes],
        "notes": plan.notes,
        "left_out": [asdict(item) for item in plan.unfit],
    }


def option_dict(option: Option) -> dict[str, Any]:
    """One layout: what closed forms say, and the twin where it ran."""
    it = option.analysis
    return {
        "layout": option.layout.name,
        "engines": layout_dict(option.layout),
        "num_gpus": option.num_gpus,
        "goodput_per_s": option.goodput_per_s,
        "goodput_per_gpu_s": option.goodput_per_gpu_s,
        "within_slo_per_s": option.within_slo_per_s,
        "closed_form": {
            "rate_per_s": it.rate_per_s,
            "throughput_per_s": asdict(it.throughput_per_s),
            "ttft_s": asdict(it.ttft_s),
            "ttft_parts_s": it.parts_s,
            "tpot_s": asdict(it.tpot_s),
            "constraints": [asdict(constraint) for constraint in it.constraints],
        },
        "twin": None if option.checked is None else asdict(option.checked),
    }


def layout_dict(layout: Layout) -> dict[str, Any]:
    """Engines by role."""
    return {
        role: {
            "count": pool.count,
            "tensor_parallel_size": pool.tensor_parallel_size,
            "kv_tokens": pool.kv_tokens,
            "kv_token_bytes": pool.kv_token_bytes,
        }
        for role in ("prefill", "decode", "both")
        if (pool := getattr(layout, role)) is not None
    }
