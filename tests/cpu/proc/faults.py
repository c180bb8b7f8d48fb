"""Random schedules of what can go wrong with P and D as real processes.

    python -m tests.cpu.proc.faults --schedules 100

A schedule is a burst of greedy requests (some prompts begin alike, some clients leave) and faults
at random moments of it: a P or D is killed, or stopped and continued, or has to change its role.
Afterwards the dead are replaced, and three things are counted that must not be: requests that do
not end (hangs), anything that is left of them anywhere (leaks), and answers with other tokens than
one engine alone gives (wrong). A request may end with an error, if an engine was lost under it.
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from tests.cpu.proc.pd_engines import Answer, PdEngines
from twostroke.errors import RequestError
from twostroke.testing.tiny_model import write_tiny_checkpoint

MODEL = {  # 32 KiB of KV a token: the KV of a long prompt takes a while to move
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
MAX_TOKENS = 12
HANG_S = 90.0  # many times what a hand-off may take before it has failed
Kind = Literal["kill", "stall", "switch"]


@dataclass(frozen=True)
class Fault:
    """Something that happens to an engine of a role, `after_s` from the start of the burst."""

    after_s: float
    kind: Kind
    role: Literal["prefill", "decode"]
    stall_s: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """Prompts by number, with when each arrives and when (or whether) its client leaves."""

    seed: int
    arrivals: Sequence[tuple[int, float, float | None]]
    faults: Sequence[Fault]

    @classmethod
    def random(cls, seed: int, num_prompts: int) -> "Schedule":
        rng = random.Random(seed)
        arrivals = [
            (
                rng.randrange(num_prompts),
                rng.uniform(0, 0.5),
                rng.uniform(0, 1.0) if rng.random() < 0.15 else None,
            )
            for _ in range(rng.randint(4, 12))
        ]
        kinds: list[Kind] = rng.choices(["kill", "stall", "switch"], [6, 3, 1], k=rng.randint(1, 2))
        faults = [
            Fault(
                after_s=rng.uniform(0, 1.0),
                kind=kind,
                role=rng.choice(["prefill", "decode"]),
                stall_s=rng.choice([0.1, 0.5, 3.0]),  # the last is longer than a lease
            )
            for kind in kinds
        ]
        return cls(seed, arrivals, faults)


@dataclass
class Outcome:
    """What came of all schedules."""

    schedules: int = 0
    requests: int = 0
    answered: int = 0
    left: int = 0  # by their clients
    errors: int = 0
    hangs: int = 0
    leaks: int = 0
    wrong: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    decisions: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)  # of errors
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        return not self.hangs and not self.leaks and not self.wrong


def make_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 20 to 1,000 tokens; every fourth is long, every second like the one before."""
    rng = np.random.default_rng(seed)
    prompts: list[list[int]] = []
    for i in range(count):
        length = int(rng.integers(700, 1000) if i % 4 == 0 else rng.choice([20, 60, 200]))
        tokens = rng.integers(0, 256, length).tolist()
        if i % 2:
            shared = prompts[-1][: max(len(prompts[-1]) - 7, 1)]
            tokens = (shared + tokens)[:1000]
        prompts.append(tokens)
    return prompts


class Runner:
    """Engines, prompts with the answers that are right, and what was counted."""

    def __init__(self, engines: PdEngines, prompts: Sequence[Sequence[int]]) -> None:
        self.engines = engines
        self.prompts = prompts
        self.right: list[list[int]] = []
        self.outcome = Outcome()

    async def learn(self) -> None:
        """Let one engine alone answer every prompt."""
        alone = PdEngines(
            Path(self.engines.config.model), ["both"], prefill=0, decode=0, pd_policy="never"
        )
        try:
            await alone.start()
            answers = await asyncio.gather(*(alone.ask(it, MAX_TOKENS) for it in self.prompts))
            await alone.close()
        finally:
            alone.stop()
        assert all(answer.finish_reason == "length" for answer in answers)
        self.right = [answer.token_ids for answer in answers]

    async def run(self, schedule: Schedule) -> None:
        """Run a schedule and count what came of it."""
        faults = [asyncio.create_task(self._inflict(fault)) for fault in schedule.faults]
        asked = [
            asyncio.create_task(self._ask(schedule.seed, i, *arrival))
            for i, arrival in enumerate(schedule.arrivals)
        ]
        _, hanging = await asyncio.wait(asked, timeout=HANG_S)
        await asyncio.gather(*faults)
        for task in hanging:
            task.cancel()
        self.outcome.schedules += 1
        self.outcome.requests += len(asked)
        self.outcome.hangs += len(hanging)
        await asyncio.gather(*hanging, return_exceptions=True)
        await self.engines.mend()
        try:
            await self.engines.check_idle()
        except (TimeoutError, AssertionError) as error:
            self.outcome.leaks += 1
            print(f"schedule {schedule.seed}: something is left: {error!r}", file=sys.stderr)

    async def _ask(
        self, seed: int, index: int, prompt: int, arrival_s: float, leaves_s: float | None
    ) -> None:
        await asyncio.sleep(arrival_s)
        asking = asyncio.create_task(
            self.engines.ask(self.prompts[prompt], MAX_TOKENS, f"s{seed}-{index}")
        )
        try:
            if leaves_s is not None:
                await asyncio.wait([asking], timeout=leaves_s)
                if not asking.done():
                    self.outcome.left += 1
                    return
            self._judge(await asking, prompt, f"schedule {seed}, request {index}")
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    def _judge(self, answer: Answer, prompt: int, name: str) -> None:
        right = self.right[prompt]
        if answer.finish_reason == "length" and answer.token_ids == right:
            self.outcome.answered += 1
        elif answer.finish_reason == "error" and answer.token_ids == right[: len(answer.token_ids)]:
            self.outcome.errors += 1
            self.outcome.messages[answer.error[:70]] += 1
        else:
            self.outcome.wrong += 1
            print(f"{name}: {answer} is not {right}", file=sys.stderr)

    async def _inflict(self, fault: Fault) -> None:
        await asyncio.sleep(fault.after_s)
        engines = self.engines.with_role(fault.role)
        if not engines:
            return
        engine = engines[0]
        self.outcome.faults[f"{fault.kind} {fault.role}"] += 1
        match fault.kind:
            case "kill":
                await self.engines.kill(engine)
            case "stall":
                self.engines.signal(engine, signal.SIGSTOP)
                await asyncio.sleep(fault.stall_s)
                self.engines.signal(engine, signal.SIGCONT)
            case "switch":
                try:
                    self.engines.engine.set_role(
                        engine, "decode" if fault.role == "prefill" else "prefill"
                    )
                except RequestError:  # it is the last one that decodes
                    self.outcome.faults["switch refused"] += 1


async def run_schedules(engines: PdEngines, seeds: Sequence[int], *, show: bool = False) -> Outcome:
    """Run a schedule for each seed on engines that are started here; the caller stops them."""
    start_s = time.monotonic()
    runner = Runner(engines, make_prompts(12))
    await runner.learn()
    await engines.start()
    for seed in seeds:
        await runner.run(Schedule.random(seed, len(runner.prompts)))
        if show:
            print(f"\rschedule {seed}: {runner.outcome.faults}", end="", file=sys.stderr)
    counters = engines.engine.dispatcher.counters
    runner.outcome.decisions.update({" ".join(key): n for key, n in counters.decisions.items()})
    runner.outcome.retries.update(counters.retries)
    runner.outcome.seconds = round(time.monotonic() - start_s, 1)
    await engines.close()
    return runner.outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    parser.add_argument("--kv-mode", choices=["pull", "stream"], default="pull")
    parser.add_argument("--kv-transport", choices=["shm", "nixl"], default="shm")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = write_tiny_checkpoint(Path(directory) / "tiny", **MODEL)
        engines = PdEngines(
            model,
            ["prefill"] * options.prefill + ["decode"] * options.decode,
            kv_mode=options.kv_mode,
            kv_transport=options.kv_transport,
        )
        seeds = range(options.seed, options.seed + options.schedules)
        try:
            outcome = asyncio.run(run_schedules(engines, seeds, show=True))
        finally:
            engines.stop()
    print(f"\n{json.dumps(vars(outcome))}")
    return 0 if outcome.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
