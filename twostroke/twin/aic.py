"""Step times from kernels that others measured: the package aiconfigurator-core (extra `aic`).

It answers for whole batches of equal requests. A step of ours is described by sums, so it is taken
for the smallest number of equal prompt chunks, and equal decodes, that have these sums:

    step = all but attention, of all tokens + attention of the chunks + attention of the decodes
"""

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from twostroke.arrays import Float64s
from twostroke.cost import StepColumns, StepWork
from twostroke.errors import ConfigError
from twostroke.shape import ModelShape, to_hf_config
from twostroke.twin.hardware import find_gpu
from twostroke.twin.roofline import GRAPHS, ONE_DEVICE, Parallel, Software

VERSION = "0.12.0"  # what its answers were checked with

SYSTEMS = {
    "A100": "a100_sxm",
    "H100": "h100_sxm",
    "H200": "h200_sxm",
    "B200": "b200_sxm",
    "L40S": "l40s",
    "RTX PRO 6000": "rtx_pro_6000_server",
}

CONTEXT_STEP = 32  # contexts are rounded to this many tokens, so that answers can be kept


class Batch(NamedTuple):
    """Equal chunks of prompts and equal decodes."""

    chunks: int
    chunk_tokens: int
    chunk_context: int
    decodes: int
    decode_context: int


def batch_of(work: StepWork) -> Batch:
    """The batch with the fewest chunks whose sums are those of `work`, up to rounding.

    p chunks of m tokens on a context of c each, and d = rows - p decodes, have
    attended = (context of decodes + d / 2) + p m (c + m / 2). More chunks attend to less for the
    same tokens, so the right number is the first for which no context would be negative.
    """
    tokens, rows, _, context, _ = work
    if tokens <= rows:
        return Batch(0, 0, 0, round(rows), round(context / max(rows, 1)))
    low, high = 1, round(rows)
    while low < high:
        middle = (low + high) // 2
        if _chunk_context(work, middle) >= 0:
            high = middle
        else:
            low = middle + 1
    chunks, decodes = low, round(rows) - low
    chunk_tokens = (tokens - decodes) / chunks
    chunk_context = min(max(_chunk_context(work, chunks), 0.0), context / chunks)
    decode_context = (context - chunks * chunk_context) / decodes if decodes else 0.0
    return Batch(
        chunks, round(chunk_tokens), round(chunk_context), decodes, round(max(decode_context, 0.0))
    )


def _chunk_context(work: StepWork, chunks: int) -> float:
    """The context of each chunk, if there are so many."""
    tokens, rows, _, context, attended = work
    decodes = rows - chunks
    m = (tokens - decodes) / chunks
    beyond = attended - context - decodes / 2 - chunks * m * m / 2
    return beyond / (chunks * (m - 1)) if m > 1 else 0.0


class AicStepCost:
    """A `StepCost` over aiconfigurator-core's tables for vLLM.

    Raises ConfigError when the package is missing, or has no tables for the model on this GPU.
    """

    def __init__(
        self,
        shape: ModelShape,
        gpu: str,
        parallel: Parallel = ONE_DEVICE,
        *,
        software: Software = GRAPHS,
    ) -> None:
        self._software = software
        self._engine = _compile(shape, gpu, parallel)
        self._shared_ms = lru_cache(1 << 14)(self._shared)
        self._chunks_ms = lru_cache(1 << 14)(self._chunks)
        self._decodes_ms = lru_cache(1 << 16)(self._decodes)
        try:  # tables have holes, which only a question finds
            self.step_s(StepWork(17, 2, 2, 64, 64 + 16 * 8))
        except Exception as error:
            raise _has_no_tables(gpu, parallel, error) from None

    def step_s(self, work: StepWork) -> float:
        """Seconds of one step."""
        batch = batch_of(work)
        shared_ms = self._shared_ms(batch.chunks * batch.chunk_tokens, batch.decodes)
        return self._with_host(shared_ms + self._attention_ms(batch), work.num_rows)

    def group_step_s(self, works: Sequence[StepWork]) -> float:
        """Seconds of a step that data-parallel engines take together, one work each.

        The package takes all of them to have equal batches: theirs in the mean, and the attention
        of the one that has most of it.
        """
        batches = [batch_of(work) for work in works if work.num_rows]
        prompts = sum(batch.chunks * batch.chunk_tokens for batch in batches) / len(works)
        decodes = sum(batch.decodes for batch in batches) / len(works)
        shared_ms = self._shared_ms(math.ceil(prompts), math.ceil(decodes))
        attention_ms = max(self._attention_ms(batch) for batch in batches)
        return self._with_host(shared_ms + attention_ms, max(work.num_rows for work in works))

    def _attention_ms(self, batch: Batch) -> float:
        spent_ms = 0.0
        if batch.chunks:
            context = _rounded(batch.chunk_context)
            spent_ms += self._chunks_ms(batch.chunks, batch.chunk_tokens, context)
        if batch.decodes:
            spent_ms += self._decodes_ms(batch.decodes, _rounded(batch.decode_context))
        return spent_ms

    def _with_host(self, kernels_ms: float, rows: float) -> float:
        software = self._software
        return kernels_ms / 1e3 / software.kernel_share + rows * software.row_s + software.step_s

    def step_s_many(self, works: StepColumns) -> Float64s:
        """[steps] Seconds of many steps."""
        columns = zip(works.context_tokens.tolist(), works.attended_tokens.tolist(), strict=True)
        return np.array([self.step_s(StepWork(*works[:3], *column)) for column in columns])

    def _shared(self, prompt_tokens: int, decodes: int) -> float:
        """All but attention: it depends on the number of tokens only."""
        tokens = max(prompt_tokens, 1) if not decodes else prompt_tokens
        shared = self._engine.mixed_step_breakdown(tokens, decodes, max(tokens, 1), 2)[1]
        return float(shared)

    def _chunks(self, count: int, tokens: int, context: int) -> float:
        """Attention of prompt chunks: a whole prefill less all that is not attention."""
        whole = self._engine.predict_prefill_latency(count, tokens + context, context)
        return max(0.0, float(whole) - self._shared_ms(count * tokens, 0))

    def _decodes(self, count: int, context: int) -> float:
        return float(self._engine.mixed_step_breakdown(1, count, max(context, 1), 2)[3])


def _rounded(context: int) -> int:
    return round(context / CONTEXT_STEP) * CONTEXT_STEP


def _compile(shape: ModelShape, gpu: str, parallel: Parallel) -> Any:
    """Its engine for a model; experts are spread as vLLM spreads them, if there are any."""
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle
    except ImportError as error:
        raise ConfigError(
            f"step times from kernels need aiconfigurator-core: {error}",
            hint="install it: pip install 'twostroke[aic]'",
        ) from None
    name = find_gpu(gpu).name
    if name not in SYSTEMS:
        raise ConfigError(
            f"aiconfigurator-core has no kernels of {name}", hint=f"known: {', '.join(SYSTEMS)}"
        )
    tp, dp = parallel.tensor_parallel_size, parallel.data_parallel_size
    experts = {}
    if shape.num_experts:
        kind = "moe_ep_size" if parallel.expert_parallel else "moe_tp_size"
        other = "moe_tp_size" if parallel.expert_parallel else "moe_ep_size"
        experts = {kind: tp * dp, other: 1, "attention_dp_size": dp}
    with tempfile.TemporaryDirectory(prefix="twostroke-aic-") as directory:
        # It reads a config.json; one of our own spares it the way to the hub. RoPE takes no time.
        config = to_hf_config(replace(shape, dtype="bfloat16", rope_scaling=None))
        Path(directory, "config.json").write_text(json.dumps(config))
        try:
            return EngineHandle.compile(directory, SYSTEMS[name], "vllm", tp_size=tp, **experts)
        except Exception as error:  # it raises whatever the table or config at hand makes it raise
            raise _has_no_tables(name, parallel, error) from None


def _has_no_tables(gpu: str, parallel: Parallel, error: Exception) -> ConfigError:
    return ConfigError(
        f"aiconfigurator-core cannot compute this model on {gpu} with "
        f"TP{parallel.tensor_parallel_size}, DP{parallel.data_parallel_size}: {str(error)[:200]}",
        hint="use the roofline",
    )
