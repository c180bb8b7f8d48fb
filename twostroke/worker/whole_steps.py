"""A step as one call: every layer's kernels in a `Program`.

In a step of few tokens each kernel is shared by all threads: they take parts of the weight. In a
large one threads take rows through all kernels between two attentions, a chunk at a time (see
`row_chunks`). The kernels are the same, and are those that `DecoderModel.forward` calls one by one,
so a token's result is the same to the last bit with weights in bfloat16 and in int8; what is saved
is the way to them (some 3 ms of a step of SmolLM2 on two cores), and to what they leave.

Weights that are kept in 4 or 8 bits have a program of their own, for very few tokens or, where they
are not kept in bfloat16 too, for all steps. Its products take and give more than bfloat16 holds:
what is between them stays in float32, and products add to the residual sum themselves.
"""

import sys
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from twostroke.arrays import Int32s, Int64s
from twostroke.model.elementwise import kernels
from twostroke.model.few_rows import MAX_ROWS, most_rows
from twostroke.model.few_rows_quantised import MAX_QUANTISED_ROWS
from twostroke.model.integer_products import products_of
from twostroke.model.layers import Mlp
from twostroke.model.llama import DecoderModel
from twostroke.model.thread_count import ThreadCounts
from twostroke.worker.attention import PagedAttention
from twostroke.worker.pool import Fact
from twostroke.worker.step_programs import Buffers, FewRowsProgram

if TYPE_CHECKING:
    from twostroke.worker.attention_numba import NumbaAttention
    from twostroke.worker.many_rows import ManyRowsProgram

_FIRST_ROTATIONS = 2048  # positions whose rotations are computed at once
_FIRST_CAPACITY = 1024  # tokens that there is room for at first
_TRIED_TOKENS = 16  # up to here, one thread may be faster than all


def whole_steps(model: DecoderModel, attention: PagedAttention) -> "WholeSteps | None":
    """The fast way to run steps of up to its `max_tokens`; None where some kernel is missing."""
    if kernels() is None or model.shard.size > 1 or not model.embedding.is_contiguous():
        return None
    from twostroke.worker.attention_numba import NumbaAttention  # here, because numba is there

    if not isinstance(attention, NumbaAttention):
        return None
    linears = [
        linear
        for layer in model.layers
        if isinstance(layer.mlp, Mlp)
        for linear in (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)
    ]
    if len(linears) < 4 * len(model.layers):
        return None
    whole = all(linear.few_rows is not None or linear.int8 is not None for linear in linears)
    few_bits = any(linear.quantised is not None for linear in linears)
    if not whole and any(linear.quantised is None for linear in linears):
        return None
    # Weights in int8 and in few bits alone have no form that oneDNN could multiply.
    in_bfloat16 = whole and all(linear.int8 is None for linear in linears)
    most = most_rows() if in_bfloat16 else None
    programs = [(most or MAX_ROWS, not whole)]
    if few_bits or model.lm_head.quantised is not None:
        programs.insert(0, (MAX_QUANTISED_ROWS, few_bits))
    return WholeSteps(model, attention, programs, any_number=most is None)


def kernels_fact(
    model: DecoderModel, attention: PagedAttention, steps: "WholeSteps | None"
) -> Fact:
    """For the start-up block: which of the ways to run a step this is, by what is there."""
    linears = [*model.linears, model.lm_head]
    products = {
        f"4 and 8 bits by {products_of(4).instruction}": any(
            it.quantised or it.int8 for it in linears
        ),
        "bfloat16 by AVX512-BF16": any(it.few_rows for it in linears),
    }
    own = [name for name, is_used in products.items() if is_used]
    if any(it.few_rows for it in linears) and (most := most_rows()) is not None:
        own[-1] += f" up to {most} rows, then by AMX"
    how = "layer by layer" if steps is None else "a step is one program"
    return "Kernels", how, f"products: {', '.join(own) or 'torch'}; attention: {attention.kind}"


class StepOutput(NamedTuple):
    """Of a step of `num_tokens` tokens, in rows of tensors that may have more."""

    num_tokens: int
    hidden_rows: Tensor
    logit_rows: Tensor | None = None
    best: Int32s | None = None  # each one's most likely next token, or -1: its logit is no number

    @property
    def hidden(self) -> Tensor:
        """[T, hidden]"""
        return self.hidden_rows[: self.num_tokens]

    @property
    def logits(self) -> Tensor | None:
        """Those of `DecoderModel.logits`: [T, vocab] float32."""
        return None if self.logit_rows is None else self.logit_rows[: self.num_tokens]


class WholeSteps:
    """Runs steps of at most `max_tokens` tokens, which may be any number. See `whole_steps`."""

    def __init__(
        self,
        model: DecoderModel,
        attention: "NumbaAttention",
        programs: list[tuple[int, bool]],
        *,
        any_number: bool,
    ) -> None:
        """`programs`: for up to how many tokens, and whether with weights of few bits; the first
        that is large enough runs. With `any_number` larger steps run too, with weights as the last
        one has."""
        kernel = kernels()
        assert kernel is not None
        # Where there is one, each step adds to it.
        self.seconds_by_kind: defaultdict[str, float] | None = None
        self._model, self._attention, self._kernels = model, attention, kernel
        self._buffers = Buffers(model, MAX_ROWS)
        self._rotations = torch.empty(0)
        self._programs = [
            FewRowsProgram(model, attention, kernel, self._buffers, most, few_bits=few_bits)
            for most, few_bits in programs
        ]
        self._many: ManyRowsProgram | None = None
        _, self._few_bits = programs[-1]
        self.max_tokens = sys.maxsize if any_number else programs[-1][0]
        self._trials = ThreadCounts(_TRIED_TOKENS)
        self._know_rotations(1)

    def forward(
        self,
        token_ids: Int64s,
        positions: Int64s,
        *,
        with_logits: bool = False,
        wanted: Int64s | None = None,
    ) -> StepOutput:
        """token_ids and positions [T] -> hidden states [T, hidden], as `DecoderModel.forward`.

        `with_logits` asks for logits too, which are given for few tokens where the LM head has a
        kernel. `wanted`, ascending, are the tokens whose hidden states are needed, where not all
        are: those of others may be anything. The attention must have planned the step. What is
        returned is overwritten by the next step.
        """
        self._know_rotations(int(positions.max()) + 1)
        if len(token_ids) > MAX_ROWS:
            return self._forward_many(token_ids, positions, wanted)
        count, buffers = len(token_ids), self._buffers
        program = self._few(count)
        buffers.token_ids[:count], buffers.positions[:count] = token_ids, positions
        with_logits &= program.has_logits
        num_threads = program.num_threads
        trial = self._trials.of(count) if with_logits else None
        if trial is not None:
            num_threads = trial.choose(num_threads)
        start_s = time.perf_counter()
        program.run(count, num_threads, self.seconds_by_kind, with_logits=with_logits)
        if trial is not None:
            trial.add(time.perf_counter() - start_s)
        if not with_logits:
            return StepOutput(count, buffers.hidden)
        return StepOutput(count, buffers.hidden, buffers.logits, buffers.best[:count])

    def _forward_many(
        self, token_ids: Int64s, positions: Int64s, wanted: Int64s | None
    ) -> StepOutput:
        count = len(token_ids)
        program = self._many_of(count)
        buffers = program.buffers
        buffers.token_ids[:count], buffers.positions[:count] = token_ids, positions
        program.run(count, program.num_threads, self.seconds_by_kind, wanted)
        return StepOutput(count, buffers.hidden)

    def calls_by_kind(self, num_tokens: int, *, with_logits: bool) -> Counter[str]:
        """How many kernels of each kind a step of that many tokens runs."""
        if num_tokens > MAX_ROWS:
            return self._many_of(num_tokens).kinds()
        return self._few(num_tokens).kinds(with_logits=with_logits)

    def _few(self, num_tokens: int) -> FewRowsProgram:
        return next(it for it in self._programs if num_tokens <= it.max_tokens)

    def _many_of(self, num_tokens: int) -> "ManyRowsProgram":
        """The program of large steps, made anew for larger ones."""
        if self._many is None or self._many.max_tokens < num_tokens:
            from twostroke.worker.many_rows import ManyRowsProgram  # here, because numba is there

            capacity = max(_FIRST_CAPACITY, 1 << (num_tokens - 1).bit_length())
            self._many = ManyRowsProgram(
                *(self._model, self._attention, self._kernels, capacity), few_bits=self._few_bits
            )
            self._many.look_up_in(self._rotations)
        return self._many

    def _know_rotations(self, num_positions: int) -> None:
        """Those of `Rotary`, kept: computing a few anew takes six operations of torch."""
        if num_positions > len(self._rotations):
            every = torch.arange(max(2 * num_positions, _FIRST_ROTATIONS))
            self._rotations = self._model.rotary.rotations(every).contiguous()
            for program in self._programs:
                program.look_up_in(self._rotations)
            if self._many is not None:
                self._many.look_up_in(self._rotations)
