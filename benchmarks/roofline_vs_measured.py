"""Step times from first principles against steps that were measured.

    python benchmarks/roofline_vs_measured.py [--aic steps.json] [--splitwise perf_model.csv]
        [--all] [--json]

--aic: what aiconfigurator-core answers for Qwen3-30B-A3B, by GPU and TP size; the shares in
`twin/hardware.py` come from the same tables (of six models). L40S with TP4 and TP8 is left out:
there its tables have prefills that are slower than on one GPU. --splitwise: Llama-2-70B of 2023 (no
CUDA graphs), whose host and kernels are other than today's: `Software` is fitted to its TP8 rows
and checked on TP2 and TP4. --all prints each case, not just the sums.
"""

import argparse
import csv
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from twostroke.bench import report
from twostroke.cost import StepWork
from twostroke.cost_fit import FitError
from twostroke.twin.hardware import find_gpu
from twostroke.twin.models import find_shape
from twostroke.twin.roofline import Parallel, Roofline, Software

# Fitted to the TP8 rows: a single row's decode gives `layer_s`, prefills of 2,048 the kernels'
# share, the decode of 64 rows `row_s`. Their A100 machines have slower hosts than their H100 ones.
SOFTWARE_2023 = {
    "A100": Software(kernel_share=0.80, layer_s=560e-6, row_s=0.42e-3),
    "H100": Software(kernel_share=0.67, layer_s=375e-6, row_s=0.32e-3),
}


class Case(NamedTuple):
    """One measured step, and what is predicted for it, in ms."""

    group: str
    name: str
    measured_ms: float
    predicted_ms: float

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1


def prefill(count: int, tokens: int, prefix: int = 0) -> StepWork:
    computed = count * (tokens - prefix)
    attended = computed * (prefix + (tokens - prefix) / 2)
    return StepWork(computed, count, count, count * prefix, attended)


def decode(rows: int, context: float) -> StepWork:
    return StepWork(rows, rows, rows, rows * context, rows * (context + 0.5))


def aic_cases(path: Path) -> Iterator[Case]:
    """Rows are named as in "8x8192", "1x8192 prefix7168" and by decode batch (context 8.7k)."""
    shape = find_shape("qwen3-30b-a3b")
    for system, tables in json.loads(path.read_text()).items():
        gpu, tp = re.fullmatch(r"(\w+?)(?:_sxm)? tp(\d+)", system).groups()
        if gpu == "l40s" and int(tp) >= 4:
            continue
        cost = Roofline(shape, find_gpu(gpu), Parallel(tensor_parallel_size=int(tp)))
        for kind in ("prefill_ms", "decode_step_ms(ctx~8.7k)"):
            for name, measured in tables[kind].items():
                if isinstance(measured, str):  # the tables have a hole there
                    continue
                if kind == "prefill_ms":
                    work = prefill(*map(int, re.findall(r"\d+", name)))
                else:
                    work = decode(int(name), 8704)
                label = f"{gpu} TP{tp} {'prefill' if kind == 'prefill_ms' else 'decode'}"
                yield Case(label, name, measured, cost.step_s(work) * 1e3)


def splitwise_cases(path: Path) -> Iterator[Case]:
    """Medians of repeated runs. Prefills of many prompts in one batch were cut up and are left out,
    and so are rows whose 64 prompts took less time than 8."""
    runs: dict[tuple[str, int, int, int, int], list[tuple[float, float]]] = defaultdict(list)
    with path.open() as file:
        for row in csv.DictReader(file):
            gpu = {"a100-80gb": "A100", "h100-80gb": "H100"}.get(row["hardware"])
            if row["model"] == "llama2-70b" and gpu:
                sizes = ("tensor_parallel", "prompt_size", "batch_size", "token_size")
                tp, prompt, batch, tokens = (int(float(row[key])) for key in sizes)
                times = float(row["prompt_time"]), float(row["token_time"])
                runs[gpu, tp, prompt, batch, tokens].append(times)
    shape = find_shape("llama-2-70b")
    for (gpu, tp, prompt, batch, tokens), times in runs.items():
        prompt_ms, token_ms = (statistics.median(column) for column in zip(*times, strict=True))
        parallel = Parallel(tensor_parallel_size=tp)
        cost = Roofline(shape, find_gpu(gpu), parallel, software=SOFTWARE_2023[gpu])
        name = f"{batch} x {prompt}"
        label = f"{gpu} TP{tp} {'fitted' if tp == 8 else 'held out'}"
        if batch == 1:
            predicted = cost.step_s(prefill(1, prompt)) * 1e3
            yield Case(f"{label} prefill", name, prompt_ms, predicted)
        predicted = cost.step_s(decode(batch, prompt + tokens / 2)) * 1e3
        yield Case(f"{label} decode", name, token_ms, predicted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--aic", type=Path)
    parser.add_argument("--splitwise", type=Path)
    parser.add_argument("--all", action="store_true", help="each case")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    sources = {"aic": (options.aic, aic_cases), "splitwise": (options.splitwise, splitwise_cases)}
    result = {}
    for source, (path, read) in sources.items():
        if path is None:
            continue
        cases = list(read(path))
        groups: dict[str, list[Case]] = defaultdict(list)
        for case in cases:
            groups[case.group].append(case)
        rows = []
        for group, members in groups.items():
            worst = max(members, key=lambda case: abs(case.error))
            errors = np.abs([case.error for case in members])
            cells = [f"{np.median(errors):.1%}", f"{worst.error:+.0%} ({worst.name})"]
            rows.append([group, str(len(members)), *cells])
        print(report.table([source, "steps", "median error", "worst"], rows))
        if options.all:
            rows = [
                [
                    c.group,
                    c.name,
                    f"{c.measured_ms:.1f}",
                    f"{c.predicted_ms:.1f}",
                    f"{c.error:+.1%}",
                ]
                for c in cases
            ]
            print(report.table(["case", "", "measured ms", "predicted ms", "error"], rows))
        error = FitError.of([c.predicted_ms for c in cases], [c.measured_ms for c in cases])
        print(f"{source}: {error}\n")
        result[source] = {"steps": len(cases), "median_error": error.median, "p90": error.p90}
    if not result:
        parser.error("name a file of measured steps: --aic or --splitwise")
    if options.json:
        print(report.json_line(result))


if __name__ == "__main__":
    main()
