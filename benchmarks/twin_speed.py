"""How long the twin and the planner take, and how much memory: a process each, imports included.

    python benchmarks/twin_speed.py [--trace mooncake/conversation_trace.jsonl] [--sizes 1000 10000]

`1P1D`, `4P7D`: 325 requests of 8k in, 1k out at 65/s on so many engines of TP8. `trace`: all of it
on 8 engines. `sizes`: so many requests of 512 in, 128 out on 8 engines; what a request costs should
not depend on how many there are. `plan`: a search over the layouts of up to 32 GPUs, of which the
twin runs a few. The last line is JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from twostroke.bench.report import table

CLI = [sys.executable, "-m", "twostroke.cli"]
ARTICLE = "--model Qwen3-30B-A3B --gpu H100 --max-num-seqs 512 --kv-gib 54 "
ARTICLE += "--max-num-batched-tokens 65536 --workload poisson:65/s,in=8192,out=1024,n=325 "
EIGHT = "--model Llama-3.1-8B --gpu H100 --both 8"


PLAN = "plan --json --model Qwen3-30B-A3B --gpu H100 --gpus 32 --slo ttft=2s,tpot=50ms "
PLAN += "--workload poisson:20/s,in=2048,out=256,n=400"
Row = dict[str, float | str]


def measure(name: str, arguments: list[str]) -> tuple[Row, Any]:
    """Run `twostroke` in a process of its own: seconds, CPU seconds, peak memory; and its JSON."""
    start_s = time.perf_counter()
    process = subprocess.Popen([*CLI, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall_s = time.perf_counter() - start_s
    if process.returncode:
        raise SystemExit(f"{name}: twostroke {arguments[0]} ended with {process.returncode}")
    row: Row = {
        "name": name,
        "wall_s": wall_s,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "max_rss_mb": usage.ru_maxrss / 1024,
    }
    return row, json.loads(output.splitlines()[-1])


def measure_twin(name: str, arguments: list[str]) -> Row:
    row, summary = measure(name, ["twin", "--json", *arguments])
    return row | {
        "requests": summary["completed"] + summary["failed"],
        "simulated_s": summary["duration"],
        "simulation_s": summary["simulated_in_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, help="Mooncake's conversation trace")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1000, 10_000, 100_000])
    options = parser.parse_args()
    one = f"{ARTICLE} --prefill TP8 --decode TP8"
    cases = [("1P1D", one.split())]
    cases.append(("4P7D", f"{ARTICLE} --prefill 4xTP8 --decode 7xTP8".split()))
    if options.trace is not None:
        cases.append(("trace", [*EIGHT.split(), "--workload", str(options.trace)]))
    for size in options.sizes:
        load = f"poisson:40/s,in=512,out=128,n={size}"
        cases.append((f"{size:,} requests", [*EIGHT.split(), "--workload", load]))
    found = [measure_twin(name, arguments) for name, arguments in cases]
    print(
        table(
            ["", "requests", "simulated s", "simulation s", "wall s", "CPU s", "us/request", "MB"],
            [
                [
                    str(it["name"]),
                    f"{it['requests']:,}",
                    f"{it['simulated_s']:,.0f}",
                    f"{it['simulation_s']:.2f}",
                    f"{it['wall_s']:.2f}",
                    f"{it['cpu_s']:.2f}",
                    f"{1e6 * float(it['simulation_s']) / float(it['requests']):,.0f}",
                    f"{it['max_rss_mb']:,.0f}",
                ]
                for it in found
            ],
        )
    )
    plan, answer = measure("plan", PLAN.split())
    plan["layouts"] = answer["num_layouts"]
    print(
        f"plan: {plan['layouts']} layouts in {plan['wall_s']:.1f} s, {plan['cpu_s']:.1f} s of CPU, "
        f"{plan['max_rss_mb']:,.0f} MB"
    )
    print(json.dumps([*found, plan]))


if __name__ == "__main__":
    main()
