"""What `bench transfer` prints and draws: the answer, the table behind it, a plot in SVG."""

import math
from collections.abc import Callable, Sequence
from html import escape

from twostroke.bench.report import table
from twostroke.bench.transfer import PEAK_SHARE, Fit, Result, Sample

_TYPICAL_BYTES = 384 << 10  # 16 tokens of a 30B mixture of experts on one of eight ranks
_HEADERS = (
    "block",
    "message",
    "threads",
    "",
    "messages",
    "GB/s",
    "best",
    "of peak",
    "CPU s/GB",
)


def text_of(result: Result) -> str:
    """The answer in a sentence or two, then how it was fitted, then the table."""
    lines = [answer(result), ""]
    lines += [_formula(fit) for fit in result.fits]
    if result.fits:
        lines.append("")
    rows = [_row(result, sample) for sample in _full(result)]
    lines.append(table(_HEADERS, rows))
    threads, rate = next(iter(result.reference.bytes_per_s.items()))
    lines.append(
        f"peak: {result.reference.name} at {rate / 1e9:.2f} GB/s"
        + (f" with {_count(threads, 'thread')}" if result.reference.name == "memcpy" else "")
        + "; GB/s is the median, best the fastest, as is T"
    )
    return "\n".join(lines)


def answer(result: Result) -> str:
    """For example: shm reads 384 KiB blocks at 6.31 GB/s, 84 % of memcpy."""
    samples = _full(result)
    shown = min(samples, key=lambda s: abs(math.log(s.case.block_bytes / _TYPICAL_BYTES)))
    merged = ""
    if shown.case.message_bytes > shown.case.block_bytes:
        merged = f", merged to {_size(shown.case.message_bytes)},"
    what = f"{shown.case.direction}s {_size(shown.case.block_bytes)} blocks{merged}"
    share = f"{100 * _share(result, shown):.0f} % of {result.reference.name}"
    text = f"{result.transport} {what} at {shown.bytes_per_s / 1e9:.2f} GB/s, {share}"
    fit = next(
        (
            fit
            for fit in result.fits
            if (fit.direction, fit.threads) == (shown.case.direction, shown.case.threads)
        ),
        None,
    )
    if fit is None:
        return text + ";\ntoo little was moved to say how that depends on the size"
    size = fit.peak_block_bytes
    needed = f"blocks of {_size(size)}" if size >= 64 else "no particular size of block"
    return f"{text};\n{100 * PEAK_SHARE:.0f} % of its own peak needs {needed}"


def _formula(fit: Fit) -> str:
    cost = fit.cost
    parts = (
        f"messages x {cost.message_s * 1e6:.2f} us",
        f"bytes / {cost.bytes_per_s / 1e9:.2f} GB/s",
    )
    both = f"max({parts[0]}, {parts[1]})" if cost.pipelined else f"{parts[0]} + {parts[1]}"
    return (
        f"{fit.direction}, {_count(fit.threads, 'thread')}: T = {cost.base_s * 1e6:.0f} us + {both}"
        f"\n    error: {fit.error}"
    )


def _row(result: Result, sample: Sample) -> tuple[str, ...]:
    case = sample.case
    return (
        _size(case.block_bytes),
        _size(case.message_bytes),
        str(case.threads),
        case.direction,
        f"{sample.num_messages:,}",
        f"{sample.bytes_per_s / 1e9:.2f}",
        f"{sample.best_bytes_per_s / 1e9:.2f}",
        f"{100 * _share(result, sample):.0f} %",
        f"{sample.cpu_s_per_gb:.2f}",
    )


def _full(result: Result) -> list[Sample]:
    """One sample a case: that of the whole total."""
    largest: dict[object, Sample] = {}
    for sample in result.samples:
        known = largest.setdefault(sample.case, sample)
        if sample.num_bytes > known.num_bytes:
            largest[sample.case] = sample
    return list(largest.values())


def _share(result: Result, sample: Sample) -> float:
    return sample.bytes_per_s / result.reference.bytes_per_s[sample.case.threads]


def _size(num_bytes: float) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


# ---------------------------------------------------------------- the plot

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 420, 64, 190, 44, 48
_Place = Callable[[float, float], tuple[float, float]]  # of a size and a rate in the picture
_COLOURS = ("#2f6fb0", "#c8502d", "#3a8f5c", "#8a5aa8", "#b08a1e", "#4f5b66")


def svg_of(results: Sequence[Result]) -> str:
    """GB/s by size of a message: dots are measured, lines fitted, the dashed one is the peak."""
    groups: dict[str, list[Sample]] = {}
    fits: dict[str, Fit] = {}
    for result in results:
        for sample in _full(result):
            label = f"{result.transport} {sample.case.direction}"
            if len(result.reference.bytes_per_s) > 1:
                label += f", {_count(sample.case.threads, 'thread')}"
            groups.setdefault(label, []).append(sample)
            for fit in result.fits:
                if (fit.direction, fit.threads) == (sample.case.direction, sample.case.threads):
                    fits[label] = fit
    every = [sample for samples in groups.values() for sample in samples]
    peak = max(max(result.reference.bytes_per_s.values()) for result in results)
    low = math.log2(min(sample.case.message_bytes for sample in every)) - 0.3
    high = math.log2(max(sample.case.message_bytes for sample in every)) + 0.3
    top = 1.1 * max(peak, *(sample.bytes_per_s for sample in every))

    def at(size: float, rate: float) -> tuple[float, float]:
        across = (math.log2(size) - low) / (high - low)
        return (
            _LEFT + across * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - rate / top * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = _axes(at, low, high, top)
    parts.append(_line([at(2**low, peak), at(2**high, peak)], "#888", dashed=True))
    parts.append(
        _text(_WIDTH - _RIGHT + 8, at(2**high, peak)[1] + 4, results[0].reference.name, "#666")
    )
    for index, (label, samples) in enumerate(groups.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        y = _TOP + 60 + 20 * index
        parts.append(f'<circle cx="{_WIDTH - _RIGHT + 14}" cy="{y}" r="4" fill="{colour}"/>')
        parts.append(_text(_WIDTH - _RIGHT + 24, y + 4, label))
        if label in fits:
            parts.append(_curve(at, fits[label], samples[0].num_bytes, low, high, colour))
        for sample in samples:
            x, y_dot = at(sample.case.message_bytes, sample.bytes_per_s)
            parts.append(f'<circle cx="{x:.1f}" cy="{y_dot:.1f}" r="4" fill="{colour}"/>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def _curve(at: _Place, fit: Fit, total: int, low: float, high: float, colour: str) -> str:
    """The rate that the fit predicts for a transfer of `total` bytes."""
    points = []
    for step in range(61):
        size = 2 ** (low + (high - low) * step / 60)
        points.append(at(size, total / fit.cost.transfer_s(max(1, round(total / size)), total)))
    return _line(points, colour)


def _axes(at: _Place, low: float, high: float, top: float) -> list[str]:
    parts = [_text(_LEFT, 24, "scattered blocks: GB/s by size of a message", weight="bold")]
    for power in range(math.ceil(low), math.floor(high) + 1):
        x, y = at(2**power, 0)
        parts.append(_line([(x, y), (x, _TOP)], "#eee"))
        parts.append(_text(x, y + 18, _size(2**power), anchor="middle"))
    step = 10 ** math.floor(math.log10(top))
    step /= next(divisor for divisor in (1, 2, 5, 10) if top / step * divisor >= 4)
    for number in range(int(top / step) + 1):
        x, y = at(2**low, number * step)
        parts.append(_line([(x, y), (_WIDTH - _RIGHT, y)], "#eee" if number else "#444"))
        parts.append(_text(x - 8, y + 4, f"{number * step / 1e9:.3g}", anchor="end"))
    return parts


def _line(points: Sequence[tuple[float, float]], colour: str, *, dashed: bool = False) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}"{dash}/>'


def _text(
    x: float, y: float, text: str, colour: str = "#222", *, anchor: str = "start", weight: str = ""
) -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{bold}>'
        f"{escape(text)}</text>"
    )
