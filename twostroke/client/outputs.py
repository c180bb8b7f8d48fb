"""One step's outputs, handed out to the samples concerned."""

import asyncio
import logging
from collections.abc import Callable

from twostroke.client.link import EngineLink
from twostroke.client.request import Sample
from twostroke.clock import Clock
from twostroke.ledger import Boundary
from twostroke.messages import EngineOutputs, Events, Finished, TokenLogprobs
from twostroke.metrics import Metrics

logger = logging.getLogger("twostroke")

_ROWS_PER_TURN = 256  # of a step's outputs, before other tasks get the event loop


class _Step:
    """What gathers while one step's outputs are handed out."""

    def __init__(self, link: EngineLink, time_s: float, now_s: float) -> None:
        self.link = link
        self.time_s = time_s  # when the engine finished the step
        self.aborts: list[int] = []
        self.first_token_s: list[float] = []
        self.inter_token_s: list[float] = []
        self._now_s = now_s

    def count_token(self, sample: Sample) -> None:
        """`sample` got tokens in this step."""
        if sample.last_token_s is None:
            self.first_token_s.append(self._now_s - sample.request.arrival_s)
            sample.engine = self.link.index
            sample.ledger.mark(Boundary.FIRST_TOKEN, self.time_s)
        else:
            self.inter_token_s.append(self.time_s - sample.last_token_s)
            if sample.ledger.num_preemptions:
                sample.ledger.mark(Boundary.TOKEN, self.time_s)
        sample.last_token_s = self.time_s


class OutputHandler:
    """Feeds `samples`, by handle, and takes those out that end.

    `abort` is given handles that the engine does not know to have ended; `on_end` each sample that
    has, with the engine that served it.
    """

    def __init__(
        self,
        samples: dict[int, Sample],
        metrics: Metrics,
        clock: Clock,
        *,
        abort: Callable[[list[int]], None],
        on_end: Callable[[EngineLink, Sample], None],
    ) -> None:
        self._samples = samples
        self._metrics = metrics
        self._clock = clock
        self._abort = abort
        self._on_end = on_end

    async def take(self, link: EngineLink, outputs: EngineOutputs) -> None:
        """Hand out one step's outputs: a dictionary look-up per row, and one abort message."""
        samples = self._samples
        step = _Step(link, outputs.time_s or self._clock.now(), self._clock.now())
        logprobs = self._note(link, outputs)
        finished = {end.handle: end for end in outputs.finished}
        token_ids, at = outputs.token_ids.tolist(), 0
        counts = zip(outputs.handles.tolist(), outputs.num_tokens.tolist(), strict=True)
        for row, (handle, count) in enumerate(counts, start=1):
            tokens = token_ids[at : at + count]
            at += count
            if (sample := samples.get(handle)) is not None:
                end = finished.pop(handle, None)
                self._feed(step, sample, tokens, end, logprobs.get(handle))
            if row % _ROWS_PER_TURN == 0:
                self._end_turn(step)
                await asyncio.sleep(0)
        for handle, end in finished.items():
            if (sample := samples.get(handle)) is not None:
                self._feed(step, sample, [], end, None)
        self._end_turn(step)

    def end(self, link: EngineLink, end: Finished, time_s: float) -> None:
        """End a sample by something other than its engine's outputs."""
        self._feed(_Step(link, time_s, time_s), self._samples[end.handle], [], end, None)

    def _note(self, link: EngineLink, outputs: EngineOutputs) -> dict[int, list[TokenLogprobs]]:
        """Everything about a step but its tokens; returns the tokens' log-probs by handle."""
        samples = self._samples
        if outputs.stats is not None:
            link.stats = outputs.stats
            self._metrics.engines[link.index].observe_stats(outputs.stats)
        self.mark(outputs.events)
        for received in outputs.kv_received:
            if (sample := samples.get(received.handle)) is not None:
                sample.received(received)
                self._metrics.engines[link.index].observe_transfer(received)
        for prefill in outputs.prefills:
            if (sample := samples.get(prefill.handle)) is not None:
                sample.cached_tokens = prefill.cached_tokens
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for entry in outputs.logprobs:
            if entry.prompt_start is None:
                logprobs[entry.handle] = entry.tokens
            elif (sample := samples.get(entry.handle)) is not None:
                sample.add_prompt_logprobs(entry.prompt_start, entry.tokens)
        return logprobs

    def _feed(
        self,
        step: "_Step",
        sample: Sample,
        token_ids: list[int],
        finished: Finished | None,
        logprobs: list[TokenLogprobs] | None,
    ) -> None:
        """Give one sample its tokens. An error here is that request's alone."""
        if token_ids:
            step.count_token(sample)
        try:
            output = sample.feed(token_ids, finished, logprobs)
        except Exception as error:
            logger.exception("%s: cannot read its output", sample.request.request_id)
            output = sample.fail(f"cannot read the output: {error}")
        if output.finish_reason is not None:
            del self._samples[sample.handle]
            sample.ledger.mark(Boundary.FINISHED, step.time_s)
            self._on_end(step.link, sample)
            if finished is None:  # the core does not know: a stop string, or an error here
                step.aborts.append(sample.handle)
        sample.request.put(output)

    def _end_turn(self, step: "_Step") -> None:
        """Send and record what has gathered; the event loop turns to others after this."""
        if step.aborts:
            self._abort(step.aborts)
        seen = self._metrics.engines[step.link.index]
        seen.observe_tokens(step.first_token_s, step.inter_token_s)
        step.aborts, step.first_token_s, step.inter_token_s = [], [], []

    def mark(self, events: Events | None) -> None:
        """Write boundaries into the ledgers concerned."""
        if events is None:
            return
        columns = (events.handles.tolist(), events.kinds.tolist(), events.times_s.tolist())
        for handle, kind, time_s in zip(*columns, strict=True):
            if (sample := self._samples.get(handle)) is not None:
                sample.ledger.mark(kind, time_s)
