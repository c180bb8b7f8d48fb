"""Throughput of the offline API on four fixed cases, the same for every engine one compares with.

    python benchmarks/throughput.py [MODEL] [--runs 3] [--cases abcd]
        [--quantization int8] [--json]

a: a single stream; b: one long prompt; c: a batch; d: a batch with a shared prefix. Prompts are
fixed random token ids (seed 0), greedy, EOS ignored; the median of the runs counts. Without MODEL,
the default one.
"""

import argparse
import time

from twostroke import LLM
from twostroke.bench import offline, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cases", default="abcd", help="which of a, b, c, d")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()

    start_s = time.perf_counter()
    with LLM(options.model, quantization=options.quantization) as engine:
        load_s = time.perf_counter() - start_s
        measured = [
            offline.measure(engine, case, runs=options.runs)
            for case in offline.peer_cases()
            if case.name in options.cases
        ]
        name = engine.engine.model_name
    print(f"{name}, loaded in {load_s:.1f} s, medians of {options.runs} runs")
    print(offline.table_of(measured))
    if options.json:
        cases = {one.case.name: offline.result_of(one) for one in measured}
        print(report.json_line({"model": name, "load_s": load_s, "cases": cases}))


if __name__ == "__main__":
    main()
