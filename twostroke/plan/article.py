"""A worked case: a 30B mixture of experts on H100, one P and one D, prompts of 8k at 65 a second.

48 layers, 4 KV heads of 128, TP8, 54 GiB of KV on each GPU, batches of up to 64k tokens, 325
requests with answers of 1k. What fits, where the flow stalls, which ratio carries the load, and a
map of when transfers and decoding overlap.

    overlap = (T_link + T_decode - T) / min(T_link, T_decode), within 0 and 1

T is the time from the first arrival to the last token; T_link how long the bytes of all KV take on
the link alone; T_decode is T with a link that takes no time. 1: the shorter of the two is wholly
hidden behind the longer; 0: one after the other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from twostroke.advice import closed_form as forms
from twostroke.bench.report import table
from twostroke.cost import BandwidthCurve
from twostroke.kv.sizing import KvLayout
from twostroke.ledger import Interval
from twostroke.plan.analysis import Analysis, analyse
from twostroke.plan.candidates import kv_layout, link_of
from twostroke.plan.check import scenario_of
from twostroke.plan.layout import Layout, Pool
from twostroke.plan.question import TRANSFER_BASE_S, Engines, Question, Slo
from twostroke.plan.search import ratio_interval
from twostroke.router.jobs import DispatchSettings
from twostroke.twin.hardware import find_gpu
from twostroke.twin.models import find_shape
from twostroke.twin.roofline import Parallel, Roofline
from twostroke.twin.scenario import Result, simulate
from twostroke.twin.transfers import Link
from twostroke.twin.workload import load

GIB = 1 << 30
KV_BYTES = 54 * GIB  # of a GPU
TP = 8
PROMPT, OUTPUT, COUNT, RATE = 8192, 1024, 325, 65.0
BUDGET = 65_536

MAP_KV_GIB = (0.25, 1.0, 6.0, 18.0, 54.0)
MAP_LINKS = (4e9, 16e9, 50e9, 100e9, 400e9)
NO_TIME = 1e15  # bytes/s
# A slow link takes longer than a hand-off may: here nothing is given up and computed again.
PATIENT = DispatchSettings(handoff_timeout_s=1e5, lease_s=1e5)
SERIAL, OVERLAPPED = 0.5, 0.9

Progress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of the map. Times in seconds; `slots`: requests of prompt and answer that D holds."""

    kv_gib: float
    link_bytes_per_s: float
    slots: int
    total_s: float
    link_s: float
    decode_s: float

    @property
    def overlap(self) -> float:
        """See the module."""
        hidden = self.link_s + self.decode_s - self.total_s
        return min(1.0, max(0.0, hidden / min(self.link_s, self.decode_s)))


@dataclass(frozen=True, kw_only=True)
class Study:
    """The answer to the article's case."""

    layout: KvLayout
    one: Analysis
    stall: Result
    ratio: float
    interval: tuple[float, float]
    advised: tuple[int, int]
    advised_analysis: Analysis
    advised_run: Result
    cells: list[Cell]

    @property
    def text(self) -> str:
        return _text(self)

    def page(self) -> str:
        """The same with the map as a figure."""
        from twostroke.plan.page import overlap_map, page

        return page("30B MoE, 8k in, 1k out, 65/s", _text(self), [overlap_map(self.cells)])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "token_bytes_per_rank": self.layout.token_bytes,
            "block_bytes_per_rank": self.layout.block_bytes,
            "prompts_in_kv": prompts_in_kv(self.layout, 0),
            "requests_in_kv": prompts_in_kv(self.layout, OUTPUT),
            "prompts_per_batch": BUDGET // PROMPT,
            "constraints_1p1d": [asdict(it) for it in self.one.constraints],
            "makespan_s": self.stall.duration_s,
            "intervals_s": _intervals(self.stall),
            "prefill_per_decode": self.ratio,
            "prefill_per_decode_interval": list(self.interval),
            "advised": list(self.advised),
            "advised_makespan_s": self.advised_run.duration_s,
            "advised_constraints": [asdict(it) for it in self.advised_analysis.constraints],
            "map": [asdict(it) | {"overlap": it.overlap} for it in self.cells],
        }


def prompts_in_kv(layout: KvLayout, output_tokens: int) -> int:
    """Requests that 54 GiB on each GPU hold at once."""
    return layout.blocks_in(KV_BYTES) // layout.blocks_for(PROMPT + output_tokens)


def question(count: int = COUNT) -> Question:
    """The article's case."""
    gpu = find_gpu("H100")
    assert gpu.nic_bytes_per_s is not None
    return Question(
        model="Qwen3-30B-A3B",
        shape=find_shape("qwen3-30b-a3b"),
        gpu=gpu,
        workload=load(f"poisson:{RATE:g}/s,in={PROMPT},out={OUTPUT},n={count}"),
        slo=Slo(),
        nic_bytes_per_s=gpu.nic_bytes_per_s,
        engines=Engines(max_num_seqs=512, max_num_batched_tokens=BUDGET),
    )


def engines(asked: Question, count: int, kv_bytes: float = KV_BYTES) -> Pool:
    """So many engines of TP8 with so much KV on each GPU."""
    layout = kv_layout(asked, TP)
    cost = Roofline(asked.shape, asked.gpu, Parallel(tensor_parallel_size=TP))
    return Pool(
        count=count,
        tensor_parallel_size=TP,
        kv_tokens=layout.blocks_in(int(kv_bytes)) * layout.block_size,
        kv_token_bytes=layout.token_bytes * TP,
        max_num_seqs=asked.engines.max_num_seqs,
        max_num_batched_tokens=BUDGET,
        cost=cost,
    )


def run(
    progress: Progress = lambda label, share: None,
    *,
    kv_gib: Sequence[float] = MAP_KV_GIB,
    links: Sequence[float] = MAP_LINKS,
    count: int = COUNT,
) -> Study:
    """Answer it: closed forms, one run of 1P:1D, and the map."""
    asked = question(count)
    pair = Layout(prefill=engines(asked, 1), decode=engines(asked, 1))
    one = analyse(pair, asked.demand.at_rate(RATE), link_of(asked, pair))
    progress("twin: 1P:1D", 0.0)
    stall = simulate(replace(scenario_of(asked, pair, asked.workload), record_timelines=True))
    ratio, interval = ratio_interval(asked, pair)
    advised = smallest_that_carries(asked)
    large = Layout(prefill=engines(asked, advised[0]), decode=engines(asked, advised[1]))
    progress(f"twin: {advised[0]}P:{advised[1]}D", 0.0)
    return Study(
        layout=kv_layout(asked, TP),
        one=one,
        stall=stall,
        ratio=ratio,
        interval=interval,
        advised=advised,
        advised_analysis=analyse(large, asked.demand.at_rate(RATE), link_of(asked, large)),
        advised_run=simulate(scenario_of(asked, large, asked.workload)),
        cells=overlaps(asked, kv_gib, links, progress),
    )


def smallest_that_carries(asked: Question) -> tuple[int, int]:
    """Fewest P and D of TP8 whose capacities each reach the rate."""
    pair = Layout(prefill=engines(asked, 1), decode=engines(asked, 1))
    by_name = {it.name: it.capacity_per_s for it in analyse(pair, asked.demand).constraints}
    decode = min(value for name, value in by_name.items() if name.startswith("decode"))
    return math.ceil(RATE / by_name["prefill compute"]), math.ceil(RATE / decode)


def overlaps(
    asked: Question, kv_gib: Sequence[float], links: Sequence[float], progress: Progress
) -> list[Cell]:
    """The map, row by row: 1P:1D with so much KV on D's GPUs, over such links."""
    cells = []
    total = len(kv_gib) * (len(links) + 1)
    for row, size in enumerate(kv_gib):
        pair = Layout(prefill=engines(asked, 1), decode=engines(asked, 1, size * GIB))
        assert pair.decode is not None
        slots = int(pair.decode.kv_tokens // (PROMPT + OUTPUT))
        decode_s = math.nan
        for column, rate in enumerate((NO_TIME, *links)):
            progress(
                f"map: {size:g} GiB, {rate / 1e9:g} GB/s", (row * (len(links) + 1) + column) / total
            )
            link = Link(bandwidth=BandwidthCurve((0.0,), (rate,)), base_s=TRANSFER_BASE_S)
            scenario = scenario_of(asked, pair, asked.workload)
            result = simulate(replace(scenario, link=link, settings=PATIENT))
            if rate == NO_TIME:
                decode_s = result.duration_s
                continue
            cells.append(
                Cell(
                    kv_gib=size,
                    link_bytes_per_s=rate,
                    slots=slots,
                    total_s=result.duration_s,
                    link_s=len(asked.workload) * PROMPT * pair.decode.kv_token_bytes / rate,
                    decode_s=decode_s,
                )
            )
    return cells


# ---------------------------------------------------------------- for people


def _intervals(result: Result) -> dict[str, float]:
    means = result.intervals_s.mean(axis=0)
    return {it.name.lower(): float(means[it]) for it in Interval if means[it] >= 5e-3}


def _text(study: Study) -> str:
    layout, one, asked = study.layout, study.one, question()
    prefill, decode = study.advised
    answer = study.advised_analysis
    binding, (after, share) = answer.binding, answer.next_constraint
    low, high = study.interval
    decode_now = next(it for it in one.constraints if it.name.startswith("decode"))
    prefill_now = next(it for it in one.constraints if it.name == "prefill compute")
    demand = asked.demand
    moved = RATE * PROMPT * layout.token_bytes
    lines = [
        f"{prefill}P:{decode}D of TP{TP} carries {RATE:g} req/s, up to "
        f"{answer.capacity_per_s:.3g}; bound by {binding.name}; next: {after.name} at {share:.0%}",
        f"1P:1D carries {one.capacity_per_s:.3g} req/s; bound by {one.binding.name}; balanced at "
        f"{study.ratio:.2f} P per D (90 %: {low:.2f} to {high:.2f})",
        "",
        f"model     {asked.model}: {layout.num_layers} layers, {layout.num_kv_heads} KV heads of "
        f"{layout.head_dim}, bfloat16",
        f"engines   TP{TP} of {asked.gpu.name}, {KV_BYTES // GIB} GiB of KV a GPU, "
        f"{BUDGET:,} tokens a step",
        f"load      {COUNT} requests at {RATE:g}/s, {PROMPT:,} tokens in, {OUTPUT:,} out; no SLO",
        "",
        f"a token   {layout.token_bytes // 1024} KiB on each rank: {layout.num_kv_heads} heads on "
        f"{TP} ranks are stored {TP // layout.num_kv_heads} times",
        f"a block   {layout.block_bytes // 1024} KiB, of {layout.block_size} tokens, all layers "
        "in one piece",
        f"D holds   {prompts_in_kv(layout, 0)} prompts of 8k, {prompts_in_kv(layout, OUTPUT)} with "
        "their answers",
        f"P takes   {BUDGET // PROMPT} prompts a batch",
        f"traffic   {moved * TP / 1e9:.0f} GB/s as D's ranks read it, {moved * TP / 2e9:.0f} "
        f"without the copies; one network card has {asked.nic_bytes_per_s / 1e9:.0f}",
        "",
        "where the flow stalls (1P:1D, in the twin):",
        *_stall(study, prefill_now.capacity_per_s, decode_now.capacity_per_s),
        "",
        f"what carries it ({prefill}P:{decode}D, in the twin):",
        f"  {_ran(study.advised_run)}",
        "",
        "overlap of transfer and decoding, 1P:1D (# hidden, + partly, . one after the other):",
        _map_table(study.cells),
        "overlap = (T_link + T_decode - T) / min(T_link, T_decode); T: first arrival to last token",
        "T_link: all bytes on the link alone; T_decode: T with a link that takes no time",
        *_lessons(study.cells),
        "  with few requests D's blocks fill or decode; with many some fill while others decode",
        "",
        "to run it:",
        f"  twostroke plan --model {asked.model} --gpu {asked.gpu.name} --max-num-batched-tokens "
        f"{BUDGET} \\",
        f"      --workload {asked.workload.name} --slo tpot=50ms",
        f"  twostroke twin --model {asked.model} --gpu {asked.gpu.name} --prefill {prefill}xTP{TP} "
        f"--decode {decode}xTP{TP} \\",
        f"      --workload {asked.workload.name} --kv-gib {KV_BYTES // GIB} \\",
        f"      --max-num-batched-tokens {BUDGET} --max-num-seqs {asked.engines.max_num_seqs}",
        "",
        f"step times: roofline, within {asked.cost_error:.0%} of measured ones in the median",
        f"decode steps of {demand.decode_context:,.0f} tokens of context; prefix cache empty",
        "",
        "JSON: {json}",
    ]
    return "\n".join(lines)


def _stall(study: Study, prefill_per_s: float, decode_per_s: float) -> list[str]:
    result = study.stall
    decoder = next(engine for engine in result.engines if engine.role == "decode")
    times, usage = decoder.timeline["time_s"], decoder.timeline["kv_usage"]
    full = times[usage >= 0.95]
    spent = _intervals(result)
    shown = ", ".join(f"{name} {value:.1f}" for name, value in spent.items())
    lines = [
        f"  {RATE:g} req/s come, P computes {prefill_per_s:.1f}, D ends {decode_per_s:.1f}: "
        f"both queues grow, D's the longer",
    ]
    if len(full):
        done = int((result.arrival_s + result.e2e_s <= full[0]).sum())
        held = forms.in_flight(prefill_per_s, float(full[0]))
        lines.append(
            f"  D's KV is full from {full[0]:.1f} s to {full[-1]:.1f} s, after some "
            f"{min(held, len(result.e2e_s)):.0f} prompts, {done} of them answered by then"
        )
    lines.append(f"  {result.duration_s:.1f} s in all; a request spends (s): {shown}")
    return lines


def _ran(result: Result) -> str:
    tpot_s, ttft_s = float(np.nanmean(result.tpot_s)), float(np.nanmean(result.ttft_s))
    return (
        f"{result.duration_s:.1f} s in all, the last arrival at {result.arrival_s[-1]:.1f} s; "
        f"TTFT {ttft_s * 1e3:.0f} ms, TPOT {tpot_s * 1e3:.1f} ms on average"
    )


def _lessons(cells: Sequence[Cell]) -> list[str]:
    """From which KV on the two overlap, link by link."""
    found = []
    for link in dict.fromkeys(cell.link_bytes_per_s for cell in cells):
        column = [cell for cell in cells if cell.link_bytes_per_s == link]
        over = [cell for cell in column if cell.overlap >= OVERLAPPED]
        serial = [cell for cell in column if cell.overlap < SERIAL]
        best = max(column, key=lambda cell: cell.overlap)
        said = f"at best {best.overlap:.0%} hidden, with KV for {best.slots} requests"
        if over:
            said = f"hidden with KV for {min(it.slots for it in over)} requests or more"
        if serial:
            said += f"; serial with {' and '.join(str(it.slots) for it in serial)}"
        found.append(f"  {link / 1e9:g} GB/s: {said}")
    return found


def _map_table(cells: Sequence[Cell]) -> str:
    links = list(dict.fromkeys(cell.link_bytes_per_s for cell in cells))
    rows = []
    for size in dict.fromkeys(cell.kv_gib for cell in cells):
        row = [cell for cell in cells if cell.kv_gib == size]
        marks = [f"{cell.overlap:.2f} {_mark(cell.overlap)}" for cell in row]
        rows.append([f"{size:g} GiB a GPU ({row[0].slots} requests)", *marks])
    headers = ["KV on D", *(f"{link / 1e9:g} GB/s" for link in links)]
    return table(headers, rows)


def _mark(overlap: float) -> str:
    if overlap >= OVERLAPPED:
        return "#"
    return "." if overlap < SERIAL else "+"
