"""Linear layers on a CPU: `model.layers.Linear`, which packs its weight, against F.linear.

    python benchmarks/linear.py [--dtype bfloat16] [--rows 1 16 64 1024] [--json]

The shapes are SmolLM2-135M's. Enough copies of each weight are used in turn that they come from
memory, as they do in a decode step; the best of five rounds counts.
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from twostroke.bench import report
from twostroke.model.layers import Linear

SHAPES = {  # name: (out, in)
    "qkv": (960, 576),
    "o": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "lm_head": (49152, 576),
}
COPIES_BYTES = 50e6  # of one shape's weights together
ROUND_S = 0.05


def best_us(layers: list[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor) -> float:
    """Microseconds a call, over rounds of all layers in turn."""
    best = float("inf")
    for _ in range(5):
        calls, start_s = 0, time.perf_counter()
        while (spent_s := time.perf_counter() - start_s) < ROUND_S:
            for layer in layers:
                layer(x)
            calls += len(layers)
        best = min(best, spent_s / calls)
    return best * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 1024])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)

    results = []
    with torch.inference_mode():
        for name, (out, width) in SHAPES.items():
            copies = max(1, round(COPIES_BYTES / (out * width * dtype.itemsize)))
            weights = [torch.randn(out, width).to(dtype) for _ in range(copies)]
            packed = [Linear(weight) for weight in weights]
            plain = [lambda x, weight=weight: F.linear(x, weight) for weight in weights]
            for rows in options.rows:
                x = torch.randn(rows, width).to(dtype)
                times = {"plain_us": best_us(plain, x), "packed_us": best_us(packed, x)}
                results.append({"layer": name, "rows": rows, **times})
    print(f"{options.dtype}, {torch.get_num_threads()} threads")
    cells = [
        [
            result["layer"],
            str(result["rows"]),
            f"{result['plain_us']:.0f}",
            f"{result['packed_us']:.0f}",
            f"{result['plain_us'] / result['packed_us']:.2f}",
        ]
        for result in results
    ]
    print(report.table(["layer", "rows", "F.linear us", "Linear us", "ratio"], cells))
    if options.json:
        print(report.json_line({"dtype": options.dtype, "results": results}))


if __name__ == "__main__":
    main()
