"""P and D as real processes under an `AsyncEngine` of this process: to be killed, stopped, started.

The engines are those of `twostroke serve`; what is missing of a server is its HTTP side, so that a
test can ask the dispatcher and each engine core what is left behind.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from twostroke import checkpoint as checkpoints
from twostroke.checkpoint import Checkpoint
from twostroke.client.engine import AsyncEngine
from twostroke.client.tokenizer import load_tokenizer
from twostroke.config import EngineConfig, resolve
from twostroke.errors import TwostrokeError
from twostroke.ledger import Interval
from twostroke.messages import SamplingParams
from twostroke.metrics import SampleRecord
from twostroke.proc.api_main import dispatch_settings
from twostroke.proc.launch import EngineProcess
from twostroke.router.dispatch import Role

SETTINGS: dict[str, object] = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
    "cpu_threads": 1,
    "num_gpu_blocks_override": 400,
    "prefill": 1,
    "decode": 1,
    "pd_policy": "always",
    "kv_lease_s": 2.0,
    "handoff_timeout_s": 10.0,
    "log_level": "error",
    "check": True,
}
READY_S = 120  # a start, on a machine that does other things
IDLE_S = 60  # until everything is given back, leases included


@dataclass
class Answer:
    """What came of a request."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str = ""
    records: list[SampleRecord] = field(default_factory=list)

    def seconds(self, interval: Interval) -> float:
        """How long it spent there, by its ledger."""
        return self.records[0].ledger.seconds(interval)


class PdEngines:
    """Engine processes by role; `await start()`, and `stop()` once the loop has ended."""

    def __init__(self, model: Path, roles: Sequence[Role], **settings: object) -> None:
        self.roles: tuple[Role, ...] = tuple(roles)
        self.config, _ = resolve({"model": str(model)} | SETTINGS | settings, environ={})
        self.checkpoint: Checkpoint = checkpoints.resolve(self.config)
        self.processes: dict[int, EngineProcess] = {}  # by engine

    async def start(self, configs: Sequence[EngineConfig] | None = None) -> None:
        """Start one engine for each role; `configs` are their settings, if not all the same."""
        shape = self.checkpoint.shape
        self.engine = AsyncEngine(
            [],
            load_tokenizer(self.checkpoint, ""),
            model_name="tiny",
            max_model_len=shape.max_position_embeddings,
            eos_token_ids=shape.eos_token_ids,
            max_num_queued_reqs=1000,
            roles=(),
            dispatch=dispatch_settings(self.config),
            status_interval_s=0,
        )
        self.engine.start()
        for role, config in zip(self.roles, configs or [self.config] * 9, strict=False):
            self.add(role, config)
        await self.wait_ready()

    def add(self, role: Role, config: EngineConfig | None = None) -> int:
        """Start an engine; returns its number, which may be that of a dead one."""
        process = EngineProcess(config or self.config, self.checkpoint, len(self.processes))
        index = self.engine.add_engine(process.channel, role)
        if (old := self.processes.get(index)) is not None:
            old.stop()
        self.processes[index] = process
        return index

    async def wait_ready(self) -> None:
        """Until every engine that lives has loaded, and knows those that it reads from."""
        async with asyncio.timeout(READY_S):
            fleet = self.engine.dispatcher.fleet
            while any(it.state == "loading" for it in fleet):
                await self.engine.wait_change()
            for it in fleet:
                for engine_id in it.connected:
                    pair = fleet.pair(it, engine_id)
                    while pair.link is None and not pair.error:
                        await asyncio.sleep(0.01)

    def with_role(self, role: Role) -> list[int]:
        """The living engines of a role."""
        fleet = self.engine.dispatcher.fleet
        return [it.index for it in fleet if it.role == role and it.state != "gone"]

    def signal(self, engine: int, number: signal.Signals) -> None:
        """Send an engine's process a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.processes[engine].process.pid, number)

    async def kill(self, engine: int) -> None:
        """Kill an engine's process, and wait until the server knows."""
        self.signal(engine, signal.SIGKILL)
        it = self.engine.dispatcher.fleet[engine]
        while it.state != "gone":
            await asyncio.sleep(0.01)

    async def mend(self) -> None:
        """Replace the dead, and give everybody the role that they began with."""
        fleet = self.engine.dispatcher.fleet
        living = [it for it in fleet if it.state != "gone"]
        missing = list(self.roles)
        strays = []
        for it in living:
            if (it.next_role or it.role) in missing:
                missing.remove(it.next_role or it.role)
            else:
                strays.append(it)
        for it, role in zip(strays, missing, strict=False):
            self.engine.set_role(it.index, role)
        for role in missing[len(strays) :]:
            self.add(role)
        await self.wait_ready()

    async def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        name: str = "r",
        answer: Answer | None = None,
    ) -> Answer:
        """Run one greedy request to its end, whatever that is; `answer` is filled as it comes."""
        answer = answer or Answer()
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        outputs = self.engine.generate(
            prompt, params, request_id=name, on_close=answer.records.extend
        )
        try:
            async for output in outputs:
                answer.token_ids += output.token_ids
                answer.finish_reason = output.finish_reason
                answer.error = output.error or ""
        except TwostrokeError as error:
            answer.finish_reason, answer.error = "error", error.message
        finally:
            await outputs.aclose()
        return answer

    async def check_idle(self) -> None:
        """Wait until nothing is left of any request, and check every engine's books."""
        dispatcher = self.engine.dispatcher
        async with asyncio.timeout(IDLE_S):
            while True:
                answers = await self.engine.call("stats")
                stats = answers if isinstance(answers, list) else [answers]
                busy = ("num_running", "num_waiting", "num_loading", "num_holds", "kv_usage")
                left = [it[name] for it in stats for name in busy]
                ours = (dispatcher.num_holds, dispatcher.num_waiting, self.engine.num_unfinished)
                if not any(left) and not any(ours):
                    break
                await asyncio.sleep(0.05)
        await self.engine.call("check_integrity")
        for it in dispatcher.fleet:
            if it.state != "gone":
                assert (it.num_legs, it.num_holds, it.committed_blocks) == (0, 0, 0), it

    async def close(self) -> None:
        await self.engine.close()

    def stop(self) -> None:
        """End the processes. Not from within the event loop."""
        for process in self.processes.values():
            process.begin_stop()
        for process in self.processes.values():
            process.stop()
