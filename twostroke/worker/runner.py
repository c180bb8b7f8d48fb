"""One worker's model on one device: a `StepPlan` in, a `StepResult` out.

    plan ▶ seats (who left, came, grew) ▶ flat inputs ▶ model + paged attention ▶ hidden states
         ▶ LM head of the rows that sample ▶ sampler ▶ tokens, kept at their seats and returned

The tokens of a step are written to the seats here, so the next plan may be made before they are
known. What is one request's fault comes back as a `RowError` of its row; an exception means that
the worker cannot go on.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from twostroke.checkpoint import Checkpoint
from twostroke.config import EngineConfig
from twostroke.kv.sizing import KvLayout
from twostroke.messages import NO_TOKENS, RowError, RowLogprobs, StepPlan, StepResult
from twostroke.model.llama import DecoderModel
from twostroke.model.registry import load_model
from twostroke.worker import pool
from twostroke.worker.attention import make_attention
from twostroke.worker.device import DTYPES, choose_device, choose_dtype, estimate_activations
from twostroke.worker.inputs import SeatTable, StepInputs
from twostroke.worker.logprobs import token_logprobs
from twostroke.worker.pool import Fact
from twostroke.worker.sampler import Sampler

Progress = Callable[[str, int, int], None]  # stage, done, total

# Prompt log-probs need the LM head at every position; this bounds the logits held at once.
PROMPT_LOGITS_BYTES = 64 << 20


class ModelRunner:
    """Loads a model, sizes and allocates the KV pool, and runs plans in order.

    Raises ConfigError or ModelError when that cannot work. `facts` are (name, value, reason) for
    the start-up block. Not thread-safe: build and use it in one thread.
    """

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, progress: Progress | None = None
    ) -> None:
        shape = checkpoint.shape
        self.device, device_fact = choose_device(config)
        dtype_name, dtype_fact = choose_dtype(config, self.device)
        dtype = DTYPES[dtype_name]
        free_bytes = pool.available_memory()
        start_s = time.monotonic()
        self.model: DecoderModel = load_model(
            checkpoint, dtype=dtype, device=self.device, seed=config.seed, progress=progress
        )
        weights = f"loaded in {time.monotonic() - start_s:.1f} s"
        weights_fact = ("Weights", pool.bytes_text(self.model.weight_bytes), weights)

        layout = KvLayout(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=dtype_name,
            block_size=config.block_size,
        )
        size = pool.size_pool(
            config,
            layout,
            self._memory(config, free_bytes, estimate_activations(config, shape, dtype.itemsize)),
            model_max_len=shape.max_position_embeddings,
            device=self.device.type,
        )
        self.num_blocks = size.num_blocks
        self.max_model_len = size.max_model_len
        self.facts: list[Fact] = [device_fact, dtype_fact, weights_fact, *size.facts]

        self.kv_pool = pool.allocate_pool(size.num_blocks, layout, dtype, self.device)
        self.attention = make_attention(self.kv_pool, shape.num_heads, shape.head_dim**-0.5)
        self.seats = SeatTable(
            max_num_seqs=config.max_num_seqs,
            max_model_len=size.max_model_len,
            block_size=config.block_size,
            num_blocks=size.num_blocks,
        )
        self.sampler = Sampler(
            max_num_seqs=config.max_num_seqs,
            vocab_size=shape.vocab_size,
            seed=config.seed,
            device=self.device,
        )
        # Seats whose prompt log-probs are wanted: how many of the top, else -1.
        self._prompt_logprobs = np.full(config.max_num_seqs, -1, np.int32)
        self._warm_up(progress)

    def _memory(self, config: EngineConfig, free_bytes: int, activation_bytes: int) -> pool.Memory:
        """What is left for the KV pool; on a CPU `free_bytes` were free before the weights came."""
        utilization = config.gpu_memory_utilization
        if self.device.type == "cpu":
            return pool.cpu_memory(
                utilization,
                free_bytes,
                weight_bytes=self.model.weight_bytes,
                activation_bytes=activation_bytes,
            )
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        return pool.gpu_memory(
            utilization, free_bytes, total_bytes, activation_bytes=activation_bytes
        )

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises PlanError for a plan that contradicts the ones before."""
        started_s = time.monotonic()
        self.seats.apply(plan)
        self.sampler.vacate(plan.freed_slots)
        for new in plan.new:
            self.sampler.seat(new)
            # A request that comes back with outputs has had its prompt's log-probs reported.
            wanted = new.params.prompt_logprobs if self._in_prompt(new.slot) else None
            self._prompt_logprobs[new.slot] = -1 if wanted is None else wanted
        result = StepResult(
            step=plan.step, num_sampled=np.zeros(len(plan.slots), np.int32), token_ids=NO_TOKENS
        )
        if len(plan.slots):
            self._run_rows(plan, result)
        result.started_s, result.ended_s = started_s, time.monotonic()
        return result

    def _in_prompt(self, seat: int) -> bool:
        return bool(self.seats.num_tokens[seat] == self.seats.num_prompt_tokens[seat])

    @torch.inference_mode()
    def _run_rows(self, plan: StepPlan, result: StepResult) -> None:
        inputs = self.seats.step_inputs(plan)
        hidden = self._forward(inputs)
        self._report_prompt_logprobs(plan, inputs, hidden, result)
        rows = np.flatnonzero(plan.samples)
        if not len(rows):
            return
        last = torch.from_numpy(inputs.query_start[rows + 1].astype(np.int64) - 1)
        logits = self.model.logits(hidden[last.to(self.device)])
        seats = plan.slots[rows]
        sampled = self.sampler.sample(logits, seats, self.seats.num_tokens[seats])
        self.seats.append(seats, sampled.token_ids)
        result.num_sampled[rows[sampled.sound]] = 1
        result.token_ids = sampled.token_ids[sampled.sound]
        for i, logprobs in sampled.logprobs.items():
            if sampled.sound[i]:
                result.logprobs.append(RowLogprobs(int(rows[i]), [logprobs]))
        for row in rows[~sampled.sound].tolist():
            result.errors.append(
                RowError(row, "no token can be sampled: the model's logits are not finite")
            )

    def _forward(self, inputs: StepInputs) -> Tensor:
        """Hidden states [T, hidden] after the final norm."""
        self.attention.plan(inputs.query_start, inputs.num_computed, inputs.block_tables)
        token_ids = torch.from_numpy(inputs.token_ids).to(self.device)
        positions = torch.from_numpy(inputs.positions).to(self.device)
        return self.model.forward(token_ids, positions, self.attention)

    def _report_prompt_logprobs(
        self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, result: StepResult
    ) -> None:
        """Append log-probs of the prompt tokens that this step's rows predict."""
        for row in np.flatnonzero(self._prompt_logprobs[plan.slots] >= 0).tolist():
            seat, first = int(plan.slots[row]), int(plan.num_computed[row])
            # Position p predicts token p + 1; the last prompt position predicts an output.
            num_prompt = int(self.seats.num_prompt_tokens[seat])
            count = min(int(plan.num_scheduled[row]), num_prompt - 1 - first)
            if count <= 0:
                continue
            start = int(inputs.query_start[row])
            targets = self.seats.token_ids[seat, first + 1 : first + 1 + count]
            num_top = int(self._prompt_logprobs[seat])
            report = RowLogprobs(row, [], prompt_start=first + 1)
            chunk = max(1, PROMPT_LOGITS_BYTES // (4 * self.model.shape.vocab_size))
            for at in range(0, count, chunk):
                now = slice(start + at, start + min(at + chunk, count))
                tokens = torch.from_numpy(targets[at : at + chunk].astype(np.int64))
                logprobs = torch.log_softmax(self.model.logits(hidden[now]), -1)
                report.tokens += token_logprobs(
                    logprobs, tokens.to(self.device), [num_top] * len(tokens)
                )
            result.logprobs.append(report)

    @torch.inference_mode()
    def _warm_up(self, progress: Progress | None) -> None:
        """Run a decode batch and a prefill with a prefix in the null block, to compile kernels."""
        if progress is not None:
            progress("kernels", 0, 1)
        for counts in ((1, 1), (self.seats.block_size, 1), (2, 2)):
            self._forward(_null_block_inputs(counts, self.seats.block_size))
        if progress is not None:
            progress("kernels", 1, 1)


def _null_block_inputs(counts: tuple[int, ...], block_size: int) -> StepInputs:
    """Rows of `counts` tokens that follow one computed block; all read and write block 0."""
    query_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return StepInputs(
        token_ids=np.zeros(query_start[-1], np.int64),
        positions=np.zeros(query_start[-1], np.int64),
        query_start=query_start,
        num_computed=np.full(len(counts), block_size, np.int32),
        block_tables=np.zeros((len(counts), 3), np.int32),
    )
