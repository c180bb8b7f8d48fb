"""A second, smaller model that drafts greedily, some steps ahead of the one that is served.

Its KV lies in a pool of its own whose blocks have the ids of the model's pool, so that block
tables, prefix hits and preemption hold for both. Prompt chunks run through it right behind the
model; what is decoded it catches up on when it drafts:

    |<------ num_drafted ------>|                   KV in place, drafts that were rejected cut off
    |<------------ known tokens ------------>|      first pass: catches up, yields draft 1
                                             1 2 3  further passes: one draft each

A cached prefix may hold a position that the draft model never ran (a request's last tokens): drafts
get worse there, tokens do not.
"""

import numpy as np
import torch
from torch import Tensor

from twostroke.errors import ConfigError
from twostroke.messages import Int32s, StepPlan
from twostroke.model.llama import DecoderModel
from twostroke.shape import ModelShape
from twostroke.worker.attention import make_attention
from twostroke.worker.inputs import SeatTable, StepInputs
from twostroke.worker.sampler import argmax


def check_vocabulary(draft: ModelShape, model: ModelShape, name: str) -> None:
    """Raise ConfigError when the two models cannot speak of the same tokens."""
    if draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"--speculative-model {name} has a vocabulary of {draft.vocab_size:,} tokens; "
            f"the model's has {model.vocab_size:,}",
            hint="choose a smaller model of the same family",
        )


class ModelDrafter:
    """Drafts with `model`, whose KV is in `kv_pool`."""

    def __init__(self, model: DecoderModel, kv_pool: Tensor, seats: SeatTable) -> None:
        self._model = model
        self._device = kv_pool.device
        self._attention = make_attention(kv_pool, model.shape.num_heads, model.shape.head_dim**-0.5)
        self._seats = seats
        self._num_drafted = np.zeros(len(seats.num_tokens), np.int32)

    def follow(self, plan: StepPlan, inputs: StepInputs) -> None:
        """Run the prompt chunks of a step; rows that decode wait until they are drafted for."""
        arrived = np.isin(plan.slots, [new.slot for new in plan.new])
        self._num_drafted[plan.slots[arrived]] = inputs.num_computed[arrived]
        ends = np.minimum(
            inputs.num_computed + np.diff(inputs.query_start), self._seats.num_tokens[plan.slots]
        )
        prefills = np.flatnonzero(~plan.samples | (ends - inputs.num_computed > 1))
        if len(prefills):
            seats, ends = plan.slots[prefills], ends[prefills]
            starts = np.minimum(self._num_drafted[seats], inputs.num_computed[prefills])
            self.forward(self._seats.rows(seats, starts, ends - starts))
            self._num_drafted[seats] = ends

    def observe(self, seats: Int32s, widths: Int32s, counts: Int32s) -> None:
        pass

    def propose(self, seats: Int32s, limits: Int32s, num_rows: int) -> Int32s:
        """Greedy drafts, as many as limits, the seats' blocks and the model's length allow."""
        table, known = self._seats, self._seats.num_tokens[seats]
        # Draft j needs the KV of what precedes it, up to position known + j - 2.
        room = np.minimum(table.num_blocks[seats] * table.block_size, self._max_model_len)
        counts = np.clip(np.minimum(limits, room - known + 1), 0, None)
        starts = np.minimum(self._num_drafted[seats], known - 1)
        for done in range(int(counts.max(initial=0))):
            rows = np.flatnonzero(counts > done)
            theirs, ends = seats[rows], known[rows] + done
            first = starts[rows] if done == 0 else ends - 1
            inputs = table.rows(theirs, first, ends - first)
            hidden = self.forward(inputs)
            last = torch.from_numpy(inputs.query_start[1:].astype(np.int64) - 1).to(self._device)
            drafts = argmax(self._model.logits(hidden[last]))
            table.token_ids[theirs, ends] = drafts.cpu().numpy()
            self._num_drafted[theirs] = ends
        return counts

    @property
    def _max_model_len(self) -> int:
        return self._model.shape.max_position_embeddings

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> Tensor:
        """Hidden states [T, hidden] after the final norm."""
        self._attention.plan(inputs.query_start, inputs.num_computed, inputs.block_tables)
        token_ids = torch.from_numpy(inputs.token_ids).to(self._device)
        positions = torch.from_numpy(inputs.positions).to(self._device)
        return self._model.forward(token_ids, positions, self._attention)
