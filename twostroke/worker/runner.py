"""One worker's model on one device: a `StepPlan` in, a `StepResult` out.

    plan ▶ seats (who left, came, grew) ▶ flat inputs ▶ model + paged attention ▶ hidden states
         ▶ LM head of the rows that sample ▶ sampler ▶ tokens, kept at their seats and returned

With speculation, rows of decodes end in draft tokens, and the sampler says how many of them hold;
drafts are made right before the step that verifies them, or right after a step when the core plans
with knowledge of them (see `drafting`).

A rank of a tensor-parallel group runs the same plans on its part of the model. Rank 0 samples and
tells the others: were each to sample for itself, a single difference in rounding would leave them
with different tokens, and with KV that belongs to no text at all.

The tokens of a step are written to the seats here, so the next plan may be made before they are
known. What is one request's fault comes back as a `RowError` of its row; an exception means that
the worker cannot go on.
"""

import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from twostroke.checkpoint import Checkpoint
from twostroke.config import EngineConfig
from twostroke.connector.base import KvConnectorWorker
from twostroke.kv_messages import KvCommands, KvEndpoint, KvLoad, KvReport
from twostroke.messages import (
    NO_TOKENS,
    Int32s,
    Int64s,
    RowError,
    RowLogprobs,
    StepPlan,
    StepResult,
)
from twostroke.model.llama import DecoderModel
from twostroke.model.parallel import ALONE, Group
from twostroke.worker.attention import make_attention
from twostroke.worker.draft_model import ModelDrafter
from twostroke.worker.drafting import Drafter, NgramDrafter, step_costs
from twostroke.worker.inputs import (
    PlanError,
    SeatTable,
    StepInputs,
    null_block_inputs,
    spans,
    warm_up_rows,
)
from twostroke.worker.loading import Progress, load
from twostroke.worker.pages import PagesAhead
from twostroke.worker.pool import bytes_text
from twostroke.worker.prompt_logprobs import PromptLogprobs
from twostroke.worker.sampler import Sampled, Sampler
from twostroke.worker.whole_steps import StepOutput, kernels_fact, whole_steps

IDLE_WAIT_S = 0.005  # for a transfer, in a step without rows; a request that comes waits as long


class ModelRunner:
    """Loads a rank's part of a model (see `loading`), and runs plans in order.

    Raises ConfigError or ModelError when that cannot work. `facts` are (name, value, reason) for
    the start-up block. Not thread-safe: build and use it in one thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        progress: Progress | None = None,
        group: Group = ALONE,
        engine_id: str = "",
    ) -> None:
        """All ranks of an engine that hands KV over have the same `engine_id`."""
        self.group = group
        loaded = load(config, checkpoint, progress, group, engine_id)
        self.device, self.model = loaded.device, loaded.model
        self.num_blocks, self.max_model_len = loaded.size.num_blocks, loaded.size.max_model_len
        self.kv_pool, self.connector = loaded.kv_pool, loaded.connector
        self.facts = [*loaded.facts]
        self._pages = PagesAhead(self.kv_pool)
        shape, num_heads = self.model.shape, self.model.shard.num_heads
        self.attention = make_attention(
            self.kv_pool,
            num_heads,
            shape.head_dim**-0.5,
            int8_scores=config.quantization == "int8",
        )
        self.whole_steps = whole_steps(self.model, self.attention)
        self.facts.append(kernels_fact(self.model, self.attention, self.whole_steps))
        self.seats = SeatTable(
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
            block_size=config.block_size,
            num_blocks=self.num_blocks,
        )
        self.sampler = Sampler(
            max_num_seqs=config.max_num_seqs,
            vocab_size=shape.vocab_size,
            seed=config.seed,
            device=self.device,
        )
        self._prompt_logprobs = PromptLogprobs(self.model, self.seats, group)
        self._num_drafts = config.num_speculative_tokens
        self._reports_drafts = not config.async_scheduling
        self.drafter = self._make_drafter(config, loaded.draft, loaded.draft_pool)
        self._warm_up(progress)

    def _make_drafter(
        self, config: EngineConfig, draft: DecoderModel | None, draft_pool: Tensor | None
    ) -> Drafter | None:
        most = f"at most {config.num_speculative_tokens} tokens a step"
        if config.speculative_method == "ngram":
            low, high = config.prompt_lookup_min, config.prompt_lookup_max
            reason = f"--speculative-method ngram, {low} to {high} tokens that recur"
            self.facts.append(("Drafts", most, reason))
            few_bits = any(linear.quantised is not None for linear in self.model.linears)
            drafts = config.num_speculative_tokens
            costs = step_costs(config.max_num_seqs * (1 + drafts), few_bits=few_bits)
            return NgramDrafter(self.seats, shortest=low, longest=high, most=drafts, costs=costs)
        if draft is None or draft_pool is None:
            return None
        weights = bytes_text(draft.weight_bytes)
        name = Path(config.speculative_model).name
        self.facts.append(("Drafts", most, f"--speculative-model {name}, {weights} weights"))
        return ModelDrafter(draft, draft_pool, self.seats)

    @property
    def endpoint(self) -> KvEndpoint | None:
        """Where other engines can read this rank's KV; None: nowhere."""
        return self.connector.endpoint if self.connector is not None else None

    def read(self, loads: list[KvLoad]) -> None:
        """Begin to read these, beside the step that runs; called from another thread."""
        assert self.connector is not None, "nothing is read where nothing is handed over"
        self.connector.apply(KvCommands(loads=loads))

    def prepare(self) -> bool:
        """A few ms of what a step to come would have to do; False: nothing is left to do."""
        return self._pages.fetch(self.seats.highest_block)

    def shutdown(self) -> None:
        """End what runs beside the steps. Idempotent."""
        if self.connector is not None:
            self.connector.shutdown()

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises PlanError for a plan that contradicts the ones before."""
        started_s = time.monotonic()
        if self.connector is not None and plan.kv is not None:
            self.connector.apply(plan.kv)
        self.seats.apply(plan)
        if self.group.rank == 0:
            self.sampler.vacate(plan.freed_slots)
            for new in plan.new:
                self.sampler.seat(new)
        self._prompt_logprobs.follow(plan)
        result = StepResult(
            step=plan.step, num_sampled=np.zeros(len(plan.slots), np.int32), token_ids=NO_TOKENS
        )
        if len(plan.slots):
            self._run_rows(plan, result)
        result.started_s, result.ended_s = started_s, time.monotonic()
        if self.connector is not None:
            result.kv = self._report_transfers(self.connector, is_idle=not len(plan.slots))
        return result

    def _report_transfers(self, connector: KvConnectorWorker, *, is_idle: bool) -> KvReport | None:
        if self.device.type == "cuda":
            # What this step computed may be read as soon as its result is known.
            torch.cuda.current_stream(self.device).synchronize()
        if is_idle:  # only transfers are under way: their end is all that there is to do
            connector.wait(IDLE_WAIT_S)
        return connector.report()

    def _run_rows(self, plan: StepPlan, result: StepResult) -> None:
        num_drafts = self._fill_in_drafts(plan)
        if len(num_drafts):
            result.num_verified = num_drafts
            num_drafts = num_drafts if num_drafts.any() else NO_TOKENS
        inputs = self.seats.step_inputs(plan, num_drafts)
        rows = plan.samples.nonzero()[0]
        # A row with g drafts is sampled at its last g + 1 positions.
        widths = np.ones(len(rows), np.int32)
        if len(num_drafts):
            widths += num_drafts[rows]
        all_sample = len(inputs.token_ids) == (widths.sum() if len(num_drafts) else len(rows))
        last = None if all_sample else spans(inputs.query_start[rows + 1] - widths, widths)
        output = self._forward(inputs, all_sample, None if self._prompt_logprobs.wanted else last)
        if self.drafter is not None:
            self.drafter.follow(plan, inputs)
        result.logprobs += self._prompt_logprobs.report(plan, inputs, output.hidden)
        if not len(rows):
            return
        seats = plan.slots[rows]
        if output.best is not None and self.sampler.wants_best(seats):
            row_seats, drafts = seats, NO_TOKENS
            if len(num_drafts):
                row_seats, _, drafts = self.seats.sampled_rows(seats, widths)
            sampled = self.sampler.take_best(output.best, row_seats, drafts)
        else:
            every = np.arange(len(inputs.token_ids))
            sampled = self._agree(output, every if last is None else last, seats, widths)
        self._keep(seats, rows, widths, sampled, result)
        if self.drafter is not None and self._reports_drafts:
            self._propose_next(plan, result)

    @torch.inference_mode()
    def _agree(self, output: StepOutput, last: Int64s, seats: Int32s, widths: Int32s) -> Sampled:
        """What rank 0 samples at the tokens `last`, on every rank (but for log-probs)."""
        logits = output.logits
        if logits is None:
            logits = self.model.logits(output.hidden[torch.from_numpy(last).to(self.device)])
        if self.group.size == 1:
            return self._sample(logits, seats, widths)
        said = torch.empty((3, len(last)), dtype=torch.int32)
        if self.group.rank == 0:
            sampled = self._sample(logits, seats, widths)
            columns = (sampled.token_ids, sampled.sound, sampled.kept)
            self.group.broadcast(said.copy_(torch.from_numpy(np.stack(columns))))
            return sampled
        token_ids, sound, kept = self.group.broadcast(said).numpy()
        return Sampled(token_ids, sound != 0, kept != 0)

    def _sample(self, logits: Tensor, seats: Int32s, widths: Int32s) -> Sampled:
        """Sample at `widths[i]` positions of `seats[i]`, the last ones behind drafts."""
        if self.drafter is None:
            return self.sampler.sample(logits, seats, self.seats.num_tokens[seats])
        return self.sampler.sample(logits, *self.seats.sampled_rows(seats, widths))

    def _keep(
        self, seats: Int32s, rows: Int64s, widths: Int32s, sampled: Sampled, result: StepResult
    ) -> None:
        """Write the tokens that hold to their seats and into the result."""
        counts, result.token_ids = self.seats.append(
            seats, widths, sampled.token_ids, sampled.sound, sampled.kept
        )
        result.num_sampled[rows] = counts
        if self.drafter is not None:
            self.drafter.observe(seats, widths, counts)
        if not sampled.sound.all():
            for row in rows[counts == 0].tolist():
                result.errors.append(
                    RowError(row, "no token can be sampled: the model's logits are not finite")
                )
        if not sampled.logprobs:
            return
        firsts = np.cumsum(widths) - widths
        for row, first, count in zip(rows.tolist(), firsts.tolist(), counts.tolist(), strict=True):
            if count and first in sampled.logprobs:
                theirs = [sampled.logprobs[i] for i in range(first, first + count)]
                result.logprobs.append(RowLogprobs(row, theirs))

    def _fill_in_drafts(self, plan: StepPlan) -> Int32s:
        """Put the drafts of the plan, or our own, behind their seats' tokens; how many [rows]."""
        if not len(plan.num_drafts):
            return NO_TOKENS
        if self.drafter is None:
            raise PlanError("draft tokens to verify, but this worker does not speculate")
        rows = np.flatnonzero(plan.num_drafts)
        seats, counts = plan.slots[rows], plan.num_drafts[rows]
        if (plan.draft_token_ids < 0).any():
            counts = self._propose(seats, counts, len(plan.slots))
        else:
            self.seats.put_drafts(seats, counts, plan.draft_token_ids)
        num_drafts = np.zeros(len(plan.slots), np.int32)
        num_drafts[rows] = counts
        return num_drafts

    def _propose_next(self, plan: StepPlan, result: StepResult) -> None:
        """Drafts for the next step of each row that got a token, to be handed out by the core."""
        rows = np.flatnonzero(result.num_sampled)
        seats = plan.slots[rows]
        counts = self._propose(
            seats, np.full(len(rows), self._num_drafts, np.int32), len(plan.slots)
        )
        result.num_drafts = np.zeros(len(plan.slots), np.int32)
        result.num_drafts[rows] = counts
        result.draft_token_ids = self.seats.drafts(seats, counts)

    def _propose(self, seats: Int32s, limits: Int32s, num_rows: int) -> Int32s:
        """Ask for drafts, at most as many as a request can still use beside a sampled token."""
        assert self.drafter is not None
        index = seats.astype(np.int64)  # with another type NumPy lets go of the interpreter's lock
        wanted = self.seats.max_tokens[index] - self.seats.num_tokens[index] - 1
        limits = np.clip(wanted, 0, limits)
        return self.drafter.propose(seats, limits, num_rows)

    def forward(self, inputs: StepInputs) -> Tensor:
        """Hidden states [T, hidden] after the final norm."""
        return self._forward(inputs, False, None).hidden

    def _forward(self, inputs: StepInputs, with_logits: bool, wanted: Int64s | None) -> StepOutput:
        """Hidden states, at least of tokens `wanted` (None: all), and logits where kernels can."""
        self.attention.plan(inputs.query_start, inputs.num_computed, inputs.block_tables)
        whole, token_ids, positions = self.whole_steps, inputs.token_ids, inputs.positions
        if whole is not None and len(token_ids) <= whole.max_tokens:
            return whole.forward(token_ids, positions, with_logits=with_logits, wanted=wanted)
        ids, at = (torch.from_numpy(it).to(self.device) for it in (token_ids, positions))
        hidden = self.model.forward(ids, at, self.attention)
        return StepOutput(len(hidden), hidden)

    @torch.inference_mode()
    def _warm_up(self, progress: Progress | None) -> None:
        """Run a decode batch and a prefill with a prefix in the null block, to compile kernels."""
        if progress is not None:
            progress("kernels", 0, 1)
        warm_up_rows()
        for counts in ((1, 1), (self.seats.block_size, 1), (2, 2)):
            inputs = null_block_inputs(counts, self.seats.block_size)
            self._forward(inputs, True, None)
            if isinstance(self.drafter, ModelDrafter):
                self.drafter.forward(inputs)
        if progress is not None:
            progress("kernels", 1, 1)
