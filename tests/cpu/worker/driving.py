"""Drives a worker with plans that are right but arbitrary: a stand-in for the core in tests."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from twostroke.config import EngineConfig
from twostroke.messages import (
    NO_TOKENS,
    NewRequest,
    RowError,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

BLOCK_SIZE = 8
GREEDY = SamplingParams(temperature=0.0)


def small_config(**changes: object) -> EngineConfig:
    """Settings of a worker for the tiny model; float32 so that tokens can be compared exactly."""
    settings: dict[str, object] = {
        "device": "cpu",
        "dtype": "float32",
        "cpu_threads": 1,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 8,
        "max_model_len": 96,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": 128,
    }
    return EngineConfig(**(settings | changes))


@dataclass
class Request:
    """One request and what has come of it."""

    prompt: list[int]
    max_tokens: int = 8
    params: SamplingParams = GREEDY
    stop_token_ids: tuple[int, ...] = ()
    request_id: str = ""
    outputs: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str = ""
    seat: int = -1
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.outputs

    @property
    def done(self) -> bool:
        return len(self.outputs) == self.max_tokens or self.error != ""


class Driver:
    """Plans steps for a worker, seat by seat, with random chunks, row order and preemptions."""

    def __init__(
        self, run: Callable[[StepPlan], StepResult], *, seed: int = 0, num_blocks: int = 128
    ) -> None:
        self._run = run
        self._random = random.Random(seed)
        self._free_blocks = list(range(1, num_blocks))
        self._random.shuffle(self._free_blocks)
        self._free_seats = list(range(8))
        self._random.shuffle(self._free_seats)
        self._freed: list[int] = []
        self._step = 0

    def serve(
        self, requests: list[Request], *, chunk: int = 1000, preempt: float = 0.0
    ) -> list[list[int]]:
        """Run all to their end; each row gets at most `chunk` tokens a step."""
        while not all(request.done for request in requests):
            for request in requests:
                if request.seat >= 0 and (request.done or self._random.random() < preempt):
                    self._vacate(request)
            live = [request for request in requests if not request.done]
            self._random.shuffle(live)
            self._step_rows([(r, self._random.randint(1, chunk)) for r in live[:8]])
        for request in requests:
            if request.seat >= 0:
                self._vacate(request)
        self._step_rows([])  # tells the worker which seats are free
        return [request.outputs for request in requests]

    def _vacate(self, request: Request) -> None:
        self._freed.append(request.seat)
        self._free_seats.append(request.seat)
        self._free_blocks += request.blocks
        request.seat, request.num_computed, request.blocks = -1, 0, []

    def _step_rows(self, wanted: list[tuple[Request, int]]) -> None:
        new, grown = [], []
        rows: list[tuple[Request, int]] = []
        for request, limit in wanted:
            if request.seat < 0 and not self._free_seats:
                continue
            count = min(limit, len(request.tokens) - request.num_computed)
            needed = -(-(request.num_computed + count) // BLOCK_SIZE) - len(request.blocks)
            blocks = [self._free_blocks.pop() for _ in range(needed)]
            request.blocks += blocks
            if request.seat < 0:
                request.seat = self._free_seats.pop()
                new.append(_new_request(request))
            elif blocks:
                grown.append((request.seat, blocks))
            rows.append((request, count))
        plan = StepPlan(
            step=self._step,
            slots=_ints(r.seat for r, _ in rows),
            num_computed=_ints(r.num_computed for r, _ in rows),
            num_scheduled=_ints(count for _, count in rows),
            samples=np.array([r.num_computed + n == len(r.tokens) for r, n in rows], np.bool_),
            new=new,
            freed_slots=_ints(self._freed),
            grown_slots=_ints(seat for seat, _ in grown),
            grown_counts=_ints(len(blocks) for _, blocks in grown),
            grown_blocks=_ints(block for _, blocks in grown for block in blocks),
        )
        self._freed = []
        self._apply(plan, rows, self._run(plan))
        self._step += 1

    def _apply(self, plan: StepPlan, rows: list[tuple[Request, int]], result: StepResult) -> None:
        assert result.step == plan.step
        assert result.started_s <= result.ended_s
        errors: dict[int, RowError] = {error.row: error for error in result.errors}
        tokens = iter(result.token_ids.tolist())
        for i, (request, count) in enumerate(rows):
            request.num_computed += count
            if i in errors:
                request.error = errors[i].error
            assert result.num_sampled[i] == (plan.samples[i] and i not in errors)
            if result.num_sampled[i]:
                request.outputs.append(next(tokens))
        assert next(tokens, None) is None
        for report in result.logprobs:
            request = rows[report.row][0]
            of_prompt = report.prompt_start is not None
            (request.prompt_logprobs if of_prompt else request.logprobs).extend(report.tokens)


def _new_request(request: Request) -> NewRequest:
    return NewRequest(
        slot=request.seat,
        request_id=request.request_id or str(request.prompt),
        token_ids=_ints(request.tokens),
        num_prompt_tokens=len(request.prompt),
        params=request.params,
        stop_token_ids=request.stop_token_ids,
        block_ids=_ints(request.blocks),
    )


def _ints(values) -> np.ndarray:
    values = list(values)
    return np.array(values, np.int32) if values else NO_TOKENS
