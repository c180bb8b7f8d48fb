"""What a step's result does to its requests: tokens, stops, failures, ended transfers.

Nearly all rows of a decode step append one token and nothing else; they are handled as columns.
Rows that stop, verify drafts, belong to a preempted request or failed are handled one by one, in
row order.
"""

from dataclasses import dataclass, field

import numpy as np

from twostroke.arrays import ONE, ZERO, are_same, has_all, has_any, ones, total
from twostroke.core.load_failures import fail_loads
from twostroke.core.request import Request, Status
from twostroke.core.state import EngineState
from twostroke.core.step import Step
from twostroke.kv_messages import KvReport
from twostroke.messages import (
    Finished,
    FinishReason,
    Int32s,
    Int64s,
    RequestLogprobs,
    StepResult,
)

_LOAD_ERROR = "KV transfer failed: part of the prompt's KV did not arrive; limit: none; try again"


@dataclass(slots=True)
class Outcome:
    """What came of a step. Row i of the step kept `num_kept[i]` of its sampled tokens."""

    num_kept: Int32s
    token_ids: Int32s
    first_tokens: list[int] = field(default_factory=list)  # handles
    finished: list[Finished] = field(default_factory=list)
    num_prompt_tokens: int = 0  # of requests that got their first token


class Results:
    """Applies results to the state that it shares with the scheduler."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._async = state.config.async_scheduling

    def apply(self, step: Step, result: StepResult) -> Outcome:
        """Process the result of the oldest step in flight."""
        rows = len(step.slots)
        outcome = Outcome(np.zeros(rows, np.int32), result.token_ids)
        failed_loads: dict[int, Request] = {}
        if result.kv is not None and self._state.handoff is None:
            failed_loads = fail_loads(self._state, step, result.kv)
        errors = {error.row: error.error for error in result.errors}
        if rows:
            slow = self._apply_plain(step, result, outcome, failed_loads, errors)
            if slow:
                starts = _starts_of(result)
                for row in slow:
                    start = int(starts[row])
                    self._apply_row(step, result, row, start, outcome, failed_loads, errors)
                if outcome.finished:
                    self._state.compact()
                self._trim_tokens(result, starts, outcome)
        self._end_failed_loads(failed_loads, outcome)
        if result.kv is not None:
            self._end_transfers(result.kv)
        if len(result.num_drafts):
            self._take_drafts(step, result)
        return outcome

    # ------------------------------------------------------------ rows as columns

    def _apply_plain(
        self,
        step: Step,
        result: StepResult,
        outcome: Outcome,
        failed_loads: dict[int, Request],
        errors: dict[int, str],
    ) -> list[int]:
        """Append the token of each row that needs nothing else; returns the other rows."""
        if not len(result.token_ids) and not errors:
            return []  # pieces of prompts
        seats = self._state.seats
        slots, sampled, tokens = step.slots, result.num_sampled, result.token_ids
        drafting = self._state.config.num_spec_tokens > 0
        if drafting and has_all(step.num_drafts > ZERO):
            rest = sampled > ZERO
            rest[list(errors)] = True
            drafted: list[int] = rest.nonzero()[0].tolist()
            return drafted
        after = seats.known[slots] + ONE
        plain = after < seats.stop_at[slots]
        plain &= seats.uid[slots] == step.uids
        plain &= ~seats.special[slots]
        if drafting:
            plain &= step.num_drafts == ZERO
        if not are_same(sampled, ones(len(slots))):
            is_one = sampled == ONE
            plain &= is_one
            tokens = np.zeros(len(slots), np.int32)  # by row
            tokens[is_one] = (
                result.token_ids
                if not has_any(sampled > ONE)
                else result.token_ids[_starts_of(result)[is_one]]
            )
        if seats.have_stop_ids:
            plain &= ~seats.may_stop(tokens)
        for request in failed_loads.values():
            plain &= step.uids != request.uid
        for row in errors:
            plain[row] = False
        slow: list[int] = []
        if not has_all(plain):
            rest = ~plain & (sampled > ZERO)
            if errors:
                rest[list(errors)] = True
            slow = rest.nonzero()[0].tolist()
            slots, tokens, after = slots[plain], tokens[plain], after[plain]
        seats.tokens[slots, after - ONE] = tokens
        seats.known[slots] = after
        first = after == seats.num_prompt[slots] + ONE
        if has_any(first):
            outcome.first_tokens += seats.handle[slots[first]].tolist()
            outcome.num_prompt_tokens += total(seats.num_prompt[slots[first]])
        if self._async:
            pending = seats.placeholders[slots] - ONE
            seats.placeholders[slots] = pending
            full = np.minimum(seats.computed[slots] - pending, after)
            fills = full >= seats.register_at[slots]
            if has_any(fills):
                self._state.register_blocks(slots[fills], full[fills])
        outcome.num_kept[plain] = 1
        return slow

    def _trim_tokens(self, result: StepResult, starts: Int64s, outcome: Outcome) -> None:
        """Keep the first `num_kept` tokens of each row in the outcome's flat tokens."""
        sampled, kept = result.num_sampled, outcome.num_kept
        if len(outcome.token_ids) and not are_same(sampled, kept):
            place = np.arange(len(outcome.token_ids)) - starts.repeat(sampled)
            outcome.token_ids = outcome.token_ids[place < kept.repeat(sampled)]

    # ------------------------------------------------------------ rows one by one

    def _apply_row(
        self,
        step: Step,
        result: StepResult,
        row: int,
        start: int,
        outcome: Outcome,
        failed_loads: dict[int, Request],
        errors: dict[int, str],
    ) -> None:
        request = self._state.requests.get(int(step.uids[row]))
        if request is None or request.uid in failed_loads:
            return
        if row in errors:
            end = Finished(request.handle, FinishReason.ERROR, error=errors[row])
            self._end(request, end)
            outcome.finished.append(end)
            return
        seats = self._state.seats
        if request.slot >= 0:
            seats.read(request)
        if request.frames_to_discard > 0 and not self._state.faithful:
            self._discard(request)
            return
        new = result.token_ids[start : start + int(result.num_sampled[row])].tolist()
        rejected = max(int(step.num_drafts[row]) - (len(new) - 1), 0)
        if request.num_computed > 0:
            request.num_computed -= rejected
        if request.num_placeholders > 0:
            request.num_placeholders -= rejected
        if request.frames_to_discard > 0:
            self._discard(request)  # as vLLM does, after drafts were counted as rejected
            return
        if request.num_known == request.num_prompt_tokens:
            outcome.first_tokens.append(request.handle)
            outcome.num_prompt_tokens += request.num_prompt_tokens
        stop = self._append(request, new)
        outcome.num_kept[row] = len(new)
        if stop is not None:
            self._end(request, stop)
            outcome.finished.append(stop)

    def _discard(self, request: Request) -> None:
        """A result that was in flight when it became void."""
        request.frames_to_discard -= 1
        if request.slot >= 0:
            self._state.seats.write(request)

    def _append(self, request: Request, new: list[int]) -> Finished | None:
        """Append tokens up to the first stop; `new` is cut behind it."""
        state = self._state
        stop = None
        for count, token in enumerate(new, 1):
            length = request.num_known + count
            if reason := request.stop_reason(token, length, state.max_length):
                del new[count:]
                stop = Finished(request.handle, reason[0], stop_token_id=reason[1])
                break
        state.seats.append(request, new)
        if self._async:
            request.num_placeholders -= len(new)
        if request.slot >= 0:
            state.seats.write(request)
            if self._async:
                full = min(request.num_computed - request.num_placeholders, request.num_known)
                if full >= state.seats.register_at[request.slot]:
                    state.register_blocks(np.array([request.slot]), np.array([full], np.int32))
        return stop

    def _end(self, request: Request, end: Finished) -> None:
        if request.status is not Status.RUNNING:
            self._state.queues.remove(request)
        self._state.finish(request, end.reason)

    # ------------------------------------------------------------ drafts

    def _take_drafts(self, step: Step, result: StepResult) -> None:
        """Drafts that the worker proposed for the next step of each row."""
        seats = self._state.seats
        ends = np.cumsum(result.num_drafts)
        current = (seats.uid[step.slots] == step.uids) & step.samples
        for row in np.flatnonzero(current).tolist():
            count = min(int(result.num_drafts[row]), self._state.config.num_spec_tokens)
            slot, start = step.slots[row], int(ends[row] - result.num_drafts[row])
            seats.num_drafts[slot] = count
            seats.drafts[slot, :count] = result.draft_token_ids[start : start + count]

    # ------------------------------------------------------------ transfers

    def _end_failed_loads(self, failed_loads: dict[int, Request], outcome: Outcome) -> None:
        if self._state.config.kv_load_failure_policy == "recompute":
            return
        for request in failed_loads.values():
            end = Finished(request.handle, FinishReason.ERROR, error=_LOAD_ERROR)
            self._end(request, end)
            outcome.finished.append(end)
        if failed_loads:
            self._state.compact()

    def _end_transfers(self, report: KvReport) -> None:
        state = self._state
        assert state.connector is not None, "a transfer was reported, but nobody asked for any"
        state.connector.update_connector_output(report)
        for request_id in [*report.finished_recving, *report.failed_recving]:
            request = state.by_request_id.get(request_id)
            if request is None:
                continue
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                request.load_reported = True
                state.queues.wake(request)
            elif request.uid in state.held:
                state.release_held(request)
        for request_id in report.finished_sending:
            request = state.by_request_id.get(request_id)
            if request is not None and request.uid in state.held:
                state.release_held(request)


def _starts_of(result: StepResult) -> Int64s:
    """[rows] Where each row's tokens begin among all."""
    ends: Int64s = result.num_sampled.astype(np.int64).cumsum()
    return ends - result.num_sampled


def handles_of(step: Step, outcome: Outcome) -> tuple[Int64s, Int32s]:
    """Handles and token counts of the rows that kept tokens."""
    kept = outcome.num_kept > ZERO
    if has_all(kept):
        return step.handles, outcome.num_kept
    return step.handles[kept], outcome.num_kept[kept]


def logprobs_of(step: Step, result: StepResult, outcome: Outcome) -> list[RequestLogprobs]:
    """Log-probabilities by handle; those of dropped tokens are dropped too."""
    kept, handles = outcome.num_kept, step.handles
    named = []
    for entry in result.logprobs:
        of_prompt = entry.prompt_start is not None
        tokens = entry.tokens if of_prompt else entry.tokens[: int(kept[entry.row])]
        if tokens:
            named.append(RequestLogprobs(int(handles[entry.row]), tokens, entry.prompt_start))
    return named
