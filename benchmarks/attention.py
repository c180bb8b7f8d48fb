"""Paged attention on this CPU, against what its memory and its arithmetic give.

    python benchmarks/attention.py [--kv-cache-dtype auto|int8|both] [--threads N]
        [--int8-scores] [--torch] [--json]

The ceilings are measured in turns with each case: reading a large array (GB/s), and a large matrix
product in bfloat16 (GFLOP/s), on the same threads. Shapes are SmolLM2-135M's (9 heads, 3 KV heads,
head_dim 64, 30 layers, blocks of 16 scattered over the pool), bfloat16. GB/s counts each key and
value once; GFLOP/s counts only what causality leaves. With KV in int8 half as much is read.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable

import numpy as np
import torch

from twostroke.kv.sizing import KvLayout
from twostroke.model.layers import Linear
from twostroke.worker.attention import PagedAttention, TorchAttention, make_attention
from twostroke.worker.pool import allocate_pool

HEADS, KV_HEADS, HEAD_DIM, LAYERS, BLOCK_SIZE = 9, 3, 64, 30, 16
CASES = {  # name: rows of (num_computed, queries)
    "decode 1 x 320": [(319, 1)],
    "decode 16 x 256": [(255, 1)] * 16,
    "decode 64 x 256": [(255, 1)] * 64,
    "decode 16 x 2048": [(2047, 1)] * 16,
    "decode 1 x 8192": [(8191, 1)],
    "6 on 256": [(256, 6)],
    "6 on 1024": [(1024, 6)],
    "6 on 4096": [(4096, 6)],
    "prefill 1024": [(0, 1024)],
    "prefill 2048": [(0, 2048)],
    "prefill 8 x 256": [(0, 256)] * 8,
    "prefill 512 on 2048": [(2048, 512)],
    "32 decodes + prefill 256": [(319, 1)] * 32 + [(0, 256)],
}


def best_s(*functions: Callable[[], object], budget_s: float = 1.5) -> list[float]:
    """The shortest run of each, in turns, as many as fit into `budget_s` (at least 3).

    Others use this machine: what is compared must have had the same chances.
    """
    times: list[list[float]] = []
    end = time.perf_counter() + budget_s
    while len(times) < 3 or time.perf_counter() < end:
        times.append([])
        for function in functions:
            start = time.perf_counter()
            function()
            times[-1].append(time.perf_counter() - start)
    return [min(column) for column in zip(*times, strict=True)]


def filled_pool(num_blocks: int, layout: KvLayout) -> torch.Tensor:
    dtype = getattr(torch, layout.dtype)
    pool = allocate_pool(num_blocks, layout, dtype, torch.device("cpu"))
    for block in pool:
        if dtype == torch.int8:
            block.random_(-127, 128)
            block[..., HEAD_DIM:] = torch.tensor([0.02]).view(torch.int8)  # of each row
        else:
            block.normal_()
    return pool


def measure(
    rows: list[tuple[int, int]], kernel: Callable[..., PagedAttention], kv_dtype: str
) -> dict[str, float]:
    """Microseconds of a layer and of planning a step, GB/s and GFLOP/s."""
    num_computed, counts = np.array(rows, np.int32).T
    used = -(-(num_computed + counts) // BLOCK_SIZE)
    layout = KvLayout(
        num_layers=LAYERS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=kv_dtype,
        block_size=BLOCK_SIZE,
    )
    pool = filled_pool(int(used.sum()), layout)
    ids = iter(np.random.default_rng(0).permutation(int(used.sum())))
    tables = np.zeros((len(rows), used.max()), np.int32)
    for i, count in enumerate(used):
        tables[i, :count] = [next(ids) for _ in range(count)]
    query_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    fused = torch.randn(query_start[-1], HEADS + 2 * KV_HEADS, HEAD_DIM).to(torch.bfloat16)
    q, k, v = fused.split((HEADS, KV_HEADS, KV_HEADS), dim=1)

    attention = kernel(pool, HEADS, HEAD_DIM**-0.5)

    def step() -> None:
        for layer in range(LAYERS):
            attention(layer, q, k, v)

    (plan_s,) = best_s(lambda: attention.plan(query_start, num_computed, tables), budget_s=0.05)
    array, matrix = torch.ones(1 << 26), torch.randn(1024, 1024).bfloat16()
    product = Linear(torch.randn(1024, 1024).bfloat16())
    step_s, read_s, product_s = best_s(step, array.sum, lambda: product(matrix))
    layer_s = step_s / LAYERS
    contexts = num_computed + counts
    pairs = sum(n * computed + n * (n + 1) / 2 for computed, n in rows)
    return {
        "layer_us": layer_s * 1e6,
        "plan_us": plan_s * 1e6,
        "gb_s": int(contexts.sum()) * layout.token_bytes / LAYERS / layer_s / 1e9,
        "gflop_s": 4 * pairs * HEADS * HEAD_DIM / layer_s / 1e9,
        "read_gb_s": array.nbytes / read_s / 1e9,
        "product_gflop_s": 2 * 1024**3 / product_s / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch takes")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "int8", "both"), default="both")
    parser.add_argument("--int8-scores", action="store_true", help="also scores from 8 bits")
    parser.add_argument("--torch", action="store_true", help="also the plain torch version")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)

    print(f"threads {torch.get_num_threads()}")
    kinds: dict[str, tuple[Callable[..., PagedAttention], str]] = {}
    if arguments.kv_cache_dtype != "int8":
        kinds["bfloat16"] = make_attention, "bfloat16"
    if arguments.kv_cache_dtype != "auto":
        kinds["int8"] = make_attention, "int8"
    if arguments.int8_scores:
        kinds["scores8"] = functools.partial(make_attention, int8_scores=True), "bfloat16"
    if arguments.torch:
        kinds["torch"] = TorchAttention, "bfloat16"
    print(
        f"{'':34}{'us/layer':>10}{'plan us':>9}{'GB/s':>8}{'of read':>9}{'GFLOP/s':>9}{'of it':>9}"
    )
    results: dict[str, dict[str, dict[str, float]]] = {}
    for kind, (kernel, kv_dtype) in kinds.items():
        results[kind] = {}
        for name, rows in CASES.items():
            r = results[kind][name] = measure(rows, kernel, kv_dtype)
            print(
                f"{kind:9} {name:24}{r['layer_us']:10.1f}{r['plan_us']:9.0f}{r['gb_s']:8.1f}"
                f"{r['gb_s'] / r['read_gb_s']:9.0%}{r['gflop_s']:9.1f}"
                f"{r['gflop_s'] / r['product_gflop_s']:9.0%}",
                flush=True,
            )
    if arguments.json:
        print(json.dumps({"threads": torch.get_num_threads(), **results}))


if __name__ == "__main__":
    main()
