"""The twin against recorded runs of vLLM.

    python benchmarks/twin_vs_vllm.py DIR... [--gpu NAME] [--config config.json]
        [--cost roofline|aic] [--software vllm|kernels] [--fit] [--json]

A DIR holds meta.json and requests.jsonl (see `twin/vllm_run.py`); its name begins with the GPU's,
as in RTXPRO6000__Llama-3.1-8B, unless --gpu says it. Nothing is fitted to the run at hand:
`--software vllm` takes the one figure that `roofline.VLLM` holds, `kernels` none at all. With --fit
that figure is fitted to the decoding of the first half of each run's requests, and errors are those
of the other half (tokens/s is of the whole run).
"""

import argparse
import time
from pathlib import Path

import numpy as np

from twostroke.bench import report
from twostroke.cost import StepCost
from twostroke.errors import TwostrokeError
from twostroke.twin.aic import AicStepCost
from twostroke.twin.hardware import find_gpu
from twostroke.twin.models import find_shape
from twostroke.twin.roofline import GRAPHS, VLLM, Parallel, Roofline, Software
from twostroke.twin.scenario import Scenario, simulate
from twostroke.twin.vllm_run import (
    ALL,
    VllmRun,
    compare,
    fit_software,
    read_run,
    scenario_of,
    weight_dtype,
)


def replay(run: VllmRun, options: argparse.Namespace, software: Software) -> Scenario:
    """The run in the twin, with the chosen costs."""
    gpu = find_gpu(options.gpu or run.name.split("__")[0])
    shape = find_shape(options.config or run.model)

    def make_cost(parallel: Parallel, software: Software) -> StepCost:
        if options.cost == "aic":
            return AicStepCost(shape, gpu.name, parallel, software=software)
        dtype = weight_dtype(run.settings)
        return Roofline(shape, gpu, parallel, dtype=dtype, software=software)

    return scenario_of(run, shape, gpu, make_cost, software)


def check(directory: Path, options: argparse.Namespace) -> dict[str, float]:
    """Print the figures of one run; errors by name."""
    run = read_run(directory)
    software = {"vllm": VLLM, "kernels": GRAPHS}[options.software]
    half, which = len(run.first_s) // 2, ALL
    if options.fit:
        software = fit_software(run, lambda it: replay(run, options, it), range(half))
        which = slice(half, None)
    start_s = time.perf_counter()
    scenario = replay(run, options, software)
    result = simulate(scenario)
    spent_s = time.perf_counter() - start_s
    failed = len(run.first_s) - int(np.isfinite(result.e2e_s).sum())
    kwargs = run.settings
    print(
        f"{run.name}: {len(run.first_s)} requests, TP{kwargs.tensor_parallel_size}, "
        f"DP{kwargs.data_parallel_size}, {scenario.engines[0].config.num_blocks:,} KV blocks; "
        f"kernels by {options.cost}, of whose speed {software.kernel_share:.1%} is reached; "
        f"simulated in {spent_s:.1f} s" + (f"; {failed} FAILED" if failed else "")
    )
    figures = compare(run, result, which)
    if options.fit:
        figures += compare(run, result)[-1:]
    rows = [
        [it.name, f"{it.measured:,.1f}", f"{it.predicted:,.1f}", f"{it.error:+.1%}"]
        for it in figures
    ]
    title = "requests not fitted to" if options.fit else "all requests"
    print(report.table([title, "vLLM", "twin", "error"], rows) + "\n")
    return {it.name: it.error for it in figures}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directories", type=Path, nargs="+", metavar="DIR")
    parser.add_argument("--gpu", help="default: the beginning of the directory's name")
    parser.add_argument("--config", help="the model's config.json, if its name is not known")
    parser.add_argument("--cost", choices=["roofline", "aic"], default="roofline")
    parser.add_argument("--software", choices=["vllm", "kernels"], default="vllm")
    parser.add_argument("--fit", action="store_true", help="to the first half of the requests")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    errors, problems = {}, []
    for directory in options.directories:
        try:
            errors[directory.name] = check(directory, options)
        except TwostrokeError as error:
            problems.append(str(error))
            print(f"{directory}: {error}\n")
    if options.json:
        print(report.json_line({"errors": errors, "problems": problems}))
    if problems:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
