"""CPU time of the scheduler and KV manager alone: one process, no model, no I/O.

    python benchmarks/scheduler.py [--json] [--quick]

decode   `begin` + `finish` of a step in which every request decodes one token (block 16, a large
         pool, two steps in flight), and encoding what it emits, by number of running requests
waiting  the same while 1,000 requests wait, for a seat or behind a head that lacks memory
admit    per prompt of 1,024 tokens, 1,024 of them at once: its hash, queueing it (with the hash)
         and its first scheduling, with and without a prefix of 768 tokens that all share

Figures are process CPU time, medians over steps. Beside them: what vLLM 0.32's own scheduler took,
alone in a process, on a machine of 2 cores (Sapphire Rapids class).
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
VOCAB = 49_152
VLLM_STEP_US = {32: 500, 256: 4000, 1024: 17900}
VLLM_ADMIT_US = {0: {"hash_us": 210, "schedule_us": 970}, 768: {"hash_us": 290, "schedule_us": 340}}
PARAMS = SamplingParams()
Row = dict[str, float]


def make_core(num_seqs: int, *, num_blocks: int = 200_000, budget: int = 1 << 17) -> EngineCore:
    config = SchedulerConfig(
        block_size=BLOCK,
        num_blocks=num_blocks,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=8192,
    )
    return EngineCore(config, WallClock())


def make_request(handle: int, tokens: np.ndarray, max_tokens: int) -> AddRequest:
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
    tokens = rng.integers(1, VOCAB, int(sampled.sum()), dtype=np.int32)
    return StepResult(step=plan.step, num_sampled=sampled, token_ids=tokens)


def bench_decode(num: int, steps: int, *, waiting: int = 0, lacks_memory: bool = False) -> Row:
    """Microseconds of `begin`, `finish`, both, and of encoding the outputs, per step."""
    rng = np.random.default_rng(0)
    # Room for the growth of what runs, and less than the 500 blocks of a waiting prompt beside it.
    pool = 1 + num * (144 + steps) // BLOCK + 400 if lacks_memory else 200_000
    core = make_core(num + lacks_memory, num_blocks=pool)
    for handle in range(num):
        # Different lengths, so that block boundaries are spread over the steps.
        tokens = rng.integers(1, VOCAB, 128 + handle % BLOCK, dtype=np.int32)
        core.add(make_request(handle, tokens, 4 * steps + 1000))
    for handle in range(num, num + waiting):
        core.add(make_request(handle, rng.integers(1, VOCAB, 8000, dtype=np.int32), 100))
    plans = [core.begin(), core.begin()]
    times: dict[str, list[float]] = {}
    for _ in range(steps):
        result = result_of(plans.pop(0), rng)
        start = time.process_time_ns()
        outputs = core.finish(result)
        finished = time.process_time_ns()
        plans.append(core.begin())
        begun = time.process_time_ns()
        encode(outputs)
        encoded = time.process_time_ns()
        for name, duration_ns in (
            ("begin_us", begun - finished),
            ("finish_us", finished - start),
            ("total_us", begun - start),
            ("encode_us", encoded - begun),
        ):
            times.setdefault(name, []).append(duration_ns / 1e3)
    assert len(plans[-1].slots) == num, "not every request decoded"
    return {name: round(statistics.median(values), 1) for name, values in times.items()}


def bench_admit(num: int, shared: int, repeats: int) -> Row:
    """Microseconds per prompt: hashing it, queueing it (which hashes it), and admitting it."""
    times: dict[str, list[float]] = {}
    for repeat in range(repeats):
        rng = np.random.default_rng(repeat)
        core = make_core(num, budget=num * 1024)
        prefix = rng.integers(1, VOCAB, shared, dtype=np.int32)
        prompts = [
            np.concatenate((prefix, rng.integers(1, VOCAB, 1024 - shared, dtype=np.int32)))
            for _ in range(num)
        ]
        requests = [make_request(handle, tokens, 16) for handle, tokens in enumerate(prompts)]
        start = time.process_time_ns()
        for tokens in prompts:
            core.state.kv.new_table(tokens, "", may_read=True)
        hashed = time.process_time_ns()
        for request in requests:
            core.add(request)
        queued = time.process_time_ns()
        plan = core.begin()
        admitted = time.process_time_ns()
        assert len(plan.slots) == num
        for name, duration_ns in (
            ("hash_us", hashed - start),
            ("queue_us", queued - hashed),
            ("schedule_us", admitted - queued),
        ):
            times.setdefault(name, []).append(duration_ns / 1e3 / num)
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


def print_row(title: str, row: Row, *others: float) -> None:
    figures = "".join(f"{value:10.1f}" for value in (*row.values(), *others))
    print(f"{title:34}{figures}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    args = parser.parse_args()
    steps, repeats = (60, 1) if args.quick else (400, 5)
    report: dict[str, dict[str, Row]] = {"decode": {}, "waiting": {}, "admit": {}}

    print(
        f"{'CPU us a step':34}" + "".join(f"{n:>10}" for n in ("begin", "finish", "total")), end=""
    )
    print(f"{'encode':>10}{'vLLM':>10}")
    for num in (32, 256, 1024):
        row = report["decode"][str(num)] = bench_decode(num, steps)
        print_row(f"{num:,} decode", row, VLLM_STEP_US[num])
    row = report["waiting"]["seat"] = bench_decode(1024, steps, waiting=1000)
    print_row("1,024 decode, 1,000 want a seat", row)
    row = report["waiting"]["memory"] = bench_decode(
        64, min(steps, 100), waiting=1000, lacks_memory=True
    )
    print_row("64 decode, 1,000 lack memory", row)

    print(
        f"\n{'CPU us a prompt of 1,024':34}" + "".join(f"{n:>10}" for n in ("hash", "queue")),
        end="",
    )
    print(f"{'schedule':>10}   vLLM: hash, schedule")
    for shared in (0, 768):
        row = report["admit"][str(shared)] = bench_admit(1024, shared, repeats)
        print_row(f"{shared} tokens shared", row, *VLLM_ADMIT_US[shared].values())
    if args.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
