"""What serving a request in one place or in two would cost, in seconds of latency.

    alone on e      queue on e + prefill beside what e decodes + delay of each request decoded there
    through p to d  queue on p + prefill on p + transfer behind what is under way + one step on d

The delay of others is what speaks against prefilling on an engine that decodes: each of its n
requests waits while the prompt's steps take longer than theirs. Steps are predicted by one fit for
all engines of the same tensor parallel size, as P learns of prompts and D of decodes; links by
what the reader measured, or the mean rate of its transfers.
"""

from twostroke.cost import StepCost, StepWork
from twostroke.cost_fit import OnlineFit
from twostroke.messages import StepSample
from twostroke.router.engines import Engine, Fleet
from twostroke.router.jobs import Job
from twostroke.router.policy import RoutingPolicy


class RouterCosts:
    """Learns from steps and transfers. Answers None where too little is known.

    A `step_cost` that is known is used in place of fits.
    """

    def __init__(
        self, fleet: Fleet, routing: RoutingPolicy, step_cost: StepCost | None = None
    ) -> None:
        self._fleet = fleet
        self._routing = routing
        self._step_cost = step_cost
        self._fits: dict[int, OnlineFit] = {}  # by tensor parallel size

    def observe(self, engine: Engine, step: StepSample) -> None:
        """An engine ran a step."""
        if self._step_cost is None:
            self._fits.setdefault(_ranks(engine), OnlineFit()).add(step)

    def alone_s(self, job: Job, engine: Engine) -> float | None:
        """Serving the whole request on one engine."""
        cost = self._cost_of(engine)
        if cost is None:
            return None
        decodes, prompt = self._decodes(engine), self._prompt(job, engine)
        step_s = cost.step_s(decodes)
        longer_s = cost.step_s(_sum(decodes, prompt)) - step_s
        queue_s = self._queue_s(cost, engine)
        return queue_s + step_s + longer_s * (1 + decodes.num_rows)

    def apart_s(self, job: Job, source: Engine, reader: Engine) -> float | None:
        """Prefilling on one engine, and moving what the other one lacks."""
        source_cost, reader_cost = self._cost_of(source), self._cost_of(reader)
        endpoint = source.endpoint
        if source_cost is None or reader_cost is None or endpoint is None:
            return None
        cached = self._routing.cached_tokens(reader.index, job.keys)
        num_tokens = max(job.num_prompt_tokens - cached, 0)
        layout = endpoint.layout
        num_messages = -(-num_tokens // layout.block_size) * layout.tensor_parallel_size
        transfer_s = self._fleet.pair(reader, endpoint.engine_id).transfer_s(
            num_messages, num_tokens * layout.bytes_per_token
        )
        if transfer_s is None:
            return None
        prompt = _sum(self._decodes(source), self._prompt(job, source))
        prefill_s = self._queue_s(source_cost, source) + source_cost.step_s(prompt)
        last_token = StepWork(1, 1, 1, job.num_prompt_tokens, job.num_prompt_tokens)
        return prefill_s + transfer_s + reader_cost.step_s(_sum(self._decodes(reader), last_token))

    def _cost_of(self, engine: Engine) -> StepCost | None:
        if self._step_cost is not None:
            return self._step_cost
        fit = self._fits.get(_ranks(engine))
        return None if fit is None else fit.cost()

    def _prompt(self, job: Job, engine: Engine) -> StepWork:
        """The part of the prompt that the engine would have to compute."""
        cached = min(self._routing.cached_tokens(engine.index, job.keys), job.num_prompt_tokens - 1)
        new = job.num_prompt_tokens - cached
        return StepWork(new, 1, 1, cached, new * (cached + new / 2))

    def _decodes(self, engine: Engine) -> StepWork:
        """A step of what the engine decodes now, if it is to decode."""
        if engine.role == "prefill":
            return StepWork(0, 0, 0, 0, 0)
        rows, stats = engine.stats.num_running, engine.stats
        size = 0 if engine.ready is None else engine.ready.block_size
        context = stats.kv_usage * engine.num_blocks * size
        return StepWork(rows, rows, rows, context, context)

    def _queue_s(self, cost: StepCost, engine: Engine) -> float:
        """Until the prompts that were sent there before are computed."""
        tokens = self._routing.prefill_tokens(engine.index)
        if not tokens:
            return 0.0
        return cost.step_s(StepWork(tokens, 1, 1, 0, 0))


def _ranks(engine: Engine) -> int:
    return 1 if engine.endpoint is None else engine.endpoint.layout.tensor_parallel_size


def _sum(one: StepWork, other: StepWork) -> StepWork:
    return StepWork(*(a + b for a, b in zip(one, other, strict=True)))
