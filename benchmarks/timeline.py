"""Spans of time: what they have in common, and a picture of them as an SVG.

A span is (start, end), in any unit; a picture has rows of spans over one or several time axes.
"""

from collections.abc import Iterable
from html import escape

Span = tuple[float, float]

WIDTH = 960
RIGHT = 10  # margin
ROW = 34  # usual height of a row
EDGED = 6  # wider boxes have an edge


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same times as spans that do not touch, in order."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def length(spans: Iterable[Span]) -> float:
    """Total time in which there is a span."""
    return sum(end - start for start, end in merged(spans))


def overlap(some: Iterable[Span], others: Iterable[Span]) -> float:
    """Total time in which there are spans of both kinds."""
    left, right = merged(some), merged(others)
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


class Picture:
    """Collects an SVG of a fixed width; whoever draws keeps count of the height."""

    def __init__(self) -> None:
        self._out: list[str] = []

    def text(self, x: float, y: float, text: str, ink: str = "#333", **style: str) -> None:
        """`style` are attributes of SVG, with _ for -."""
        more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
        self._out.append(f'<text x="{x:.1f}" y="{y:.1f}" fill="{ink}"{more}>{escape(text)}</text>')

    def box(
        self, x: float, y: float, width: float, height: float, colour: str, title: str = ""
    ) -> None:
        """A box without an edge where it is too narrow for one."""
        edge = ' stroke="white"' if width > EDGED else ""
        hint = f"<title>{escape(title)}</title>" if title else ""
        self._out.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{colour}"{edge}>{hint}</rect>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, ink: str = "#999") -> None:
        self._out.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{ink}"/>'
        )

    def svg(self, height: float) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
            f'font-family="sans-serif" font-size="11">\n'
            f'<rect width="{WIDTH}" height="{height:.0f}" fill="white"/>'
        )
        return "\n".join([head, *self._out, "</svg>"]) + "\n"


class Axis:
    """Times from `begin` to `end` across a picture, right of its labels."""

    def __init__(self, picture: Picture, begin: float, end: float, left: float) -> None:
        self._picture = picture
        self.begin, self.end, self._left = begin, end, left
        self._scale = (WIDTH - left - RIGHT) / (end - begin)

    def x(self, time: float) -> float:
        """Where `time` is, or the nearer end of the axis."""
        return self._left + (min(max(time, self.begin), self.end) - self.begin) * self._scale

    def bar(
        self,
        span: Span,
        top: float,
        colour: str,
        title: str,
        *,
        label: str = "",
        ink: str = "white",
        height: float = ROW,
        least: float = 1.5,
    ) -> None:
        """Draw what lies within the axis, at least so wide, and the label where it finds room."""
        start, end = span
        if end < self.begin or start > self.end:
            return
        left = self.x(start)
        width = max(least, self.x(end) - left)
        self._picture.box(left, top, width, height, colour, title)
        if label and width > 6.5 * len(label):
            self._picture.text(left + 4, top + height / 2 + 4, label, ink)

    def draw(self, y: float, ticks: Iterable[tuple[float, str]]) -> None:
        """The axis itself; `ticks` are times and what is written below them."""
        self._picture.line(self._left, y, WIDTH - RIGHT, y)
        for time, text in ticks:
            x = self.x(time)
            anchor = "start" if x < self._left + 20 else "end" if x > WIDTH - 40 else "middle"
            self._picture.line(x, y, x, y + 4)
            self._picture.text(x, y + 16, text, text_anchor=anchor)
