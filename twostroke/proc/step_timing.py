"""`twostroke bench step`: runs steps of a real worker, then each kind of their work alone.

A part is timed over all layers at once, so that weights come from memory as they do in a step; it
runs the very kernels of the step, on whatever the buffers hold.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from twostroke.bench.step_report import Ceilings, Part, StepTimes
from twostroke.checkpoint import Checkpoint
from twostroke.config import EngineConfig
from twostroke.errors import ConfigError
from twostroke.messages import NO_TOKENS, Int32s, NewRequest, SamplingParams, StepPlan
from twostroke.model.layers import Linear, Mlp
from twostroke.worker.runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)
MIN_SECONDS = 0.3  # of each measurement, and at least MIN_RUNS
MIN_RUNS = 5
_READ_BYTES = 256 << 20
_PRODUCT = 2048  # rows and columns of the product that shows the peak


class StepTimer:
    """A loaded worker of one CPU process, without an engine around it."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
        self.runner = ModelRunner(config, checkpoint)
        if self.runner.device.type != "cpu":
            raise ConfigError("bench step measures steps on a CPU", hint="add --device cpu")
        self._config = config
        self._step = 0

    @torch.inference_mode()
    def ceilings(self) -> Ceilings:
        """Read bandwidth of all threads, and the peak of matrix products in the model's type."""
        data = torch.ones(_READ_BYTES // 4)
        read_s = _median_s(lambda: data.sum())
        dtype = self.runner.kv_pool.dtype
        x = torch.randn(_PRODUCT, _PRODUCT).to(dtype)
        product = Linear(torch.randn(_PRODUCT, _PRODUCT).to(dtype))
        return Ceilings(
            read_gb_per_s=data.nbytes / read_s / 1e9,
            gflop_per_s=2 * _PRODUCT**3 / _median_s(lambda: product(x)) / 1e9,
        )

    @torch.inference_mode()
    def measure(self, rows: int, tokens: int, context: int) -> StepTimes:
        """A step of `rows` rows of `tokens` tokens after `context`; ConfigError if it cannot be."""
        plan = self._plan(rows, tokens, context)
        self.runner.run(plan)
        plan.new = []
        seats = self.runner.seats

        def again() -> None:
            """The same step: what the last one sampled is taken back."""
            seats.num_tokens[plan.slots] = context + tokens
            seats.num_computed[plan.slots] = context
            self.runner.run(plan)

        seconds = _median_s(again)
        parts = self._parts(plan, rows, rows * tokens)
        self.runner.run(_without_rows(self._step, plan.slots))
        return StepTimes(rows, tokens, context, seconds, parts)

    def _plan(self, rows: int, tokens: int, context: int) -> StepPlan:
        block_size = self._config.block_size
        blocks = -(-(context + tokens + 1) // block_size)
        for what, value, limit in (
            ("requests", rows, self._config.max_num_seqs),
            ("tokens a request", context + tokens + 1, self.runner.max_model_len),
            ("KV blocks", rows * blocks, self.runner.num_blocks - 1),
        ):
            if value > limit:
                raise ConfigError(f"a step needs {value:,} {what}; there are {limit:,}")
        generator = np.random.default_rng(0)
        vocabulary = self.runner.model.shape.vocab_size
        new = [
            NewRequest(
                slot=slot,
                request_id=f"row {slot}",
                token_ids=generator.integers(0, vocabulary, context + tokens).astype(np.int32),
                num_prompt_tokens=context + tokens,
                params=GREEDY,
                stop_token_ids=(),
                block_ids=np.arange(1 + slot * blocks, 1 + (slot + 1) * blocks, dtype=np.int32),
            )
            for slot in range(rows)
        ]
        return StepPlan(
            step=self._step,
            slots=np.arange(rows, dtype=np.int32),
            num_computed=np.full(rows, context, np.int32),
            num_scheduled=np.full(rows, tokens, np.int32),
            samples=np.ones(rows, np.bool_),
            new=new,
        )

    # ------------------------------------------------------------ parts

    def _parts(self, plan: StepPlan, rows: int, num_tokens: int) -> list[Part]:
        runner = self.runner
        few = runner.few_tokens
        timed: dict[str, tuple[int, float]] = {}
        if few is not None and num_tokens <= few.max_tokens:
            for kind, (calls, run_alone) in few.programs_by_kind(num_tokens).items():
                timed[kind] = (calls, _median_s(run_alone))
        else:
            for kind, calls, run in self._layer_calls(plan, num_tokens):
                timed[kind] = (calls, _median_s(run))
        hidden = torch.randn(rows, runner.model.shape.hidden_size).to(runner.kv_pool.dtype)
        timed["lm head"] = (1, _median_s(lambda: runner.model.logits(hidden)))
        logits = runner.model.logits(hidden)
        starts = runner.seats.num_tokens[plan.slots]
        sample = runner.sampler.sample
        timed["sampler"] = (1, _median_s(lambda: sample(logits, plan.slots, starts)))
        return [
            Part(name=kind, calls=calls, seconds=s, **self._work(kind, plan, num_tokens, rows))
            for kind, (calls, s) in timed.items()
        ]

    def _layer_calls(
        self, plan: StepPlan, num_tokens: int
    ) -> list[tuple[str, int, Callable[[], object]]]:
        """The calls of `DecoderModel.forward`, kind by kind."""
        model, attention = self.runner.model, self.runner.attention
        shape, shard, layers = model.shape, model.shard, model.layers
        ops, eps, dtype = model.elementwise, shape.rms_norm_eps, self.runner.kv_pool.dtype
        heads = shard.num_heads + 2 * shard.num_kv_heads
        rotated = shard.num_heads + shard.num_kv_heads

        def random(*dims: int) -> Tensor:
            return torch.randn(num_tokens, *dims).to(dtype)

        h, x = random(shape.hidden_size).float(), random(shape.hidden_size)
        qkv = random(heads, shape.head_dim)
        attended = random(shard.num_heads * shape.head_dim)
        rotations = model.rotary.rotations(torch.arange(num_tokens))
        q, k, v = qkv[:, : shard.num_heads], qkv[:, shard.num_heads : rotated], qkv[:, rotated:]
        count = len(layers)

        def rotate_all() -> None:
            for layer in layers:
                ops.rotate(qkv, rotations, rotated, layer.qk_norm, eps)

        calls: list[tuple[str, int, Callable[[], object]]] = [
            (
                "norm",
                2 * count + 1,
                lambda: [ops.add_norm(h, x, model.final_norm, eps) for _ in range(2 * count + 1)],
            ),
            ("qkv", count, lambda: [layer.qkv(x) for layer in layers]),
            ("rotate", count, rotate_all),
            ("attention", count, lambda: [attention(i, q, k, v) for i in range(count)]),
            ("output", count, lambda: [layer.output(attended) for layer in layers]),
        ]
        dense = [layer.mlp for layer in layers if isinstance(layer.mlp, Mlp)]
        if len(dense) < count:
            calls.append(("mlp", count, lambda: [layer.mlp(x, ops) for layer in layers]))
            return calls
        gate_up = dense[0].gate_up(x)
        act = ops.silu_multiply(gate_up)
        return [
            *calls,
            ("gate, up", count, lambda: [mlp.gate_up(x) for mlp in dense]),
            ("SiLU", count, lambda: [ops.silu_multiply(gate_up) for _ in dense]),
            ("down", count, lambda: [mlp.down(act) for mlp in dense]),
        ]

    def _work(self, kind: str, plan: StepPlan, num_tokens: int, rows: int) -> dict[str, int]:
        """Bytes that must come from memory, and operations: weights once, KV once."""
        model, layers = self.runner.model, self.runner.model.layers
        linears: dict[str, list[Linear]] = {
            "qkv": [layer.qkv for layer in layers],
            "output": [layer.output for layer in layers],
            "gate, up": [layer.mlp.gate_up for layer in layers if isinstance(layer.mlp, Mlp)],
            "down": [layer.mlp.down for layer in layers if isinstance(layer.mlp, Mlp)],
            "lm head": [model.lm_head],
        }
        if kind in linears:
            count = rows if kind == "lm head" else num_tokens
            return {
                "bytes_read": sum(linear.bytes_read(count) for linear in linears[kind]),
                "flops": sum(2 * count * linear.num_weights for linear in linears[kind]),
            }
        if kind != "attention":
            return {"bytes_read": 0, "flops": 0}
        pool = self.runner.kv_pool
        layer_bytes = pool.stride(0) // self._config.block_size * pool.element_size()
        computed = plan.num_computed.astype(np.int64)
        contexts = computed + plan.num_scheduled
        seen = int((plan.num_scheduled * (computed + (plan.num_scheduled + 1) / 2)).sum())
        width = model.shard.num_heads * model.shape.head_dim
        return {
            "bytes_read": int(contexts.sum()) * layer_bytes,
            "flops": 4 * seen * width * len(layers),
        }


def _without_rows(step: int, freed: Int32s) -> StepPlan:
    none = np.zeros(0, np.bool_)
    return StepPlan(
        step=step,
        slots=NO_TOKENS,
        num_computed=NO_TOKENS,
        num_scheduled=NO_TOKENS,
        samples=none,
        freed_slots=freed,
    )


def _median_s(run: Callable[[], object]) -> float:
    run()
    times: list[float] = []
    while len(times) < MIN_RUNS or sum(times) < MIN_SECONDS:
        start_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)
