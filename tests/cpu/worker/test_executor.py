"""Both executors: order, failures, and what they leave behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.cpu.worker.driving import Driver, Request, small_config
from twostroke.checkpoint import Checkpoint, open_checkpoint
from twostroke.config import EngineConfig
from twostroke.errors import ConfigError, EngineDeadError, ModelError
from twostroke.kv_messages import KvLoad
from twostroke.messages import NO_TOKENS, SamplingParams, StepPlan, StepResult
from twostroke.worker.executor import ProcessExecutor, Progress, ThreadExecutor


def empty_plan(step: int) -> StepPlan:
    return StepPlan(
        step=step,
        slots=NO_TOKENS,
        num_computed=NO_TOKENS,
        num_scheduled=NO_TOKENS,
        samples=np.empty(0, np.bool_),
    )


class CountingRunner:
    """Fails in step 3."""

    facts = (("Device", "none", "a test"),)
    num_blocks = 7
    max_model_len = 100
    endpoint = None

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, progress: Progress | None
    ) -> None:
        if progress is not None:
            progress("weights", 1, 2)

    def run(self, plan: StepPlan) -> StepResult:
        if plan.step == 3:
            raise ZeroDivisionError("step 3")
        return StepResult(step=plan.step, num_sampled=NO_TOKENS, token_ids=NO_TOKENS)

    def read(self, loads: list[KvLoad]) -> None:
        raise AssertionError("nothing is handed over")

    def prepare(self) -> bool:
        return False

    def shutdown(self) -> None:
        pass


def start(make_runner=CountingRunner, **kwargs) -> ThreadExecutor:
    return ThreadExecutor(EngineConfig(), None, make_runner=make_runner, **kwargs)


def test_thread_runs_plans_in_order_with_two_in_flight():
    stages = []
    executor = start(progress=lambda *progress: stages.append(progress))
    assert stages == [("weights", 1, 2)]
    assert (executor.num_blocks, executor.max_model_len) == (7, 100)
    assert executor.facts == CountingRunner.facts
    for step in (0, 1):
        executor.submit(empty_plan(step))
    assert [executor.collect().step for _ in range(2)] == [0, 1]
    with pytest.raises(RuntimeError, match="without a step in flight"):
        executor.collect()
    executor.shutdown()
    executor.shutdown()
    assert "worker" not in {thread.name for thread in threading.enumerate()}


def test_a_plan_that_was_not_begun_is_taken_back():
    begun, go_on = threading.Event(), threading.Event()

    class Slow(CountingRunner):
        def run(self, plan: StepPlan) -> StepResult:
            begun.set()
            assert go_on.wait(10)
            return super().run(plan)

    executor = start(Slow)
    executor.submit(empty_plan(0))
    assert begun.wait(10)
    assert executor.recall() is None, "it runs"
    executor.submit(empty_plan(1))
    executor.submit(empty_plan(2))
    assert executor.recall() is None, "not the next"
    executor.nudge()
    assert not executor.wait(), "somebody has come"
    go_on.set()
    assert executor.wait()
    assert executor.wait(), "its result is kept"
    assert executor.collect().step == 0
    executor.nudge()
    assert [executor.collect().step for _ in range(2)] == [1, 2], "who only collects is not told"
    go_on.clear()
    begun.clear()
    executor.submit(empty_plan(4))
    assert begun.wait(10)
    executor.submit(empty_plan(5))
    plan = executor.recall()
    assert plan is not None
    assert plan.step == 5
    executor.submit(empty_plan(6))
    go_on.set()
    assert [executor.collect().step for _ in range(2)] == [4, 6]
    executor.shutdown()


def test_a_worker_prepares_only_while_it_has_no_plan():
    prepared = []

    class Preparing(CountingRunner):
        def prepare(self) -> bool:
            prepared.append(threading.current_thread().name)
            return len(prepared) < 3

    executor = start(Preparing)
    executor.submit(empty_plan(0))
    assert executor.collect().step == 0
    executor.shutdown()
    assert set(prepared) == {"worker"}
    assert 1 <= len(prepared) <= 5


def test_a_failing_step_ends_the_thread_and_keeps_its_cause():
    executor = start()
    for step in (2, 3, 4):
        executor.submit(empty_plan(step))
    assert executor.collect().step == 2
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="ZeroDivisionError: step 3") as failure:
            executor.collect()
        assert isinstance(failure.value.__cause__, ZeroDivisionError)
    executor.shutdown()


def test_what_loading_raises_reaches_the_caller():
    def broken(*_: object) -> CountingRunner:
        raise ModelError("model.safetensors is damaged")

    with pytest.raises(ModelError, match="damaged"):
        start(broken)


def test_where_kv_is_handed_over_the_executor_says_where_it_can_be_read(tiny_dir: Path):
    before = set(threading.enumerate())
    executor = ThreadExecutor(small_config(prefill=1, decode=1), open_checkpoint(tiny_dir))
    assert executor.endpoint is not None
    assert executor.endpoint.transport == "shm"
    assert len(executor.endpoint.addresses) == 1
    assert executor.endpoint.layout.num_blocks == executor.num_blocks
    executor.submit(empty_plan(0))
    assert executor.collect().kv is None
    executor.shutdown()
    left = set(threading.enumerate()) - before
    assert not any(thread.name.startswith("kv-") for thread in left)


# ---------------------------------------------------------------- the worker in its own process


@pytest.fixture
def process(tiny_dir: Path) -> Iterator[ProcessExecutor]:
    executor = ProcessExecutor(small_config(), open_checkpoint(tiny_dir))
    yield executor
    executor.shutdown()


def run_by(executor: ThreadExecutor | ProcessExecutor) -> Callable[[StepPlan], StepResult]:
    def run(plan: StepPlan) -> StepResult:
        executor.submit(plan)
        return executor.collect()

    return run


def requests() -> list[Request]:
    drawn = SamplingParams(temperature=1.0, seed=3, logprobs=1, prompt_logprobs=0)
    return [
        Request([1, 2, 3], 6),
        Request(list(range(30)), 9, drawn),
        Request([7] * 20, 7, SamplingParams(temperature=0.8, logit_bias={5: 2.0})),
    ]


def test_process_and_thread_give_the_same_results(process: ProcessExecutor, tiny_dir: Path):
    stages: list[str] = []
    thread = ThreadExecutor(
        small_config(), open_checkpoint(tiny_dir), lambda stage, done, total: stages.append(stage)
    )
    outcomes = []
    for executor in (thread, process):
        batch = requests()
        Driver(run_by(executor)).serve(batch, chunk=8)
        outcomes.append([(r.outputs, r.logprobs, r.prompt_logprobs) for r in batch])
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1][1]
    assert (process.num_blocks, process.max_model_len) == (thread.num_blocks, thread.max_model_len)
    names = [[name for name, _, _ in executor.facts] for executor in (thread, process)]
    assert names[0] == names[1]
    assert set(stages) == {"weights", "kernels"}
    thread.shutdown()


def test_a_killed_worker_is_noticed(process: ProcessExecutor):
    process.submit(empty_plan(0))
    assert process.collect().step == 0
    with pytest.raises(RuntimeError, match="without a step in flight"):
        process.collect()
    worker = child_of(os.getpid())
    worker.send_signal(signal.SIGSTOP)  # it must not answer before it dies
    process.submit(empty_plan(1))
    worker.kill()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=r"worker process died \(signal SIGKILL\)"):
            process.collect()


def test_a_full_queue_does_not_wait_for_a_dead_worker(process: ProcessExecutor):
    child_of(os.getpid()).kill()
    large = empty_plan(0)
    large.grown_blocks = np.zeros(2 << 20, np.int32)
    with pytest.raises(EngineDeadError, match="worker process died"):
        process.submit(large)


def test_an_exception_in_the_worker_process_is_told(process: ProcessExecutor):
    wrong = empty_plan(0)
    wrong.freed_slots = np.array([3], np.int32)
    process.submit(wrong)
    with pytest.raises(EngineDeadError, match=r"PlanError: freed_slots.*\[3\] are empty"):
        process.collect()


def test_a_setting_that_cannot_work_is_told_as_such(tiny_dir: Path):
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=r"--max-model-len is 96.*holds 16 tokens"):
        ProcessExecutor(small_config(num_gpu_blocks_override=3), open_checkpoint(tiny_dir))
    assert set(os.listdir("/proc/self/fd")) == before
    assert not psutil.Process().children()


def test_a_worker_that_cannot_start_is_told(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineDeadError, match=r"died \(exit code 1\)"):
        ProcessExecutor(small_config(), open_checkpoint(tiny_dir))


def test_shutdown_leaves_nothing(tiny_dir: Path):
    before = set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    executor = ProcessExecutor(small_config(), open_checkpoint(tiny_dir))
    worker = child_of(os.getpid())
    executor.submit(empty_plan(0))
    executor.shutdown()
    executor.shutdown()
    assert not worker.is_running()
    assert (set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))) == before


PARENT = """
import sys, time
from pathlib import Path
from tests.cpu.worker.driving import small_config
from twostroke.checkpoint import open_checkpoint
from twostroke.worker.executor import ProcessExecutor
executor = ProcessExecutor(small_config(), open_checkpoint(Path(sys.argv[1])))
print("ready", flush=True)
time.sleep(1000)
"""


def test_the_worker_ends_when_its_parent_is_killed(tiny_dir: Path):
    shared = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tiny_dir)], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        worker = child_of(parent.pid)
        parent.kill()
    # An orphan may stay a zombie where nobody reaps it: its end is what counts.
    deadline = time.monotonic() + 10
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the worker outlives its parent"
        time.sleep(0.02)
    assert set(os.listdir("/dev/shm")) == shared


def child_of(pid: int) -> psutil.Process:
    (child,) = psutil.Process(pid).children()
    return child
