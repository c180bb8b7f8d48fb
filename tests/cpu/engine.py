"""Drives an EngineCore and an executor without processes or sockets, and gathers what comes."""

from collections import defaultdict

import numpy as np

from twostroke.core.executor import Executor
from twostroke.core.loop import EngineCore
from twostroke.messages import AddRequest, EngineOutputs, FinishReason, TokenLogprobs


class Run:
    """What came of a run, by handle."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[TokenLogprobs]] = defaultdict(list)
        self.ended: dict[int, tuple[FinishReason, int | None]] = {}

    def take(self, outputs: EngineOutputs) -> None:
        ends = np.cumsum(outputs.num_tokens)
        for handle, end, count in zip(outputs.handles, ends, outputs.num_tokens, strict=True):
            self.tokens[int(handle)] += outputs.token_ids[end - count : end].tolist()
        for entry in outputs.logprobs:
            self.logprobs[entry.handle] += entry.tokens
        self.ended |= {f.handle: (f.reason, f.stop_token_id) for f in outputs.finished}

    @property
    def accepted(self) -> int:
        return self.core.stats().spec_decode_num_accepted_tokens

    @property
    def drafted(self) -> int:
        return self.core.stats().spec_decode_num_draft_tokens


def drive(
    core: EngineCore,
    executor: Executor,
    requests: list[AddRequest],
    *,
    arrivals: list[int] | None = None,
    aborts: dict[int, int] | None = None,
) -> Run:
    """Run all to their end; request i arrives at step arrivals[i], `aborts` maps step to handle."""
    run = Run(core)
    depth = 2 if core.config.async_scheduling else 1
    arrivals = arrivals or [0] * len(requests)
    step = 0
    while step <= max(arrivals) or core.has_work() or core.num_in_flight:
        for request, arrival in zip(requests, arrivals, strict=True):
            if arrival == step:
                core.add(request)
        if aborts and step in aborts:
            core.abort([aborts[step]])
        step += 1
        assert step < 5000, "the engine does not come to an end"
        plan = core.begin()
        if plan is not None:
            executor.submit(plan)
            if len(plan.slots) and core.num_in_flight < depth:
                continue
        if core.num_in_flight:
            run.take(core.finish(executor.collect()))
        if (outputs := core.take_outputs()) is not None:
            run.take(outputs)
    core.check_integrity()
    assert core.stats().kv_usage == 0
    assert set(run.ended) == {request.handle for request in requests}
    return run
