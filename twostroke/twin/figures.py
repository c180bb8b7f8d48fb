"""A result's figures, under the keys of `bench serve`, and its text report."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from twostroke.arrays import quantiles
from twostroke.bench import stats
from twostroke.bench.report import serving_block, table
from twostroke.bench.stats import Result as Figures
from twostroke.ledger import Interval
from twostroke.twin.scenario import Result
from twostroke.twin.waits import Binding, binding_over_time

if TYPE_CHECKING:
    from twostroke.ledger_file import Recorded


def figures_of(
    result: Result, *, goodput: str = "", percentiles: Sequence[float] = (99.0,)
) -> Figures:
    """What `bench serve` would have printed, had it driven this."""
    done = result.done
    ends = result.arrival_s + result.e2e_s
    columns = stats.Columns(
        num_failed=int(len(done) - done.sum()),
        input_tokens=int(result.prompt_tokens[done].sum()),
        output_tokens=int(result.output_tokens[done].sum()),
        ttft_s=result.ttft_s[done],
        tpot_s=result.tpot_s[done],
        e2el_s=result.e2e_s[done],
        has_tpot=(result.output_tokens[done] > 1).tolist(),
        itl_s=result.itl_s,
        itl_counts=result.itl_counts,
        max_output_tokens_per_s=float(result.peak_tokens_per_s),
        max_concurrent_requests=_peak(result.arrival_s[done], ends[done]),
    )
    limits = stats.parse_goodput([goodput]) if goodput else None
    return stats.summarise_columns(
        columns,
        max(result.duration_s, 1e-9),
        percentiles=percentiles,
        goodput_ms=limits,
    )


def _peak(starts: Any, ends: Any) -> int:
    """Most at the same time; one that ends as another starts does not count twice."""
    times = np.concatenate((starts, ends))
    changes = np.repeat([1, -1], [len(starts), len(ends)])
    order = np.lexsort((changes, times))
    return int(np.cumsum(changes[order]).max(initial=0))


def summary(result: Result, figures_of_run: Figures) -> dict[str, Any]:
    """All of it as one JSON object: the figures, then ledger, engines, links and what bound."""
    figures: dict[str, Any] = {"scenario": result.scenario.name}
    figures |= figures_of_run
    done = result.done
    figures["num_devices"] = result.scenario.num_devices
    figures["mean_interval_s"] = {
        interval.name.lower(): float(result.intervals_s[done, interval].mean()) if done.any() else 0
        for interval in Interval
    }
    figures["prefix_hit_share"] = _hit_share(result)
    figures["num_preemptions"] = int(result.num_preemptions.sum())
    figures["engines"] = [
        {
            "name": engine.name,
            "role": engine.role,
            "busy_share": engine.busy_s / result.duration_s if result.duration_s else 0.0,
            "prefill_share": engine.prefill_s / result.duration_s if result.duration_s else 0.0,
            "num_steps": engine.num_steps,
            "num_blocks": engine.num_blocks,
            "num_preemptions": engine.num_preemptions,
            "loaded_bytes": engine.loaded_bytes,
        }
        for engine in result.engines
    ]
    figures["links"] = {
        name: {"bytes": moved, "busy_s": result.link_busy_s[name]}
        for name, moved in result.link_bytes.items()
    }
    figures["binding"] = [msgspec.to_builtins(it) for it in binding_over_time(result)]
    figures["first_error"] = next(iter(result.errors.values()), None)
    figures["simulated_in_s"] = result.wall_s
    return figures


def _hit_share(result: Result) -> float:
    total = int(result.prompt_tokens[result.done].sum())
    return int(result.cached_tokens[result.done].sum()) / total if total else 0.0


def text_report(result: Result, figures: Figures) -> str:
    """vLLM's block, then where the time went, what each engine did, and what bound when."""
    parts = [serving_block(figures), "", ledger_table(result), ""]
    parts += [engine_table(result), "", binding_table(binding_over_time(result))]
    if result.errors:
        index, error = next(iter(result.errors.items()))
        parts += ["", f"{len(result.errors)} failed; request {index}: {error}"]
    steps = sum(engine.num_steps for engine in result.engines)
    parts += [
        "",
        f"simulated {result.duration_s:,.1f} s, {steps:,} steps, in {result.wall_s:.2f} s",
    ]
    return "\n".join(parts)


def ledger_table(result: Result) -> str:
    """Seconds by interval, over the requests that were answered."""
    spent = result.intervals_s[result.done]
    rows = []
    total = float(spent.sum())
    for interval in Interval:
        column = spent[:, interval]
        if not len(column) or not column.any():
            continue
        cells = [column.mean(), *quantiles(column, [0.5, 0.9, 0.99])]
        share = float(column.sum()) / total if total else 0.0
        name = interval.name.lower().replace("_", " ")
        rows.append([name, *(f"{1000 * cell:,.1f}" for cell in cells), f"{share:.1%}"])
    return table(["ledger (ms)", "mean", "P50", "P90", "P99", "share"], rows)


def engine_table(result: Result) -> str:
    """What each engine did."""
    rows = []
    for engine in result.engines:
        timeline, duration_s = engine.timeline, result.duration_s or 1.0
        kv = timeline["kv_usage"]
        rows.append(
            [
                engine.name,
                f"{engine.busy_s / duration_s:.0%}",
                f"{engine.prefill_s / duration_s:.0%}",
                f"{kv.max(initial=0.0):.0%}",
                f"{timeline['running'].max(initial=0.0):.0f}",
                f"{timeline['waiting'].max(initial=0.0):.0f}",
                f"{engine.num_preemptions}",
                f"{engine.loaded_bytes / 1e9:,.1f}",
            ]
        )
    headers = ["engine", "busy", "prefill", "max KV", "run", "wait", "preempted", "loaded GB"]
    return table(headers, rows)


def binding_table(bindings: Sequence[Binding]) -> str:
    """What held requests up, from when to when."""
    rows = [
        [f"{it.start_s:,.1f} - {it.end_s:,.1f}", it.constraint, f"{it.share:.0%}", it.evidence]
        for it in bindings
    ]
    return table(["time (s)", "bound by", "of time", ""], rows)


def recorded(result: Result) -> "list[Recorded]":
    """The run as a recorded ledger, which `--workload` and `diagnose` read."""
    from twostroke.ledger_file import Recorded

    rows = []
    roles = [engine.role for engine in result.engines]
    engines = roles.count("prefill"), roles.count("decode")
    for index in np.flatnonzero(result.done).tolist():
        spent = result.intervals_s[index]
        rows.append(
            Recorded(
                arrival_s=float(result.arrival_s[index]),
                prompt_tokens=int(result.prompt_tokens[index]),
                output_tokens=int(result.output_tokens[index]),
                ttft_s=float(result.ttft_s[index]),
                e2e_s=float(result.e2e_s[index]),
                cached_tokens=int(result.cached_tokens[index]),
                num_preemptions=int(result.num_preemptions[index]),
                intervals={it.name.lower(): float(spent[it]) for it in Interval if spent[it]},
                engines=engines,
            )
        )
    return rows
