"""Draw the overlap of the engine's threads from a Chrome trace.

    twostroke serve --trace trace.json        and some requests, then Ctrl-C
    python benchmarks/overlap.py trace.json --out docs/overlap.svg [--json]

Prints what share of the main thread's planning lay inside a step that the worker was running, and
the worker's idle time between steps; draws a few steps from the middle as an SVG.
"""

import argparse
import itertools
import json
from html import escape
from pathlib import Path

TRACKS = ("input", "main", "output", "worker")
COLOURS = {"plan": "#2a78b5", "finish": "#5aa469", "wait": "#e8e8e8", "step": "#d9822b"}
WIDTH, LEFT, ROW, GAP = 960, 76, 34, 14


def load(path: Path) -> dict[str, list[tuple[float, float, str]]]:
    """Spans by track, in ms since the first one: (start, end, name)."""
    events = json.loads(path.read_text())
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans: dict[str, list[tuple[float, float, str]]] = {track: [] for track in TRACKS}
    first = min(e["ts"] for e in events if e["ph"] == "X")
    for event in events:
        if event["ph"] == "X":
            start = (event["ts"] - first) / 1e3
            track = names[event["pid"], event["tid"]]
            spans[track].append((start, start + event["dur"] / 1e3, event["name"]))
    return {track: sorted(found) for track, found in spans.items()}


def figures(spans: dict[str, list[tuple[float, float, str]]]) -> dict[str, float]:
    """Shares and times of the whole trace."""
    steps = [(start, end) for start, end, _ in spans["worker"]]
    planning = [(s, e) for s, e, name in spans["main"] if name.startswith(("plan", "finish"))]
    total = sum(end - start for start, end in planning)
    hidden = sum(
        max(0.0, min(end, step_end) - max(start, step_start))
        for start, end in planning
        for step_start, step_end in steps
        if step_start < end and start < step_end
    )
    idle = sorted(b[0] - a[1] for a, b in itertools.pairwise(steps))
    length = sorted(end - start for start, end in steps)
    return {
        "steps": len(steps),
        "step_ms_median": round(length[len(length) // 2], 3),
        "planning_hidden_share": round(hidden / total, 3) if total else 0.0,
        "planning_us_per_step": round(1e3 * total / len(steps), 1),
        "worker_idle_us_median": round(1e3 * idle[len(idle) // 2], 1) if idle else 0.0,
    }


def draw(spans: dict[str, list[tuple[float, float, str]]], num_steps: int) -> str:
    """An SVG of `num_steps` steps from the middle of the trace."""
    steps = spans["worker"]
    first = max(0, len(steps) // 2 - num_steps // 2)
    begin, end = steps[first][0], steps[min(first + num_steps, len(steps)) - 1][1]
    scale = (WIDTH - LEFT - 10) / (end - begin)
    height = len(TRACKS) * (ROW + GAP) + 40
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for index, track in enumerate(TRACKS):
        top = 10 + index * (ROW + GAP)
        out.append(f'<text x="6" y="{top + 21}" fill="#333">{track}</text>')
        for start, stop, name in spans[track]:
            if stop < begin or start > end:
                continue
            left = LEFT + (max(start, begin) - begin) * scale
            width = max(1.5, (min(stop, end) - max(start, begin)) * scale)
            colour = COLOURS.get(name.split()[0], "#8a6fb0")
            title = escape(f"{name}: {stop - start:.3f} ms")
            out.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{ROW}" '
                f'fill="{colour}" stroke="white"><title>{title}</title></rect>'
            )
            if width > 6.5 * len(name):
                ink = "#666" if name.startswith("wait") else "white"
                out.append(f'<text x="{left + 5:.1f}" y="{top + 21}" fill="{ink}">{name}</text>')
    axis = 10 + len(TRACKS) * (ROW + GAP)
    out.append(f'<line x1="{LEFT}" y1="{axis}" x2="{WIDTH - 10}" y2="{axis}" stroke="#999"/>')
    out.append(f'<text x="{LEFT}" y="{axis + 16}" fill="#333">0 ms</text>')
    out.append(
        f'<text x="{WIDTH - 10}" y="{axis + 16}" fill="#333" text-anchor="end">'
        f"{end - begin:.1f} ms</text></svg>"
    )
    return "\n".join(out) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--out", type=Path, help="write the picture to this SVG file")
    parser.add_argument("--steps", type=int, default=4, help="steps to draw")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    arguments = parser.parse_args()
    spans = load(arguments.trace)
    found = figures(spans)
    for name, value in found.items():
        print(f"{name:<24} {value}")
    if arguments.out:
        arguments.out.write_text(draw(spans, arguments.steps))
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
