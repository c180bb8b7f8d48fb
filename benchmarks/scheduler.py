"""CPU time of the scheduler and KV manager alone: one process, no model, no I/O.

    python benchmarks/scheduler.py [--json] [--quick]

`decode`: `begin` + `finish` of a step in which every request decodes one token (block 16, a large
pool, two steps in flight), for several numbers of running requests. `admit`: queueing (hashing) and
first scheduling of prompts of 1,024 tokens, all different or with a shared prefix of 768. `blocked`:
decode steps while a head that does not fit and many others wait. Times are process CPU time, medians
over steps; beside them what vLLM 0.32's own scheduler took on a 2-core Sapphire Rapids machine.
"""

import argparse
import json
import statistics
import time

import numpy as np

from twostroke.clock import WallClock
from twostroke.config import SchedulerConfig
from twostroke.core.loop import EngineCore
from twostroke.messages import AddRequest, SamplingParams, StepPlan, StepResult, encode

BLOCK = 16
VLLM_STEP_US = {32: 500.0, 256: 4000.0, 1024: 17900.0}
VLLM_ADMIT_US = {0: (970.0, 210.0), 768: (340.0, 290.0)}
PARAMS = SamplingParams(ignore_eos=False)


def make_core(num_seqs: int, *, num_blocks: int = 200_000, budget: int = 1 << 17) -> EngineCore:
    config = SchedulerConfig(
        block_size=BLOCK,
        num_blocks=num_blocks,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=8192,
    )
    return EngineCore(config, WallClock())


def request(handle: int, tokens: np.ndarray, max_tokens: int) -> AddRequest:
    return AddRequest(
        handle=handle,
        request_id=f"request-{handle}",
        prompt_token_ids=tokens,
        params=PARAMS,
        max_tokens=max_tokens,
        eos_token_ids=(0,),
    )


def result_of(plan: StepPlan, rng: np.random.Generator) -> StepResult:
    sampled = plan.samples.astype(np.int32)
    tokens = rng.integers(1, 49152, int(sampled.sum()), dtype=np.int32)
    return StepResult(step=plan.step, num_sampled=sampled, token_ids=tokens)


def bench_decode(num: int, steps: int, *, num_waiting: int = 0) -> dict[str, float]:
    """Microseconds of begin, finish, both, and of encoding the outputs, per step."""
    rng = np.random.default_rng(0)
    num_blocks = 200_000 if not num_waiting else 1 + num * (BLOCK + steps // BLOCK + 4)
    core = (
        make_core(num, num_blocks=num_blocks)
        if not num_waiting
        else make_core(num + 1, num_blocks=num_blocks)
    )
    for handle in range(num):
        # Different lengths, so that block boundaries are spread over the steps.
        tokens = rng.integers(1, 49152, 128 + handle % BLOCK, dtype=np.int32)
        core.add(request(handle, tokens, 4 * steps + 1000))
    for handle in range(num, num + num_waiting):
        core.add(request(handle, rng.integers(1, 49152, 8000, dtype=np.int32), 100))
    plans = [core.begin(), core.begin()]
    times: dict[str, list[float]] = {
        "begin_us": [],
        "finish_us": [],
        "total_us": [],
        "encode_us": [],
    }
    for _ in range(steps):
        result = result_of(plans.pop(0), rng)
        start = time.process_time_ns()
        outputs = core.finish(result)
        finished = time.process_time_ns()
        plans.append(core.begin())
        begun = time.process_time_ns()
        encode(outputs)
        encoded = time.process_time_ns()
        times["finish_us"].append((finished - start) / 1e3)
        times["begin_us"].append((begun - finished) / 1e3)
        times["total_us"].append((begun - start) / 1e3)
        times["encode_us"].append((encoded - begun) / 1e3)
    assert len(plans[-1].slots) == num, "not every request decoded"
    return {name: round(statistics.median(values), 1) for name, values in times.items()}


def bench_admit(num: int, shared: int, repeats: int) -> dict[str, float]:
    """Microseconds per prompt: queueing it (which hashes it), and admitting it."""
    hashing, scheduling = [], []
    for repeat in range(repeats):
        rng = np.random.default_rng(repeat)
        core = make_core(num, budget=num * 1024)
        prefix = rng.integers(1, 49152, shared, dtype=np.int32)
        prompts = [
            np.concatenate((prefix, rng.integers(1, 49152, 1024 - shared, dtype=np.int32)))
            for _ in range(num)
        ]
        requests = [request(handle, tokens, 16) for handle, tokens in enumerate(prompts)]
        start = time.process_time_ns()
        for item in requests:
            core.add(item)
        queued = time.process_time_ns()
        plan = core.begin()
        admitted = time.process_time_ns()
        assert len(plan.slots) == num
        hashing.append((queued - start) / 1e3 / num)
        scheduling.append((admitted - queued) / 1e3 / num)
    return {
        "queue_us": round(statistics.median(hashing), 2),
        "schedule_us": round(statistics.median(scheduling), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    args = parser.parse_args()
    steps, repeats = (60, 1) if args.quick else (400, 5)
    report: dict[str, dict[str, dict[str, float]]] = {"decode": {}, "admit": {}, "blocked": {}}
    print(
        f"{'decode, CPU us a step':28}{'begin':>9}{'finish':>9}{'total':>9}{'encode':>9}{'vLLM':>9}"
    )
    for num in (32, 256, 1024):
        row = report["decode"][str(num)] = bench_decode(num, steps)
        figures = "".join(
            f"{row[f'{key}_us']:9.1f}" for key in ("begin", "finish", "total", "encode")
        )
        print(f"{f'{num} requests':28}{figures}{VLLM_STEP_US[num]:9.0f}")
    row = report["blocked"]["1024"] = bench_decode(1024, steps, num_waiting=1000)
    figures = "".join(f"{row[f'{key}_us']:9.1f}" for key in ("begin", "finish", "total", "encode"))
    print(f"{'1024 requests, 1000 waiting':28}{figures}")
    print(
        f"\n{'admission, CPU us a prompt':28}{'queue':>9}{'schedule':>9}{'vLLM: hash, schedule':>22}"
    )
    for shared in (0, 768):
        row = report["admit"][str(shared)] = bench_admit(1024, shared, repeats)
        schedule, hashing = VLLM_ADMIT_US[shared]
        print(
            f"{f'{shared} of 1,024 tokens shared':28}{row['queue_us']:9.2f}"
            f"{row['schedule_us']:9.2f}{hashing:12.0f},{schedule:9.0f}"
        )
    if args.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
