"""What is planned for: the engines of a layout, and what is asked of them."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from twostroke.advice.closed_form import changed_steps
from twostroke.arrays import Float64s
from twostroke.cost import HostCost, StepCost, StepWork

KvMode = Literal["pull", "stream"]


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Engines of one role, all alike. Each has `tensor_parallel_size` GPUs.

    `kv_tokens` are what one engine's pool holds; `kv_token_bytes` is a token's KV over all ranks,
    as often as it is stored. `pin_share` is the part of P's pool that may wait to be fetched.
    """

    count: int
    tensor_parallel_size: int
    kv_tokens: int
    kv_token_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    cost: StepCost
    host: HostCost = HostCost()
    block_size: int = 16
    pin_share: float = 0.5

    @property
    def num_gpus(self) -> int:
        return self.count * self.tensor_parallel_size

    def decode_step_s(self, batch: float, demand: "Demand", changes: float) -> float:
        """A step in which `batch` rows each decode one token, where each request changes the rows
        of so many steps."""
        context = demand.decode_context
        work = StepWork(batch, batch, batch, batch * context, batch * (context + 0.5))
        share = changed_steps(batch, demand.mean_output, changes)
        return self.cost.step_s(work) + self.around_s(batch, share)

    def around_s(self, rows: float, share: float) -> float:
        """What the host adds to a step, and to that share of all which have other rows than the one
        before."""
        host = self.host
        return host.gap_s + rows * host.gap_row_s + host.changes_s(share)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Either engines that do both, or P and D."""

    prefill: Pool | None = None
    decode: Pool | None = None
    both: Pool | None = None

    @property
    def pools(self) -> tuple[Pool, ...]:
        return tuple(it for it in (self.prefill, self.decode, self.both) if it is not None)

    @property
    def num_gpus(self) -> int:
        return sum(pool.num_gpus for pool in self.pools)

    @property
    def name(self) -> str:
        """4P:7D of TP8; 4P TP2 : 2D TP4; 3 x TP4."""
        if self.prefill is None or self.decode is None:
            pool = self.pools[0]
            return f"{pool.count} x TP{pool.tensor_parallel_size}"
        prefill, decode = self.prefill, self.decode
        sizes = prefill.tensor_parallel_size, decode.tensor_parallel_size
        if sizes[0] == sizes[1]:
            return f"{prefill.count}P:{decode.count}D of TP{sizes[0]}"
        return f"{prefill.count}P TP{sizes[0]} : {decode.count}D TP{sizes[1]}"


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Requests by their lengths, one entry each, and how many come a second (0: all at once).

    `cached_tokens` are found in P's prefix cache; at least one token of a prompt is computed.
    """

    prompt_tokens: Float64s
    output_tokens: Float64s
    cached_tokens: Float64s
    rate_per_s: float

    @classmethod
    def of(
        cls,
        prompt_tokens: Sequence[float] | Float64s,
        output_tokens: Sequence[float] | Float64s,
        rate_per_s: float,
        cached_tokens: Sequence[float] | Float64s | float = 0.0,
    ) -> "Demand":
        """From any sequences of numbers; a single number of cached tokens goes for all."""
        prompts = np.asarray(prompt_tokens, np.float64)
        cached = np.broadcast_to(np.asarray(cached_tokens, np.float64), prompts.shape)
        return cls(
            prompt_tokens=prompts,
            output_tokens=np.asarray(output_tokens, np.float64),
            cached_tokens=np.minimum(cached, prompts - 1),
            rate_per_s=rate_per_s,
        )

    def at_rate(self, rate_per_s: float) -> "Demand":
        """The same lengths, more or less often; what was computed of them is kept."""
        other = copy.copy(self)
        object.__setattr__(other, "rate_per_s", rate_per_s)
        return other

    def resampled(self, random: np.random.Generator) -> "Demand":
        """As many requests, drawn from these with replacement."""
        chosen = random.integers(0, len(self.prompt_tokens), len(self.prompt_tokens))
        return Demand(
            prompt_tokens=self.prompt_tokens[chosen],
            output_tokens=self.output_tokens[chosen],
            cached_tokens=self.cached_tokens[chosen],
            rate_per_s=self.rate_per_s,
        )

    @cached_property
    def mean_prompt(self) -> float:
        return float(self.prompt_tokens.mean())

    @cached_property
    def mean_output(self) -> float:
        return float(self.output_tokens.mean())

    @cached_property
    def mean_cached(self) -> float:
        return float(self.cached_tokens.mean())

    @cached_property
    def mean_computed(self) -> float:
        """Prompt tokens that P computes: E[I (1 - h)]."""
        return float((self.prompt_tokens - self.cached_tokens).mean())

    @cached_property
    def mean_attended(self) -> float:
        """Query-key products of a prompt, cached tokens among the keys."""
        computed = self.prompt_tokens - self.cached_tokens
        return float((computed * (self.cached_tokens + computed / 2)).mean())

    @cached_property
    def decode_context(self) -> float:
        """Tokens in place at a decode step, averaged over steps: longer outputs count for more."""
        steps = self.output_tokens
        return float((steps * (self.prompt_tokens + steps / 2)).sum() / steps.sum())

    @cached_property
    def output_scv(self) -> float:
        """Squared coefficient of variation of the outputs."""
        return float(self.output_tokens.var() / self.mean_output**2)

    @cached_property
    def computed_scv(self) -> float:
        """Squared coefficient of variation of the tokens that P computes."""
        return float((self.prompt_tokens - self.cached_tokens).var() / self.mean_computed**2)

    def prefill_work(self, batch: float) -> StepWork:
        """A step with `batch` whole prompts of the mean kind."""
        return StepWork(
            batch * self.mean_computed,
            batch,
            batch,
            batch * self.mean_cached,
            batch * self.mean_attended,
        )
