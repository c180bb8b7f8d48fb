"""Finds the layout: closed forms over all of them, then the twin on the best.

    question ─▶ layouts that fit ─▶ capacity within the SLO, each ─▶ the best few ─▶ twin ─▶ Plan
                     │                 (closed forms, < 1 ms)                         goodput
                     └▶ those that do not, with the reason

Goodput is the rate of requests that stay within both bounds. A layout carries a load when
ATTAINMENT of its requests do.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from twostroke.advice import closed_form as forms
from twostroke.arrays import quantiles
from twostroke.plan.analysis import STABLE, WAITS, Analysis, analyse
from twostroke.plan.candidates import Unfit, layouts, link_of, size_engines
from twostroke.plan.check import Checked, check
from twostroke.plan.layout import Layout
from twostroke.plan.question import Question

CHECKED = 6  # of the best, by closed forms, that the twin runs
RESAMPLES = 100
TAIL = 1.3  # an exponential wait is below 2.3 times its mean in 90 % of cases


@dataclass(frozen=True, kw_only=True)
class Option:
    """A layout with what closed forms say of it, and the twin where it was asked.

    `within_slo_per_s` is the largest rate at which both bounds hold; `analysis` is at the rate
    asked for, or at that one when it is less. The twin ran at that rate, or at less.
    """

    layout: Layout
    analysis: Analysis
    within_slo_per_s: float
    tpot_within_s: float  # at that rate
    checked: Checked | None = None

    @property
    def num_gpus(self) -> int:
        return self.layout.num_gpus

    @property
    def is_disaggregated(self) -> bool:
        return self.layout.prefill is not None

    @property
    def goodput_per_s(self) -> float:
        """By the twin where it ran, else by closed forms."""
        if self.checked is not None:
            return self.checked.goodput_per_s
        return min(self.within_slo_per_s, self.analysis.rate_per_s)

    @property
    def goodput_per_gpu_s(self) -> float:
        return self.goodput_per_s / self.num_gpus


@dataclass(frozen=True, kw_only=True)
class Change:
    """What one knob would do to the best layout."""

    knob: str
    num_gpus: int
    within_slo_per_s: float
    binding: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer. `options` are sorted, best first; only the first have been checked."""

    question: Question
    options: list[Option]
    unfit: list[Unfit]
    notes: list[str]
    num_layouts: int
    ratio_interval: tuple[float, float]  # P per D that balances, 5 % to 95 %
    ratio: float
    changes: list[Change]

    @property
    def best(self) -> Option:
        return self.options[0]

    @property
    def carries_the_load(self) -> bool:
        """Whether the best one meets the SLO at the rate asked for."""
        rate = self.question.demand.rate_per_s
        checked = self.best.checked
        if checked is not None:
            return checked.is_attained and checked.rate_per_s >= 0.99 * min(rate, 1e12)
        return self.best.within_slo_per_s >= rate


Progress = Callable[[str, float], None]
CLOSED_SHARE = 0.15  # of the time of a search, about


def search(
    question: Question, *, progress: Progress = lambda label, share: None, checks: int = CHECKED
) -> Plan:
    """The plan. `progress` is told what is under way and its share done, 0 to 1."""
    sized = size_engines(question)
    found: list[Option] = []
    unfit = list(sized.unfit)
    candidates = layouts(question, sized)
    for index, layout in enumerate(candidates):
        option = _option(question, layout)
        if option.within_slo_per_s > 0:
            found.append(option)
        else:
            unfit.append(Unfit(layout.name, _why_never(question, option)))
        if index % 20 == 0:
            progress("closed forms", index / len(candidates) * CLOSED_SHARE)
    found.sort(key=lambda it: _merit(question, it))
    options = _checked(question, found, checks, progress)
    progress("done", 1.0)
    ratio, interval = (math.nan, (math.nan, math.nan))
    reference = next((it for it in options if it.is_disaggregated), None)
    if reference is not None:
        ratio, interval = ratio_interval(question, reference.layout)
    return Plan(
        question=question,
        options=options,
        unfit=unfit,
        notes=sized.notes,
        num_layouts=len(candidates),
        ratio=ratio,
        ratio_interval=interval,
        changes=what_if(question, options[0]) if options else [],
    )


def _option(question: Question, layout: Layout) -> Option:
    demand = question.demand
    within = within_slo_per_s(question, layout)
    rate = min(demand.rate_per_s, within) if within > 0 else demand.rate_per_s
    analysis = analyse_at(question, layout, rate)
    most = analyse_at(question, layout, within, within_slo=False) if within > rate else analysis
    return Option(
        layout=layout,
        analysis=analysis,
        within_slo_per_s=within,
        tpot_within_s=most.tpot_s.value,
    )


def analyse_at(
    question: Question, layout: Layout, rate_per_s: float, *, within_slo: bool = True
) -> Analysis:
    """Closed forms for the question's requests at another rate; `within_slo`: its bound on TPOT is
    a constraint."""
    return analyse(
        layout,
        question.demand.at_rate(rate_per_s),
        link_of(question, layout),
        tpot_slo_s=question.slo.tpot_s if within_slo else math.inf,
        kv_mode=question.engines.kv_mode,
    )


def within_slo_per_s(question: Question, layout: Layout) -> float:
    """The largest rate at which closed forms keep both bounds for ATTAINMENT of the requests."""
    demand, slo = question.demand, question.slo

    def holds(rate: float) -> bool:
        it = analyse_at(question, layout, rate)
        ttft_s = it.ttft_s.value + TAIL * sum(it.parts_s.get(name, 0.0) for name in WAITS)
        return ttft_s <= slo.ttft_s and it.tpot_s.value <= slo.tpot_s

    start = demand.rate_per_s if math.isfinite(demand.rate_per_s) else 1.0
    one = analyse_at(question, layout, start)
    high = STABLE * one.capacity_per_s
    if high <= 0 or holds(high):
        return max(0.0, high)
    low = 0.0
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _rate(question: Question, option: Option) -> float:
    """The rate at which the twin runs a layout."""
    return min(question.demand.rate_per_s, option.within_slo_per_s)


def _merit(question: Question, option: Option) -> tuple[float, ...]:
    """Smaller is better: who carries the load, on fewer GPUs; then goodput per GPU."""
    rate = question.demand.rate_per_s
    carried = option.within_slo_per_s
    checked = option.checked
    if checked is not None and not (checked.is_attained and checked.rate_per_s >= 0.999 * rate):
        carried = min(carried, checked.goodput_per_s)
    if question.num_gpus and not math.isfinite(rate):
        return (-carried / option.num_gpus,)
    if carried >= rate:
        return (0.0, option.num_gpus, -carried)
    return (1.0, -carried, option.num_gpus)


def _checked(
    question: Question, options: list[Option], count: int, progress: Progress
) -> list[Option]:
    """The options with `count` of them run in the twin, those first; each list best first.

    The best of each kind first, so that the twin can compare them; then whoever is best by what
    is known by then, which the twin may have changed.
    """
    rest, checked = list(options), []
    count = min(count, len(options))
    for number in range(count):
        kinds = [it for it in rest if it.is_disaggregated == (number == 0)]
        chosen = kinds[0] if number < 2 and kinds else rest[0]
        label = f"twin, {number + 1} of {count}: {chosen.layout.name}"

        def show(share: float, label: str = label, number: int = number) -> None:
            progress(label, CLOSED_SHARE + (1 - CLOSED_SHARE) * (number + share) / count)

        show(0.0)
        rest.remove(chosen)
        ran = check(question, chosen.layout, _rate(question, chosen), show)
        checked.append(replace(chosen, checked=ran))
    checked.sort(key=lambda it: _merit(question, it))
    return checked + rest


def _why_never(question: Question, option: Option) -> str:
    it, slo = option.analysis, question.slo
    if it.capacity_per_s <= 0:
        return f"{it.binding.name} lets nothing through: {it.binding.detail}"
    slow = analyse_at(question, option.layout, 1e-6, within_slo=False)
    if slow.ttft_s.value > slo.ttft_s:
        return f"TTFT is {slow.ttft_s.value:.2f} s when nothing else runs"
    return f"TPOT is {slow.tpot_s.value * 1e3:.1f} ms when nothing else runs"


# ---------------------------------------------------------------- how sure, and what else


def balance(question: Question, layout: Layout, slower: tuple[float, float] = (1, 1)) -> float:
    """P per D at which both carry the same, with step times so many times as long on either."""
    it = analyse(layout, question.demand, None, tpot_slo_s=question.slo.tpot_s)
    return _balance_of(it, layout, slower)


def _balance_of(it: Analysis, layout: Layout, slower: tuple[float, float]) -> float:
    assert layout.prefill is not None
    assert layout.decode is not None
    prefill = min(c.capacity_per_s for c in it.constraints if c.name == "prefill compute")
    decode = min(c.capacity_per_s for c in it.constraints if c.name.startswith("decode"))
    return forms.prefill_per_decode(
        prefill / layout.prefill.count / slower[0], decode / layout.decode.count / slower[1]
    )


def ratio_interval(question: Question, layout: Layout) -> tuple[float, tuple[float, float]]:
    """The balanced ratio, and where it lies in 90 % of resampled workloads and step times.

    Step times of P and D are off independently, each by a factor whose logarithm is normal with
    the question's `cost_error` as its deviation.
    """
    random = np.random.Generator(np.random.PCG64(question.seed))
    demand = question.demand
    found = []
    for _ in range(RESAMPLES):
        again = analyse(layout, demand.resampled(random), None, tpot_slo_s=question.slo.tpot_s)
        slower = np.exp(question.cost_error * random.standard_normal(2))
        found.append(_balance_of(again, layout, (float(slower[0]), float(slower[1]))))
    low, high = quantiles(np.array(found), [0.05, 0.95])
    return balance(question, layout), (low, high)


def what_if(question: Question, option: Option) -> list[Change]:
    """What each knob alone would change."""
    found = [_change(question, "as it is", option.layout)]
    for knob, layout, asked in _knobs(question, option.layout):
        found.append(_change(asked, knob, layout))
    return found


def _change(question: Question, knob: str, layout: Layout) -> Change:
    option = _option(question, layout)
    return Change(
        knob=knob,
        num_gpus=layout.num_gpus,
        within_slo_per_s=option.within_slo_per_s,
        binding=option.analysis.binding.name,
    )


def _knobs(question: Question, layout: Layout) -> list[tuple[str, Layout, Question]]:
    if layout.both is not None:
        both = layout.both
        return [
            ("one engine more", Layout(both=replace(both, count=both.count + 1)), question),
            (
                "20 % more KV",
                Layout(both=replace(both, kv_tokens=both.kv_tokens * 6 // 5)),
                question,
            ),
            *_other_sizes(question, layout),
        ]
    prefill, decode = layout.prefill, layout.decode
    assert prefill is not None
    assert decode is not None
    faster = replace(question, nic_bytes_per_s=2 * question.nic_bytes_per_s)
    roomy = replace(decode, kv_tokens=decode.kv_tokens * 6 // 5)
    return [
        (
            "one P more",
            replace(layout, prefill=replace(prefill, count=prefill.count + 1)),
            question,
        ),
        ("one D more", replace(layout, decode=replace(decode, count=decode.count + 1)), question),
        ("20 % more KV on D", replace(layout, decode=roomy), question),
        ("a link twice as fast", layout, faster),
        *_other_sizes(question, layout),
    ]


def _other_sizes(question: Question, layout: Layout) -> list[tuple[str, Layout, Question]]:
    """The same GPUs at half and twice the tensor-parallel size, role by role."""
    sized = size_engines(question).engines
    found = []
    for role in ("prefill", "decode", "both"):
        pool = getattr(layout, role)
        if pool is None:
            continue
        for size in (pool.tensor_parallel_size // 2, pool.tensor_parallel_size * 2):
            count = pool.num_gpus // size if size else 0
            if size in sized and count * size == pool.num_gpus:
                other = replace(sized[size], count=count)
                label = {"prefill": "P", "decode": "D", "both": "engines"}[role]
                knob = f"{label} as {count} x TP{size}"
                found.append((knob, replace(layout, **{role: other}), question))
    return found
