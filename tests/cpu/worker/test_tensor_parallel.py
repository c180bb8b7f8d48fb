"""Worker processes as ranks: the tokens of one worker, and an end for all when one dies."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.cpu.proc.serving import serving
from tests.cpu.worker.driving import Driver, Request, small_config
from tests.cpu.worker.test_executor import empty_plan, requests, run_by
from twostroke.checkpoint import open_checkpoint
from twostroke.errors import ConfigError, EngineDeadError, ModelError
from twostroke.messages import NO_TOKENS, NewRequest, SamplingParams, StepPlan
from twostroke.testing.tiny_model import write_tiny_checkpoint
from twostroke.worker.executor import ProcessExecutor, ThreadExecutor

DEATH_S = 2.0


def start(path: Path, size: int = 2, **changes: object) -> ProcessExecutor:
    on_death = changes.pop("on_death", None)
    config = small_config(tensor_parallel_size=size, **changes)
    return ProcessExecutor(config, open_checkpoint(path), on_death=on_death)


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


def serve(executor: ThreadExecutor | ProcessExecutor, batch: list[Request], **how) -> list:
    Driver(run_by(executor)).serve(batch, **how)
    return [request.outputs for request in batch]


def flat(batch: list[Request]) -> list[float]:
    """All log-probs that were reported."""
    return [
        value
        for request in batch
        for token in (*request.logprobs, *request.prompt_logprobs)
        for value in token.logprobs
    ]


@pytest.fixture(scope="module")
def pair(tiny_dir: Path) -> Iterator[ProcessExecutor]:
    executor = start(tiny_dir)
    yield executor
    executor.shutdown()


def test_two_ranks_give_the_results_of_one(pair: ProcessExecutor, tiny_dir: Path):
    one = ThreadExecutor(small_config(), open_checkpoint(tiny_dir))
    batches = requests(), requests()
    for executor, batch in zip((one, pair), batches, strict=True):
        serve(executor, batch, chunk=8, preempt=0.1)
    one.shutdown()
    assert [r.outputs for r in batches[0]] == [r.outputs for r in batches[1]]
    assert len(flat(batches[0])) > 50
    np.testing.assert_allclose(flat(batches[1]), flat(batches[0]), atol=1e-4)
    assert (pair.num_blocks, pair.max_model_len) == (one.num_blocks, one.max_model_len)


def test_facts_say_what_a_rank_has(pair: ProcessExecutor):
    facts = {name: (value, reason) for name, value, reason in pair.facts}
    value, reason = facts["Tensor parallel"]
    assert value == "2 ranks"
    assert reason == "--tensor-parallel-size; each has 2 of 4 heads and 1 of 2 KV heads"
    assert facts["Device"][0] == "cpu, 1 thread on each of 2 ranks"
    # 2 layers, keys and values, 1 KV head, 16 values of 4 bytes: half of what one worker has.
    assert facts["KV pool"][0].startswith(f"{128 * 8 * 2 * 2 * 16 * 4 >> 10} KiB, 128 blocks")


def test_ranks_listen_on_the_loopback_interface_only(pair: ProcessExecutor):
    connections = [c for p in children() for c in p.net_connections() if c.laddr]
    assert any(c.status == psutil.CONN_LISTEN for c in connections)
    assert {c.laddr.ip for c in connections} <= {"127.0.0.1", "::1"}


def test_experts_a_shared_kv_head_and_speculation(tmp_path: Path):
    """Drafts are made by each rank for itself, and must be the same."""
    path = write_tiny_checkpoint(tmp_path, "qwen3_moe", num_key_value_heads=1)
    prompt = [5, 6, 7] * 6
    one = ThreadExecutor(small_config(), open_checkpoint(path))
    two = start(path, speculative_method="ngram", prompt_lookup_min=1)
    try:
        assert serve(two, requests()) == serve(one, requests())
        (expected,) = serve(one, [Request(prompt, 16)])
        found, num_verified = speculate(two, prompt, 16)
        assert found == expected
        assert num_verified > 0
    finally:
        one.shutdown()
        two.shutdown()


def speculate(executor: ProcessExecutor, prompt: list[int], count: int) -> tuple[list[int], int]:
    """Decode one request with up to 3 drafts of the worker's own a step; tokens, drafts run."""
    run, blocks = run_by(executor), np.arange(1, 13, dtype=np.int32)
    new = NewRequest(
        slot=0,
        request_id="a",
        token_ids=np.array(prompt, np.int32),
        num_prompt_tokens=len(prompt),
        params=SamplingParams(temperature=0.0, max_tokens=count),
        stop_token_ids=(),
        block_ids=blocks,
    )
    outputs: list[int] = []
    num_verified = 0
    for step in range(count):
        drafts = min(3, count - len(outputs) - 1) if step else 0
        plan = StepPlan(
            step=step,
            slots=np.zeros(1, np.int32),
            num_computed=np.array([len(prompt) + len(outputs) - 1 if step else 0], np.int32),
            num_scheduled=np.array([1 + drafts if step else len(prompt)], np.int32),
            samples=np.ones(1, np.bool_),
            new=[] if step else [new],
            num_drafts=np.array([drafts], np.int32) if drafts else NO_TOKENS,
            draft_token_ids=np.full(drafts, -1, np.int32),
        )
        result = run(plan)
        outputs += result.token_ids.tolist()
        num_verified += int(result.num_verified.sum())
        if len(outputs) == count:
            break
    return outputs, num_verified


# ---------------------------------------------------------------- refusals and deaths


def test_a_size_that_does_not_divide_is_refused_at_once(tmp_path: Path):
    path = write_tiny_checkpoint(
        tmp_path, num_attention_heads=9, num_key_value_heads=3, hidden_size=72, head_dim=8
    )
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=r"is 2; .* 9 heads, .* 3 KV heads; possible: 1, 3, 9$"):
        start(path)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_rank_that_cannot_load_ends_the_start(tmp_path: Path):
    path = write_tiny_checkpoint(tmp_path)
    (path / "model.safetensors").write_bytes(b"no weights")
    before = set(os.listdir("/proc/self/fd")), children()
    with pytest.raises(ModelError, match="is not a sound safetensors file"):
        start(path)
    assert (set(os.listdir("/proc/self/fd")), children()) == before


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_others(tiny_dir: Path, victim: int):
    before = set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm")), children()
    died = threading.Event()
    executor = start(tiny_dir, on_death=died.set)
    ranks = sorted(children() - before[2], key=lambda process: process.pid)
    ranks[victim].send_signal(signal.SIGSTOP)  # so that the other one waits in a sum
    executor.submit(prefill_plan())
    start_s = time.monotonic()
    ranks[victim].kill()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=rf"of rank {victim} died \(signal SIGKILL\)"):
            executor.collect()
    assert died.wait(DEATH_S)
    executor.shutdown()
    assert time.monotonic() < start_s + DEATH_S
    after = set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm")), children()
    assert after == before


def prefill_plan() -> StepPlan:
    plan = empty_plan(0)
    plan.slots, plan.num_computed = np.zeros(1, np.int32), np.zeros(1, np.int32)
    plan.num_scheduled, plan.samples = np.full(1, 40, np.int32), np.ones(1, np.bool_)
    plan.new = [
        NewRequest(
            slot=0,
            request_id="a",
            token_ids=np.arange(40, dtype=np.int32),
            num_prompt_tokens=40,
            params=SamplingParams(temperature=0.0),
            stop_token_ids=(),
            block_ids=np.arange(1, 6, dtype=np.int32),
        )
    ]
    return plan


def test_what_fails_on_one_rank_is_told_and_not_its_consequence(pair: ProcessExecutor):
    """Last user of the pair: a plan that contradicts the ones before ends it."""
    wrong = empty_plan(0)
    wrong.freed_slots = np.array([3], np.int32)
    pair.submit(wrong)
    with pytest.raises(EngineDeadError, match=r"worker of rank \d failed: PlanError: freed_slots"):
        pair.collect()


def test_serves_and_notices_an_idle_rank_that_dies(tiny_dir: Path, tmp_path: Path):
    small = ("--max-model-len", "128", "--max-num-seqs", "4", "--dtype", "float32")
    with serving(
        tiny_dir, "--tensor-parallel-size", "2", *small, TMPDIR=str(tmp_path), OMP_NUM_THREADS="1"
    ) as served:
        body = {"prompt": "a", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        with served.client() as client:
            reply = client.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            assert reply.json()["usage"]["completion_tokens"] == 16
            started = served.descendants()
            ranks = [p for p in started if "twostroke.proc.worker_main" in p.cmdline()]
            assert len(ranks) == 2
            max(ranks, key=lambda process: process.pid).kill()
            killed_s = time.monotonic()
            while client.get("/health").status_code == 200:
                assert time.monotonic() < killed_s + DEATH_S, "health did not turn 503"
        assert served.wait() != 0
        assert "2 ranks" in served.output
        assert "of rank 1 died (signal SIGKILL)" in served.output
        assert not psutil.wait_procs(started, timeout=5)[1]
    assert [p for p in tmp_path.iterdir() if p.name.startswith("twostroke-")] == []
