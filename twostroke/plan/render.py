"""A plan for people: the answer first, then what it assumes, one plot, three rows, the commands.

No line is longer than WIDTH, units are in the headers, and the last line names the JSON file.
"""

import math
import re
import textwrap
from collections.abc import Sequence

from twostroke.bench.report import table
from twostroke.plan.commands import commands
from twostroke.plan.question import ATTAINMENT
from twostroke.plan.room import Room, room_of
from twostroke.plan.search import Option, Plan

WIDTH = 100
PLOT_ROWS, PLOT_COLUMNS = 12, 78
ROWS = 3
UNFIT_ROWS = 4


def text(plan: Plan, json_path: str, *, plot: bool = True) -> str:
    """The whole report; without its plot where there is a better one."""
    if not plan.options:
        parts = ["no layout fits", _assumed(plan), _unfit(plan)]
        return "\n\n".join(part for part in parts if part)
    parts = [
        answer(plan),
        _assumed(plan),
        pareto(plan.options) if plot else "",
        _rows(plan),
        _changes(plan),
        _notes(plan),
        _unfit(plan),
        _commands(plan),
        _error_bar(plan),
        f"JSON: {json_path}",
    ]
    return "\n\n".join(part for part in parts if part)


def answer(plan: Plan) -> str:
    """The first line: which layout, what binds it, what is next, and whether it is enough."""
    best = plan.best
    binding, (after, share) = best.analysis.binding, best.analysis.next_constraint
    said = (
        f"{best.layout.name}; bound by {_on(binding.name)}; next: {_on(after.name)} at {share:.0%}"
    )
    rate = plan.question.demand.rate_per_s
    if not math.isfinite(rate):
        return f"{said}\n{best.within_slo_per_s:.3g} req/s within {plan.question.slo}"
    if plan.carries_the_load:
        most = max(rate, best.within_slo_per_s)
        enough = (
            f"carries {rate:.3g} req/s (up to {most:.3g}) on {best.num_gpus} GPUs within "
            f"{plan.question.slo}"
        )
    else:
        enough = (
            f"does not carry {rate:.3g} req/s within {plan.question.slo}: "
            f"{best.goodput_per_s:.3g} req/s do on {best.num_gpus} GPUs"
        )
    told = f"{enough}; {best.goodput_per_gpu_s:.3g} good req/s per GPU"
    return f"{said}\n{textwrap.fill(told, WIDTH)}"


def _on(name: str) -> str:
    """decode KV on D, prefill compute on P, link."""
    if name.startswith("decode"):
        return f"{name} on D"
    return f"{name} on P" if name == "prefill compute" else name


def _assumed(plan: Plan) -> str:
    it, demand = plan.question, plan.question.demand
    with_ = it.engines
    rate = f"{demand.rate_per_s:.3g} req/s" if math.isfinite(demand.rate_per_s) else "all at once"
    cached = demand.mean_cached
    hits = f" ({cached:,.0f} of them cached)" if cached else ""
    memory = f"{it.gpu.memory_bytes / 2**30:.0f} GiB, {with_.gpu_memory_utilization:.0%} of it used"
    lengths = f"{demand.mean_prompt:,.0f} tokens in{hits}, {demand.mean_output:,.0f} out"
    sizes = f"{with_.max_num_batched_tokens:,} tokens a step, {with_.max_num_seqs} seats"
    lines = [
        f"model     {it.model}, {with_.dtype}, KV in {with_.kv_dtype}",
        f"GPU       {it.gpu.name}, {memory}; network {it.nic_bytes_per_s / 1e9:.3g} GB/s each",
        f"load      {rate}, {lengths} ({it.workload.name})",
        f"SLO       {it.slo}, for {ATTAINMENT:.0%} of requests",
        f"engines   {sizes}, blocks of {with_.block_size} tokens",
    ]
    return "\n".join(line[:WIDTH] for line in lines)


def _rows(plan: Plan) -> str:
    rows = [_row(it) for it in plan.options[:ROWS]]
    headers = [
        "layout",
        "GPUs",
        "good req/s",
        "per GPU",
        "TTFT ms",
        "P99",
        "TPOT ms",
        "P99",
        "bound by",
    ]
    return table(headers, rows)


def _row(it: Option) -> list[str]:
    seen = it.checked
    name = it.analysis.binding.name
    if seen is None:
        times = [_ms(it.analysis.ttft_s.value), "", _ms(it.analysis.tpot_s.value), ""]
    else:
        figures = (seen.ttft_mean_s, seen.ttft_p99_s, seen.tpot_mean_s, seen.tpot_p99_s)
        times = [_ms(value) for value in figures]
    return [
        it.layout.name,
        f"{it.num_gpus}",
        f"{it.goodput_per_s:.3g}",
        f"{it.goodput_per_gpu_s:.3g}",
        *times,
        name,
    ]


def _ms(value_s: float) -> str:
    return f"{value_s * 1e3:.3g}" if math.isfinite(value_s) else "-"


def _changes(plan: Plan) -> str:
    base, *others = plan.changes
    rows = []
    for it in others:
        gain = it.within_slo_per_s / base.within_slo_per_s - 1 if base.within_slo_per_s else 0.0
        per_gpu = (it.within_slo_per_s / it.num_gpus) / (base.within_slo_per_s / base.num_gpus) - 1
        rows.append([it.knob, f"{it.num_gpus}", f"{gain:+.0%}", f"{per_gpu:+.0%}", it.binding])
    if not rows:
        return ""
    headers = ["what one change does (closed forms)", "GPUs", "req/s", "per GPU", "bound by"]
    return table(headers, rows)


def _notes(plan: Plan) -> str:
    sizes = {pool.tensor_parallel_size for pool in plan.best.layout.pools}
    lines = [note for note in plan.notes if any(note.startswith(f"TP{s}:") for s in sizes)]
    if plan.best.is_disaggregated:
        lines += _room(room_of(plan.question, plan.best.layout))
    low, high = plan.ratio_interval
    if math.isfinite(plan.ratio):
        lines.append(
            f"balanced at {plan.ratio:.2f} P per D ({low:.2f} to {high:.2f} in 90 % of resampled "
            f"loads and step times)"
        )
    return "\n".join(lines)


def _room(room: Room) -> list[str]:
    """What KV that is under way takes on D and on P."""
    lines = [
        f"a D's KV holds {room.holds:,} requests, {room.arriving:.1f} of them on their way; P has "
        f"{room.held_share:.0%} of its KV taken by prompts that D is to fetch (limit "
        f"{room.hold_limit:.0%})"
    ]
    if room.staging <= room.arriving:
        lines.append(
            f"vLLM's D keeps no room for KV that arrives: --max-num-seqs {room.advised_seats} there"
        )
    return [part for line in lines for part in textwrap.wrap(line, WIDTH)]


def _unfit(plan: Plan) -> str:
    if not plan.unfit:
        return ""
    shown = [f"  {it.name}: {it.reason}"[:WIDTH] for it in plan.unfit[:UNFIT_ROWS]]
    more = len(plan.unfit) - UNFIT_ROWS
    if more > 0:
        shown.append(f"  and {more} more (all in the JSON)")
    return "\n".join(["left out:", *shown])


def _commands(plan: Plan) -> str:
    lines = ["to run it:"]
    for command in commands(plan.question, plan.best.layout):
        # A flag and its value stay together: their space is one that does not break.
        kept = re.sub(r"(--[a-z-]+) (?=[^-#\s])", "\\1\u00a0", command)
        rows = textwrap.wrap(
            kept,
            WIDTH - 2,
            initial_indent="  ",
            subsequent_indent="      ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += [f"{row} \\" for row in rows[:-1]] + rows[-1:]
    return "\n".join(lines).replace("\u00a0", " ")


def _error_bar(plan: Plan) -> str:
    it = plan.question
    checked = [option for option in plan.options if option.checked is not None]
    source = "fitted" if it.costs else "roofline"
    lines = [f"{plan.num_layouts} layouts by closed forms, {len(checked)} of them run in the twin"]
    lines.append(f"step times: {source}, within {it.cost_error:.0%} of measured ones in the median")
    if plan.best.checked is not None:
        seen, said = plan.best.checked, plan.best.analysis
        if said.tpot_s.applies and seen.tpot_mean_s > 0 and seen.rate_per_s == said.rate_per_s:
            off = said.tpot_s.value / seen.tpot_mean_s - 1
            lines.append(
                f"closed form against twin, TPOT of the best: {off:+.1%} (the twin starts empty)"
            )
    return "\n".join(lines)


def pareto(options: Sequence[Option]) -> str:
    """Speed for one user against requests/s per GPU, each layout at the most that it carries."""
    points = [
        (
            1 / it.tpot_within_s,
            it.within_slo_per_s / it.num_gpus,
            "P" if it.is_disaggregated else "a",
        )
        for it in reversed(options)
        if 0 < it.tpot_within_s < math.inf
    ]
    if not points:
        return ""
    most_x = max(x for x, _, _ in points)
    most_y = max(y for _, y, _ in points)
    grid = [[" "] * PLOT_COLUMNS for _ in range(PLOT_ROWS)]
    for index, (x, y, mark) in enumerate(points):
        column = min(PLOT_COLUMNS - 1, int(x / most_x * (PLOT_COLUMNS - 1)))
        row = PLOT_ROWS - 1 - min(PLOT_ROWS - 1, int(y / most_y * (PLOT_ROWS - 1)))
        grid[row][column] = "*" if index == len(points) - 1 else mark
    lines = [
        "req/s per GPU within the SLO   (* the answer, P prefill and decode apart, a together)"
    ]
    for index, cells in enumerate(grid):
        label = most_y * (PLOT_ROWS - 1 - index) / (PLOT_ROWS - 1)
        lines.append(f"{label:8.3g} |{''.join(cells)}".rstrip())
    lines.append(" " * 9 + "+" + "-" * PLOT_COLUMNS)
    left, right = "0", f"{most_x:.0f}"
    middle = "tokens/s for one user"
    gap = PLOT_COLUMNS - len(left) - len(right) - len(middle)
    lines.append(" " * 10 + left + " " * (gap // 2) + middle + " " * (gap - gap // 2) + right)
    return "\n".join(lines)
