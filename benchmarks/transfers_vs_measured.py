"""The link model against transfers that were measured: T = base + messages and bytes.

    python benchmarks/transfers_vs_measured.py DIR [--json]

DIR holds kv_transfer_measured.csv (KV of prompts of 128 to 32k tokens, vLLM with Mooncake's
connector) and rdma_block_size.csv (bandwidth by block size); one of them is enough. Each curve is
fitted twice: to all its points, and to every other one, which predicts the rest.
"""

import argparse
import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from twostroke.bench import report
from twostroke.cost import LinkCost
from twostroke.cost_fit import fit_link_cost

GOAL = 0.07

Points = list[tuple[float, float, float]]  # messages, bytes, seconds


def curves(directory: Path) -> Iterator[tuple[str, Points]]:
    """Each measured curve by name."""
    path = directory / "kv_transfer_measured.csv"
    if path.exists():
        with path.open() as file:
            rows = list(csv.DictReader(file))
        # One request after another: the number of messages is not told and grows with the bytes.
        yield (
            rows[0]["system"],
            [(0.0, float(r["kv_bytes"]), float(r["transfer_ms"]) / 1e3) for r in rows],
        )
    path = directory / "rdma_block_size.csv"
    if path.exists():
        with path.open() as file:
            rows = list(csv.DictReader(file))
        for kind in ("write", "read"):
            yield (
                f"{rows[0]['link']} {kind}",
                [
                    point
                    for row in rows
                    for point in _stream(int(row["block_KB"]), float(row[f"{kind}_GBps"]))
                ],
            )


def _stream(block_kib: int, gb_per_s: float) -> Points:
    """Bandwidth is that of a steady stream: ten times as many blocks take ten times as long."""
    return [
        (count, count * block_kib * 1024, count * block_kib * 1024 / (gb_per_s * 1e9))
        for count in (1000.0, 10_000.0)
    ]


def errors(cost: LinkCost, points: Points) -> list[float]:
    return [
        cost.transfer_s(round(messages), round(moved)) / seconds - 1
        for messages, moved, seconds in points
    ]


def fit(points: Points) -> LinkCost:
    cost, _ = fit_link_cost(*zip(*points, strict=True), clean=True)
    return cost


def _held_out(points: Points) -> list[float]:
    """Errors on every other size, from a fit to the rest."""
    sizes = sorted({moved / max(messages, 1.0) for messages, moved, _ in points})
    fitted = [point for point in points if sizes.index(point[1] / max(point[0], 1.0)) % 2 == 0]
    return errors(fit(fitted), [point for point in points if point not in fitted])


def summary(values: Sequence[float]) -> list[str]:
    return [f"{np.median(np.abs(values)):.1%}", f"{max(values, key=abs):+.1%}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    rows, result = [], {}
    for name, points in curves(options.directory):
        cost = fit(points)
        own = errors(cost, points)
        held_out = _held_out(points)
        model = "max" if cost.pipelined else "sum"
        shares = f"{cost.base_s * 1e3:.2f} ms, {cost.message_s * 1e6:.2f} us, "
        shares += f"{cost.bytes_per_s / 1e9:.0f} GB/s, {model}"
        rows.append([name[:36], str(len(points)), shares, *summary(own), *summary(held_out)])
        result[name] = {
            "worst_error": max(map(abs, own)),
            "median_error": float(np.median(np.abs(own))),
            "held_out_median_error": float(np.median(np.abs(held_out))),
        }
    if not rows:
        parser.error(f"{options.directory} holds neither of the two files")
    headers = ["link", "points", "base, a message, rate, model", "median", "worst"]
    print(report.table([*headers, "held out", "worst"], rows))
    within = all(one["worst_error"] <= GOAL for one in result.values())
    print(f"all within {GOAL:.0%}: {'yes' if within else 'no'}")
    if options.json:
        print(report.json_line(result))


if __name__ == "__main__":
    main()
