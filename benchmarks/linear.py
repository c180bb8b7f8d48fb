"""Linear layers on a CPU: `model.layers.Linear` with its forms of a weight, against F.linear.

    python benchmarks/linear.py [--dtype bfloat16] [--rows 1 4 8 64 1024] [--json]

The shapes are SmolLM2-135M's. Enough copies of each weight are used in turn that they come from
memory, as they do in a decode step; the best of five rounds counts. With bfloat16, up to FEW_ROWS
rows, the weight in 8 and in 4 bits is beside it: where those stop being faster is
`few_rows_quantised.MAX_QUANTISED_ROWS`. W8A8 is `int8_rows`, with the rounding of x.
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from twostroke.bench import report
from twostroke.model import int8_rows
from twostroke.model.few_rows_quantised import can_multiply
from twostroke.model.int8_rows import Int8Rows
from twostroke.model.layers import Linear
from twostroke.model.quantised import quantise

SHAPES = {  # name: (out, in)
    "qkv": (960, 576),
    "o": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "lm_head": (49152, 576),
}
COPIES_BYTES = 50e6  # of one shape's weights together
ROUND_S = 0.05
FEW_ROWS = 16


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
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 6, 8, 64, 1024])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)

    results = []
    with torch.inference_mode():
        for name, (out, width) in SHAPES.items():
            copies = max(1, round(COPIES_BYTES / (out * width * dtype.itemsize)))
            weights = [torch.randn(out, width).to(dtype) for _ in range(copies)]
            forms: dict[str, list[Callable[[torch.Tensor], torch.Tensor]]] = {
                "F.linear": [lambda x, weight=weight: F.linear(x, weight) for weight in weights],
                "Linear": [Linear(weight) for weight in weights],
            }
            if dtype == torch.bfloat16 and int8_rows.can_multiply(out):
                forms["W8A8"] = [Linear(None, None, int8=Int8Rows(it, None)) for it in weights * 2]
            if dtype == torch.bfloat16 and can_multiply(out, width):
                for bits in (8, 4):  # as many again, for they are smaller
                    few = [Linear(None, None, quantise(it, bits)) for it in weights * (16 // bits)]
                    forms[f"{bits} bits"] = few
            for rows in options.rows:
                x = torch.randn(rows, width).to(dtype)
                times = {
                    form: best_us(layers, x)
                    for form, layers in forms.items()
                    if rows <= FEW_ROWS or not form.endswith("bits")
                }
                results.append({"layer": name, "rows": rows, "us": times})
    print(f"{options.dtype}, {torch.get_num_threads()} threads; microseconds a call")
    heads = list(results[0]["us"])
    cells = [
        [
            result["layer"],
            str(result["rows"]),
            *(f"{result['us'][form]:.0f}" if form in result["us"] else "-" for form in heads),
        ]
        for result in results
    ]
    print(report.table(["layer", "rows", *heads], cells))
    if options.json:
        print(report.json_line({"dtype": options.dtype, "results": results}))


if __name__ == "__main__":
    main()
