"""Whole engines in one process: the core, the connector's two halves, and ranks as threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from tests.cpu.model.ranks import ThreadGroup, _Table
from twostroke.checkpoint import open_checkpoint
from twostroke.clock import WallClock
from twostroke.config import EngineConfig
from twostroke.connector.handoff import HandoffScheduler
from twostroke.connector.transfer import RankReports
from twostroke.core.loop import EngineCore
from twostroke.kv_messages import KvEndpoint, KvReady, KvReceive, KvReceived, KvRelease, KvSend
from twostroke.messages import (
    AddRequest,
    EngineReady,
    Finished,
    SamplingParams,
    StepPlan,
    StepResult,
)
from twostroke.proc.core_main import scheduler_config
from twostroke.worker.executor import ProcessExecutor
from twostroke.worker.handoff import new_engine_id
from twostroke.worker.runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0)
MAX_TURNS = 5000


class Ranks:
    """Runs plans on ranks that are threads of this process, as `ProcessExecutor` does on others."""

    def __init__(self, config: EngineConfig, path: Path) -> None:
        size = config.tensor_parallel_size
        self._threads = ThreadPoolExecutor(size)
        self._reports = RankReports(size)
        table, engine_id = _Table(size), new_engine_id()
        checkpoint = open_checkpoint(path, load_format=config.load_format)

        def load(rank: int) -> ModelRunner:
            return ModelRunner(config, checkpoint, None, ThreadGroup(rank, size, table), engine_id)

        self.runners = list(self._threads.map(load, range(size)))

        self.num_blocks = self.runners[0].num_blocks
        self.max_model_len = self.runners[0].max_model_len

    @property
    def endpoint(self) -> KvEndpoint | None:
        endpoints = [runner.endpoint for runner in self.runners if runner.endpoint]
        if not endpoints:
            return None
        addresses = [address for endpoint in endpoints for address in endpoint.addresses]
        return msgspec.structs.replace(endpoints[0], addresses=addresses)

    def run(self, plan: StepPlan) -> StepResult:
        results = list(self._threads.map(lambda runner: runner.run(plan), self.runners))
        results[0].kv = self._reports.merge([result.kv for result in results])
        return results[0]

    def shutdown(self) -> None:
        for runner in self.runners:
            runner.shutdown()
        self._threads.shutdown()


class Processes(ProcessExecutor):
    """Worker processes, one step at a time."""

    def __init__(self, config: EngineConfig, path: Path) -> None:
        super().__init__(config, open_checkpoint(path))

    def run(self, plan: StepPlan) -> StepResult:
        self.submit(plan)
        return self.collect()


class Engine:
    """One engine, turned by hand; requests are named by handle."""

    def __init__(
        self, config: EngineConfig, path: Path, workers: type[Ranks] | type[Processes] = Ranks
    ) -> None:
        self.executor = workers(config, path)
        ready = EngineReady(
            engine=0,
            max_model_len=self.executor.max_model_len,
            num_blocks=self.executor.num_blocks,
            block_size=config.block_size,
        )
        clock = WallClock()
        endpoint = self.executor.endpoint
        connector = HandoffScheduler(clock, endpoint) if endpoint else None
        self.core = EngineCore(
            scheduler_config(config, ready), clock, connector=connector, check=True
        )
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        self.ready: dict[int, list[KvReady]] = {}
        self.received: dict[int, KvReceived] = {}
        self.num_tickets = 0

    def add(
        self, handle: int, prompt: list[int], max_tokens: int, params: SamplingParams, **kv: object
    ) -> None:
        self.tokens[handle] = []
        self.core.add(
            AddRequest(
                handle=handle,
                request_id=f"request {handle}",
                prompt_token_ids=np.array(prompt, np.int32),
                params=params,
                max_tokens=max_tokens,
                **kv,
            )
        )

    def turn(self) -> None:
        if (plan := self.core.begin()) is not None:
            self._note(self.core.finish(self.executor.run(plan)))
        if (outputs := self.core.take_outputs()) is not None:
            self._note(outputs)

    def _note(self, outputs) -> None:
        tokens = iter(outputs.token_ids.tolist())
        for handle, number in zip(outputs.handles.tolist(), outputs.num_tokens, strict=True):
            self.tokens[handle] += [next(tokens) for _ in range(number)]
        self.finished |= {end.handle: end for end in outputs.finished}
        self.num_tickets += len(outputs.kv_ready)
        for message in outputs.kv_ready:
            self.ready.setdefault(message.handle, []).append(message)
        self.received |= {message.handle: message for message in outputs.kv_received}

    def generate(self, handle: int, prompt: list[int], max_tokens: int, params=GREEDY) -> list[int]:
        """All by itself."""
        self.add(handle, prompt, max_tokens, params)
        turn_until(lambda: handle in self.finished, self)
        return self.tokens[handle]

    def close(self) -> None:
        try:
            turn_until(self.core.is_empty, self)
            self.core.check_integrity()
        finally:
            self.executor.shutdown()


def turn_until(done: Callable[[], bool], *engines: Engine) -> None:
    for _ in range(MAX_TURNS):
        if done():
            return
        for engine in engines:
            engine.turn()
    raise AssertionError(f"not done after {MAX_TURNS} turns")


def hand_over(
    prefill: Engine,
    decode: Engine,
    handle: int,
    prompt: list[int],
    max_tokens: int,
    params: SamplingParams = GREEDY,
    *,
    stream: bool = False,
) -> list[int]:
    """What the router does: the tokens of `decode`, of a prompt that `prefill` computed."""
    receive = KvReceive(num_tokens=len(prompt), timeout_s=30)
    if stream:
        decode.add(handle, prompt, max_tokens, params, kv_receive=receive)
        decode.turn()
    prefill.add(handle, prompt, 1, params, kv_send=KvSend(lease_s=30, stream=stream))
    if stream:
        while handle not in decode.finished:
            for message in prefill.ready.pop(handle, []):
                ticket = message.ticket
                decode.core.apply_kv(message)
            prefill.turn()
            decode.turn()
    else:
        turn_until(lambda: handle in prefill.ready, prefill)
        (message,) = prefill.ready.pop(handle)
        ticket = message.ticket
        receive = msgspec.structs.replace(receive, ticket=ticket)
        decode.add(handle, prompt, max_tokens, params, kv_receive=receive)
        turn_until(lambda: handle in decode.finished, decode)
    prefill.core.apply_kv(KvRelease([ticket.transfer_id]))
    return decode.tokens[handle]
