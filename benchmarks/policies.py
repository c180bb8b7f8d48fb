"""Each scheduling rule of ours beside vLLM's, on a workload that shows the difference.

    python benchmarks/policies.py [--json]

The scheduler and the KV manager are real, the model is simulated, so time is counted in steps and
work in computed tokens; the table is the same on any machine. "small" and "large" split the
requests of a workload by their prompt (large: over 1,000 tokens): mean steps from arrival to end.
"""

import argparse
import json
import random
from statistics import mean
from typing import Any

from tests.replay import Replay

Workload = dict[str, Any]
LARGE_TOKENS = 1000


def request(index: int, prompt: int, output: int, arrival: int, **more: object) -> Workload:
    segment = {"seed": index, "len": prompt}
    fields = {"id": f"r{index}", "prompt": [segment], "max_tokens": output, "arrival_step": arrival}
    return fields | more


def mixed() -> Workload:
    """200 requests, one in ten with a prompt of 6,000 tokens, in a pool of 16,000."""
    rng = random.Random(0)
    requests = []
    for index in range(200):
        large = rng.random() < 0.1
        prompt = 6000 if large else rng.randrange(64, 512)
        requests.append(request(index, prompt, rng.randrange(16, 128), arrival=2 * index))
    return {
        "config": {"num_gpu_blocks": 1001, "max_num_seqs": 64, "async_scheduling": True},
        "requests": requests,
    }


def loads() -> Workload:
    """The same requests; the KV of all small prompts and of half of each large one is remote."""
    work = mixed()
    for entry in work["requests"]:
        length = entry["prompt"][0]["len"]
        remote = length // 2 if length > LARGE_TOKENS else length
        entry["external"] = {"matched_tokens": remote, "ready_after_steps": 4}
    return work


def growth() -> Workload:
    """Short prompts with long outputs run; long prompts with short outputs join them."""
    rng = random.Random(1)
    requests = [request(i, 64, 512, arrival=i) for i in range(24)]
    requests += [
        request(24 + i, 3000, rng.randrange(64, 160), arrival=60 + 90 * i) for i in range(8)
    ]
    return {
        "config": {"num_gpu_blocks": 801, "max_num_seqs": 64, "async_scheduling": True},
        "requests": requests,
    }


def outputs() -> Workload:
    """96 requests of 256 tokens in, 512 out, in a pool for 21 of them."""
    requests = [request(i, 256, 512, arrival=i) for i in range(96)]
    return {
        "config": {"num_gpu_blocks": 1025, "max_num_seqs": 64, "async_scheduling": True},
        "requests": requests,
    }


def too_large() -> Workload:
    """One prompt larger than the pool between ordinary ones."""
    requests = [request(i, 128, 16, arrival=i) for i in range(20)]
    requests[3] = request(3, 4000, 16, arrival=3)
    return {"config": {"num_gpu_blocks": 101, "max_steps": 2000}, "requests": requests}


CASES: list[tuple[str, Workload, bool, dict[str, object]]] = [
    ("mixed", mixed(), True, {}),
    ("mixed", mixed(), False, {"admission": "backfill"}),
    ("loads", loads(), True, {}),
    ("loads", loads(), False, {"admission": "loads"}),
    ("growth", growth(), True, {}),
    ("growth", growth(), False, {"preemption": "least_lost"}),
    ("outputs", outputs(), True, {}),
    ("outputs", outputs(), False, {"reserve_output_tokens": 64}),
    ("outputs", outputs(), False, {"reserve_output_tokens": 256}),
    ("too large", too_large(), True, {}),
    ("too large", too_large(), False, {}),
]


def measure(workload: Workload, faithful: bool, options: dict[str, object]) -> dict[str, Any]:
    """Steps until each request ended, from its arrival, and the work done."""
    trace = Replay(workload, faithful=faithful, **options).run()
    arrival = {entry["id"]: entry["arrival_step"] for entry in workload["requests"]}
    large = {r["id"] for r in workload["requests"] if r["prompt"][0]["len"] > LARGE_TOKENS}
    took = {
        name: step["step"] - arrival[name]
        for step in trace["steps"]
        for name in step.get("finished", {})
    }
    small_steps = [steps for name, steps in took.items() if name not in large]
    large_steps = [steps for name, steps in took.items() if name in large]
    return {
        "finished": len(took),
        "of": len(arrival),
        "steps": trace["num_steps"],
        "small_mean_steps": round(mean(small_steps)) if small_steps else None,
        "large_mean_steps": round(mean(large_steps)) if large_steps else None,
        "large_max_steps": max(large_steps, default=None),
        "computed_tokens": trace["summary"]["scheduled_tokens"],
        "preemptions": trace["summary"]["preemptions"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    arguments = parser.parse_args()
    print(
        f"{'workload':<10} {'rule':<28} {'ended':>8} {'steps':>6} {'small':>6} {'large':>6} "
        f"{'worst':>6} {'tokens':>8} {'preempted':>9}"
    )
    rows = []
    for name, workload, faithful, options in CASES:
        found = measure(workload, faithful, options)
        rule = " ".join(f"{k}={v}" for k, v in options.items())
        rule = rule or ("vLLM 0.22.1" if faithful else "refused at arrival")
        rows.append({"workload": name, "rule": rule} | found)
        print(
            f"{name:<10} {rule:<28} {found['finished']:>4}/{found['of']:<3} {found['steps']:>6} "
            f"{found['small_mean_steps'] or '-':>6} {found['large_mean_steps'] or '-':>6} "
            f"{found['large_max_steps'] or '-':>6} {found['computed_tokens']:>8} "
            f"{found['preemptions']:>9}"
        )
    if arguments.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
