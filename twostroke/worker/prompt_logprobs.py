"""Log-probabilities of prompt tokens, for the requests that want them (`prompt_logprobs`)."""

import numpy as np
import torch
from torch import Tensor

from twostroke.messages import RowLogprobs, StepPlan
from twostroke.model.llama import DecoderModel
from twostroke.model.parallel import Group
from twostroke.worker.inputs import SeatTable, StepInputs
from twostroke.worker.logprobs import token_logprobs

# They need the LM head at every position; this bounds the logits held at once.
LOGITS_BYTES = 64 << 20


class PromptLogprobs:
    """Knows who sits where and wants them; reports those of each step's prompt chunks."""

    def __init__(self, model: DecoderModel, seats: SeatTable, group: Group) -> None:
        self._model, self._seats, self._group = model, seats, group
        # Of each seat: how many of the most likely tokens are wanted, or -1.
        self._num_top = np.full(len(seats.num_tokens), -1, np.int32)
        self._num_seats = 0  # that want any

    @property
    def wanted(self) -> bool:
        """Whether anybody wants hidden states of tokens that are not sampled from."""
        return self._num_seats > 0

    def follow(self, plan: StepPlan) -> None:
        """Who leaves, and what those who come want."""
        for seat in plan.freed_slots.tolist() if self.wanted else ():
            self._want(seat, -1)
        for new in plan.new:
            # A request that comes back with outputs has had its prompt's log-probs reported.
            has_outputs = len(new.token_ids) > new.num_prompt_tokens
            num_top = None if has_outputs else new.params.prompt_logprobs
            self._want(new.slot, -1 if num_top is None else num_top)

    def _want(self, seat: int, num_top: int) -> None:
        self._num_seats += (num_top >= 0) - int(self._num_top[seat] >= 0)
        self._num_top[seat] = num_top

    def report(self, plan: StepPlan, inputs: StepInputs, hidden: Tensor) -> list[RowLogprobs]:
        """Those of the prompt tokens that this step's rows predict; `hidden` [T, hidden] is of all
        tokens. On other ranks than 0 they are empty: they have helped to compute logits."""
        if not self.wanted:
            return []
        rows = np.flatnonzero(self._num_top[plan.slots] >= 0).tolist()
        return [it for row in rows if (it := self._report_row(row, plan, inputs, hidden))]

    @torch.inference_mode()
    def _report_row(
        self, row: int, plan: StepPlan, inputs: StepInputs, hidden: Tensor
    ) -> RowLogprobs | None:
        seat, first = int(plan.slots[row]), int(inputs.num_computed[row])
        # Position p predicts token p + 1; the last prompt position predicts an output.
        num_prompt = int(self._seats.num_prompt_tokens[seat])
        count = min(int(plan.num_scheduled[row]), num_prompt - 1 - first)
        if count <= 0:
            return None
        start = int(inputs.query_start[row])
        targets = self._seats.token_ids[seat, first + 1 : first + 1 + count]
        num_top = int(self._num_top[seat])
        report = RowLogprobs(row, [], prompt_start=first + 1)
        chunk = max(1, LOGITS_BYTES // (4 * self._model.shape.vocab_size))
        for at in range(0, count, chunk):
            tokens = torch.from_numpy(targets[at : at + chunk].astype(np.int64))
            logits = self._model.logits(hidden[start + at : start + at + len(tokens)])
            if self._group.rank == 0:
                logprobs = torch.log_softmax(logits, -1)
                report.tokens += token_logprobs(
                    logprobs, tokens.to(logits.device), [num_top] * len(tokens)
                )
        return report
