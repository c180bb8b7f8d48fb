"""Draw the overlap of the engine's threads from a Chrome trace.

    twostroke serve --trace trace.json        and some requests, then Ctrl-C
    python benchmarks/overlap.py trace.json --out docs/overlap.svg [--json]

Prints what share of the main thread's planning lay inside a step that the worker was running, and
the worker's idle time between steps; draws a few steps from the middle as an SVG.
"""

import argparse
import itertools
import json
from pathlib import Path

from timeline import ROW, Axis, Picture, length, overlap

TRACKS = ("input", "main", "output", "worker")
COLOURS = {"plan": "#2a78b5", "finish": "#5aa469", "wait": "#e8e8e8", "step": "#d9822b"}
LEFT, GAP = 76, 14


def load(path: Path, zero_us: float | None = None) -> dict[str, list[tuple[float, float, str]]]:
    """Spans of the engine by track, in ms since `zero_us` (default: the first one): (start, end,
    name)."""
    everything = json.loads(path.read_text())
    engine = min(
        event["pid"]
        for event in everything
        if event["name"] == "process_name" and event["args"]["name"] == "engine core 0"
    )
    events = [event for event in everything if event["pid"] == engine]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans: dict[str, list[tuple[float, float, str]]] = {track: [] for track in TRACKS}
    if zero_us is None:
        zero_us = min(e["ts"] for e in events if e["ph"] == "X")
    for event in events:
        if event["ph"] == "X":
            start = (event["ts"] - zero_us) / 1e3
            track = names[event["pid"], event["tid"]]
            spans.setdefault(track, []).append((start, start + event["dur"] / 1e3, event["name"]))
    return {track: sorted(found) for track, found in spans.items()}


def figures(spans: dict[str, list[tuple[float, float, str]]]) -> dict[str, float]:
    """Shares and times of the whole trace."""
    steps = [(start, end) for start, end, _ in spans["worker"]]
    planning = [(s, e) for s, e, name in spans["main"] if name.startswith(("plan", "finish"))]
    total, hidden = length(planning), overlap(planning, steps)
    idle = sorted(b[0] - a[1] for a, b in itertools.pairwise(steps))
    lengths = sorted(end - start for start, end in steps)
    return {
        "steps": len(steps),
        "step_ms_median": round(lengths[len(lengths) // 2], 3),
        "planning_hidden_share": round(hidden / total, 3) if total else 0.0,
        "planning_us_per_step": round(1e3 * total / len(steps), 1),
        "worker_idle_us_median": round(1e3 * idle[len(idle) // 2], 1) if idle else 0.0,
    }


def draw(spans: dict[str, list[tuple[float, float, str]]], num_steps: int) -> str:
    """An SVG of `num_steps` steps from the middle of the trace."""
    steps = spans["worker"]
    first = max(0, len(steps) // 2 - num_steps // 2)
    begin, end = steps[first][0], steps[min(first + num_steps, len(steps)) - 1][1]
    picture = Picture()
    axis = Axis(picture, begin, end, LEFT)
    for index, track in enumerate(TRACKS):
        top = 10 + index * (ROW + GAP)
        picture.text(6, top + 21, track)
        for start, stop, name in spans[track]:
            colour = COLOURS.get(name.split()[0], "#8a6fb0")
            ink = "#666" if name.startswith("wait") else "white"
            title = f"{name}: {stop - start:.3f} ms"
            axis.bar((start, stop), top, colour, title, label=name, ink=ink)
    bottom = 10 + len(TRACKS) * (ROW + GAP)
    axis.draw(bottom, [(begin, "0 ms"), (end, f"{end - begin:.1f} ms")])
    return picture.svg(bottom + 30)


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
