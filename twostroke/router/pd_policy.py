"""Where both strokes of a request run: through P and D, or on one engine.

Room on D is a hard constraint: without any the request waits in the router, where it takes nobody's
memory. Among engines with room the least loaded wins, less what it has cached (`policy`), or with
`--pd-policy cost` whatever is predicted to be cheapest (`costs`).
"""

from typing import NamedTuple

from twostroke.clock import Clock
from twostroke.errors import EngineDeadError
from twostroke.router.costs import RouterCosts
from twostroke.router.engines import Engine, Fleet, Need
from twostroke.router.jobs import DispatchSettings, Job
from twostroke.router.policy import RoutingPolicy


class Placement(NamedTuple):
    """Prefill on `prefill`, or where it decodes when that is None; `reason` is for the counters."""

    prefill: Engine | None
    decode: Engine
    reason: str


class PdPolicy:
    """Chooses engines for jobs. Changes nothing."""

    def __init__(
        self, clock: Clock, settings: DispatchSettings, fleet: Fleet, routing: RoutingPolicy
    ) -> None:
        self._clock = clock
        self._settings = settings
        self._fleet = fleet
        self._routing = routing
        self.costs = RouterCosts(fleet, routing, settings.step_cost)
        self.expected_output_tokens = float(settings.expected_output_tokens)

    def place(self, job: Job) -> Placement | None:
        """Where a job is to run; None: it must wait. Raises EngineDeadError: nowhere, ever."""
        fleet = self._fleet
        if not fleet.has_roles:
            engines = fleet.with_role("both")
            return self._whole(job, engines, "") if engines else None
        one_token = job.request.max_tokens == 1 and job.request.params.prompt_logprobs is None
        if one_token and (engines := self._without(job, fleet.with_role("prefill"))):
            return self._whole(job, engines, "one_token")
        readers = self._without(job, fleet.with_role("decode", "both"))
        roomy = [engine for engine in readers if engine.has_room(self.need(job, engine))]
        if not roomy:
            return None
        if reason := self._forced(job):
            return self._whole(job, roomy, reason)
        pairs = self._pairs(job, roomy)
        if not pairs:
            return self._alone(job, roomy)
        if self._settings.pd_policy == "cost":
            return self._cheapest(job, roomy, pairs)
        return self._least_loaded(job, pairs, "always")

    def reader(self, job: Job, source: Engine) -> Engine | None:
        """Another engine to read the KV that `source` holds of a job, with room if there is any."""
        now_s = self._clock.now()
        readers = [
            engine
            for engine in self._without(job, self._fleet.with_role("decode", "both"))
            if self._fleet.may_read(engine, source, now_s)
        ]
        roomy = [engine for engine in readers if engine.has_room(self.need(job, engine))]
        return self._best(job, roomy or readers) if readers else None

    def source(self, job: Job, reader: Engine) -> Engine | None:
        """An engine to prefill for a reader."""
        sources = self._sources(job, reader)
        return self._best(job, sources) if sources else None

    def need(self, job: Job, engine: Engine) -> Need:
        """Blocks that the job should come to there, by the mean output so far."""
        output = min(job.request.max_tokens, round(self.expected_output_tokens))
        return engine.need(job.num_prompt_tokens, output)

    def _forced(self, job: Job) -> str:
        """Why a job must not be handed over, or nothing."""
        if job.whole_reason:
            return job.whole_reason
        if job.request.params.prompt_logprobs is not None:
            return "prompt_logprobs"
        if self._settings.pd_policy == "never":
            return "never"
        if job.num_prompt_tokens < 2:
            return "short"  # the last token is computed in any case
        return ""

    def _pairs(self, job: Job, roomy: list[Engine]) -> dict[Engine, list[Engine]]:
        """Who could prefill, by who could decode."""
        sources = {reader: self._sources(job, reader) for reader in roomy}
        return {reader: usable for reader, usable in sources.items() if usable}

    def _least_loaded(self, job: Job, pairs: dict[Engine, list[Engine]], reason: str) -> Placement:
        reader = self._best(job, list(pairs))
        return Placement(self._best(job, pairs[reader]), reader, reason)

    def _cheapest(
        self, job: Job, roomy: list[Engine], pairs: dict[Engine, list[Engine]]
    ) -> Placement:
        """Where the predicted latency is least, the delay of others included."""
        alone = [(self.costs.alone_s(job, engine), engine) for engine in roomy]
        apart = [
            (self.costs.apart_s(job, source, reader), source, reader)
            for reader, sources in pairs.items()
            for source in sources
        ]
        known_alone = [(s, engine) for s, engine in alone if s is not None]
        known_apart = [(s, source, reader) for s, source, reader in apart if s is not None]
        if not known_alone or not known_apart:
            return self._least_loaded(job, pairs, "unknown_cost")
        alone_s, engine = min(known_alone, key=lambda it: it[0])
        apart_s, source, reader = min(known_apart, key=lambda it: it[0])
        if apart_s <= alone_s:
            return Placement(source, reader, "cheaper")
        cached = self._routing.cached_tokens(engine.index, job.keys)
        reason = "cached" if 2 * cached >= job.num_prompt_tokens else "cheaper"
        return Placement(None, engine, reason)

    def _sources(self, job: Job, reader: Engine) -> list[Engine]:
        """Engines that could prefill the job for this reader."""
        now_s = self._clock.now()
        return [
            engine
            for engine in self._without(job, self._fleet.with_role("prefill", "both"))
            if engine.need(job.num_prompt_tokens, 0).blocks <= engine.num_blocks
            and self._fleet.may_read(reader, engine, now_s)
        ]

    def _alone(self, job: Job, roomy: list[Engine]) -> Placement:
        """No hand-off is possible now: there is nobody to read from."""
        limit = self._settings.recompute_max_tokens
        both = [engine for engine in roomy if engine.role == "both"]
        if both or limit is None or job.num_prompt_tokens <= limit:
            return self._whole(job, both or roomy, "no_prefill_engine")
        raise EngineDeadError(
            f"no engine is there to prefill, and the prompt has {job.num_prompt_tokens:,} tokens; "
            f"limit: {limit:,} where it decodes",
            hint="try again later, or restart with a larger --kv-recompute-max-tokens",
        )

    def _whole(self, job: Job, engines: list[Engine], reason: str) -> Placement:
        return Placement(None, self._best(job, engines), reason)

    def _best(self, job: Job, engines: list[Engine]) -> Engine:
        indices = [engine.index for engine in engines]
        for index in indices:
            if index in job.beside:
                return self._fleet[index]
        return self._fleet[self._routing.choose(job.keys, indices)]

    def _without(self, job: Job, engines: list[Engine]) -> list[Engine]:
        """Not where it has failed, if it can be helped."""
        return [engine for engine in engines if engine is not job.avoid] or engines
