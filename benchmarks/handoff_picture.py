"""Draws what `handoff.py` has traced: the life of a request on two engines.

For each mode the whole life, and below it the moments around the hand-off.
"""

from collections.abc import Collection, Mapping
from typing import Protocol

from timeline import Axis, Picture

from twostroke.trace_steps import Trace, TracedInterval, TracedRead, TracedStep

COLOURS = {
    "frontend": "#9aa5b1",
    "held": "#c2557a",
    "queue": "#b8a13a",
    "prefill": "#2a78b5",
    "transfer": "#8a4fb0",
    "decode_queue": "#5aa469",
    "decode": "#d9822b",
    "egress": "#9aa5b1",
}
OTHERS = "#d4d4d4"
LEFT = 108
GAP = 8
TITLE = 26
AXIS = 34
TICKS = 8
ROWS = ("request", "P's steps", "KV on the link", "D's steps")
HEIGHT = 30  # of a row


class Life(Protocol):
    """What is drawn of a request; `reads` and `chunks` are its own."""

    @property
    def intervals(self) -> list[TracedInterval]: ...
    @property
    def chunks(self) -> list[TracedStep]: ...
    @property
    def reads(self) -> list[TracedRead]: ...
    @property
    def last_chunk_s(self) -> float: ...


def draw(drawn: Mapping[str, tuple[Trace, Life]], decodes: int) -> str:
    """An SVG with two panels for each mode; D's steps with more than `decodes` rows run it too."""
    picture = Picture()
    names = {it.name for _, life in drawn.values() for it in life.intervals}
    top = legend(picture, 6.0, names)
    for mode, (trace, life) in drawn.items():
        first, last = life.intervals[0].start_s, life.intervals[-1].end_s
        around = life.last_chunk_s, life.reads[-1].end_s
        margin = max(0.15, 1.5 * (around[1] - around[0]))
        what = f"{mode}: {len(life.chunks)} chunks, "
        what += f"{sum(read.num_bytes for read in life.reads) / 2**20:.0f} MiB"
        top = panel(picture, top, what, trace, life, (first, last), decodes)
        zoom = max(first, around[0] - margin), min(last, around[1] + margin)
        top = panel(picture, top, f"{mode}, around the hand-off", trace, life, zoom, decodes)
    return picture.svg(top)


def legend(picture: Picture, top: float, names: Collection[str]) -> float:
    """Returns where the next thing may begin, like the others."""
    x = float(LEFT)
    shown = [(name, colour) for name, colour in COLOURS.items() if name in names]
    for name, colour in [*shown, ("others decode", OTHERS)]:
        picture.box(x, top, 12, 12, colour)
        picture.text(x + 16, top + 10, name.replace("_", " "))
        x += 30 + 6.2 * len(name)
    return top + 18


def panel(
    picture: Picture,
    top: float,
    title: str,
    trace: Trace,
    life: Life,
    times_s: tuple[float, float],
    decodes: int,
) -> float:
    axis = Axis(picture, *times_s, LEFT)
    picture.text(6, top + 17, title, font_weight="bold")
    top += TITLE
    for row in ROWS:
        picture.text(6, top + HEIGHT / 2 + 4, row)
        if row == "request":
            draw_intervals(axis, top, life)
        elif row == "P's steps":
            draw_chunks(axis, top, life)
        elif row == "KV on the link":
            draw_reads(axis, top, life)
        else:
            draw_decodes(axis, top, trace, life, decodes)
        top += HEIGHT + GAP
    axis.draw(top, ticks(*times_s, life.intervals[0].start_s))
    return top + AXIS


def draw_intervals(axis: Axis, top: float, life: Life) -> None:
    for it in life.intervals:
        name = it.name.replace("_", " ")
        text = f"{name} {1e3 * (it.end_s - it.start_s):.0f} ms"
        bar(axis, (it.start_s, it.end_s), top, COLOURS.get(it.name, OTHERS), text, name)


def draw_chunks(axis: Axis, top: float, life: Life) -> None:
    for number, step in enumerate(life.chunks, start=1):
        text = f"chunk {number}: {step.sample.num_tokens} tokens"
        title = f"{text}, {1e3 * step.sample.seconds:.0f} ms"
        bar(axis, (step.start_s, step.end_s), top, COLOURS["prefill"], text, str(number), title)


def draw_reads(axis: Axis, top: float, life: Life) -> None:
    for number, read in enumerate(life.reads, start=1):
        seconds, mib = read.end_s - read.start_s, read.num_bytes / 2**20
        rate = f"{mib:.0f} MiB, {read.num_bytes / seconds / 1e9:.1f} GB/s"
        title = f"read {number}: {rate}, {1e3 * seconds:.1f} ms"
        bar(axis, (read.start_s, read.end_s), top, COLOURS["transfer"], rate, "", title)


def draw_decodes(axis: Axis, top: float, trace: Trace, life: Life, decodes: int) -> None:
    """Steps before the request is on D, and others' rows, are grey."""
    decoding_s = next(
        (it.start_s for it in life.intervals if it.name == "decode"), life.intervals[-1].end_s
    )
    for step in trace.steps:
        if step.engine == 1:
            own = step.end_s > decoding_s - step.sample.seconds and step.sample.num_rows > decodes
            title = f"{step.sample.num_rows} rows, {1e3 * step.sample.seconds:.1f} ms"
            colour = COLOURS["decode"] if own else OTHERS
            axis.bar(
                (step.start_s, step.end_s),
                top,
                colour,
                title,
                height=HEIGHT,
                least=0.4,
            )


def bar(
    axis: Axis,
    span: tuple[float, float],
    top: float,
    colour: str,
    long: str,
    short: str,
    title: str = "",
) -> None:
    """With the longer label that finds room."""
    width = axis.x(span[1]) - axis.x(span[0])
    label = next((text for text in (long, short) if width > 6.5 * len(text)), "")
    axis.bar(span, top, colour, title or long, label=label, height=HEIGHT)


def ticks(begin: float, end: float, origin: float) -> list[tuple[float, str]]:
    """Round numbers of ms since `origin`."""
    rough = 1e3 * (end - begin) / TICKS
    power = 10 ** (len(str(int(rough))) - 1) if rough >= 1 else 1
    step = next(power * nice for nice in (1, 2, 5, 10) if power * nice >= rough)
    first = -(-int(1e3 * (begin - origin)) // step) * step
    numbers = range(int(first), int(1e3 * (end - origin)) + 1, int(step))
    return [(origin + number / 1e3, f"{number:,} ms") for number in numbers]
