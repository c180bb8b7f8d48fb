"""Time to load a model's weights, by stage.

    python benchmarks/load.py [MODEL] [--dtype bfloat16] [--runs 3] [--json]

MODEL is a directory, a .gguf file or a Hugging Face id; without one the embedded default is loaded.
The medians of the runs count; the file is in the page cache after the first.
"""

import argparse
import statistics
import time

import torch

from twostroke.bench import report
from twostroke.checkpoint import open_checkpoint, resolve
from twostroke.config import EngineConfig
from twostroke.model.registry import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    path = resolve(EngineConfig(model=options.model)).path
    dtype = getattr(torch, options.dtype)
    opening, loading, weight_bytes = [], [], 0
    for _ in range(options.runs):
        start_s = time.perf_counter()
        checkpoint = open_checkpoint(path)
        opened_s = time.perf_counter()
        model = load_model(checkpoint, dtype=dtype, device=torch.device("cpu"))
        loading.append(time.perf_counter() - opened_s)
        opening.append(opened_s - start_s)
        weight_bytes = model.weight_bytes
        del model
    open_s, load_s = statistics.median(opening), statistics.median(loading)
    print(f"{checkpoint.served_name}, {options.dtype}, {torch.get_num_threads()} threads")
    rows = [
        ["read the header or config", f"{open_s:.3f}", ""],
        ["load the weights", f"{load_s:.3f}", f"{weight_bytes / load_s / 1e9:.2f}"],
    ]
    print(report.table(["stage", "median s", "GB/s"], rows))
    if options.json:
        result = {"open_s": open_s, "load_s": load_s, "weight_bytes": weight_bytes}
        print(report.json_line(result))


if __name__ == "__main__":
    main()
