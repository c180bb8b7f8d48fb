"""`twostroke bench step`: runs steps of a real worker, and tells what of them takes how long.

A part is timed inside the step, between the parts that come before and after: alone, it would find
in the caches what a step must fetch from memory. So parts and host add up to the step.
"""

import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from twostroke.bench.step_report import Ceilings, Part, StepTimes
from twostroke.checkpoint import Checkpoint
from twostroke.config import EngineConfig
from twostroke.errors import ConfigError
from twostroke.messages import NO_TOKENS, Int32s, NewRequest, SamplingParams, StepPlan
from twostroke.model.int8_rows import Int8Rows
from twostroke.model.layers import Linear, Mlp
from twostroke.worker.runner import ModelRunner
from twostroke.worker.whole_steps import WholeSteps

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)
MIN_SECONDS = 0.3  # of each measurement, and at least MIN_RUNS
MIN_RUNS = 5
_READ_BYTES = 256 << 20
_WHOLE = "step"
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
        dtype = self.runner.attention.dtype
        x = torch.randn(_PRODUCT, _PRODUCT).to(dtype)
        product = Linear(torch.randn(_PRODUCT, _PRODUCT).to(dtype))
        int8_s = math.inf
        if any(linear.int8 is not None for linear in self.runner.model.linears):
            int8 = Int8Rows(torch.randn(_PRODUCT, _PRODUCT).bfloat16(), None)
            int8_s = _median_s(lambda: int8(x))
        return Ceilings(
            read_gb_per_s=data.nbytes / read_s / 1e9,
            gflop_per_s=2 * _PRODUCT**3 / _median_s(lambda: product(x)) / 1e9,
            int8_gflop_per_s=2 * _PRODUCT**3 / int8_s / 1e9,
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

        whole = self.runner.whole_steps
        if whole is not None and rows * tokens > whole.max_tokens:
            whole = None
        watch = _Watch()
        with ExitStack() as stack:
            for kind, owner, name in self._places(layer_by_layer=whole is None):
                stack.enter_context(watch.timing(kind, owner, name))
            runs = _repeat(again, watch, whole)
        times = _usual(runs)
        calls = watch.calls
        if whole is not None:
            calls |= whole.calls_by_kind(rows * tokens, with_logits=tokens == 1)
        self.runner.run(_without_rows(self._step, plan.slots))
        parts = [
            Part(
                name=kind,
                calls=calls[kind],
                seconds=times[kind],
                **self._work(kind, plan, rows * tokens, rows),
            )
            for kind in runs[0]
            if kind != _WHOLE
        ]
        return StepTimes(rows, tokens, context, times[_WHOLE], parts)

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

    def _places(self, *, layer_by_layer: bool) -> Iterator[tuple[str, object, str]]:
        """Part, and where to find the function that does it: an object and its attribute."""
        runner, model = self.runner, self.runner.model
        yield "plan", runner.attention, "plan"
        if layer_by_layer:
            yield "norm", model.elementwise, "add_norm"
            yield "rotate", model.elementwise, "rotate"
            yield "attention", runner, "attention"
            yield "SiLU", model.elementwise, "silu_multiply"
            for layer in model.layers:
                yield "qkv", layer, "qkv"
                yield "output", layer, "output"
                if isinstance(layer.mlp, Mlp):
                    yield "gate, up", layer.mlp, "gate_up"
                    yield "down", layer.mlp, "down"
                else:
                    yield "mlp", layer, "mlp"
        yield "lm head", model, "logits"
        yield "sampler", runner.sampler, "sample"
        yield "sampler", runner.sampler, "take_best"

    def _linears(self) -> dict[str, list[Linear]]:
        model, layers = self.runner.model, self.runner.model.layers
        return {
            "qkv": [layer.qkv for layer in layers],
            "output": [layer.output for layer in layers],
            "gate, up": [layer.mlp.gate_up for layer in layers if isinstance(layer.mlp, Mlp)],
            "down": [layer.mlp.down for layer in layers if isinstance(layer.mlp, Mlp)],
            "lm head": [model.lm_head],
        }

    def _is_in_int8(self, kind: str) -> bool:
        linears = self._linears().get(kind, [])
        return bool(linears) and all(linear.int8 is not None for linear in linears)

    def _work(self, kind: str, plan: StepPlan, num_tokens: int, rows: int) -> dict[str, int]:
        """Bytes that must come from memory, and operations: weights once, KV once."""
        model, layers, linears = self.runner.model, self.runner.model.layers, self._linears()
        if kind in linears:
            count = rows if kind == "lm head" else num_tokens
            flops = sum(2 * count * linear.num_weights for linear in linears[kind])
            return {
                "bytes_read": sum(linear.bytes_read(count) for linear in linears[kind]),
                "flops": flops,
                "int8_flops": flops if self._is_in_int8(kind) else 0,
            }
        if kind != "attention":
            return {"bytes_read": 0, "flops": 0}
        pool = self.runner.kv_pool
        layer_bytes = pool.stride(0) // self._config.block_size * pool.element_size()
        computed = plan.num_computed.astype(np.int64)
        contexts = computed + plan.num_scheduled
        seen = int((plan.num_scheduled * (computed + (plan.num_scheduled + 1) / 2)).sum())
        width = model.shard.num_heads * model.shape.head_dim
        flops = 4 * seen * width * len(layers)
        each = int(plan.num_scheduled[0]), int(contexts[0])  # all rows are alike
        return {
            "bytes_read": int(contexts.sum()) * layer_bytes,
            "flops": flops,
            "int8_flops": flops // 2 if self.runner.attention.scores_in_int8(*each) else 0,
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


class _Watch:
    """Seconds and calls of functions, by kind."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()

    @contextmanager
    def timing(self, kind: str, owner: object, name: str) -> Iterator[None]:
        """Put a stop-watch in the place of a function, or of an object that is called."""
        function = getattr(owner, name)
        setattr(owner, name, _Timed(self, kind, function))
        yield
        setattr(owner, name, function)


class _Timed:
    def __init__(self, watch: _Watch, kind: str, function: Callable[..., object]) -> None:
        self._watch, self._kind, self._function = watch, kind, function

    def __call__(self, *arguments: object) -> object:
        start_s = time.perf_counter()
        result = self._function(*arguments)
        self._watch.seconds[self._kind] += time.perf_counter() - start_s
        self._watch.calls[self._kind] += 1
        return result

    def __getattr__(self, name: str) -> object:
        return getattr(self._function, name)


def _repeat(
    run: Callable[[], object], watch: _Watch, whole: WholeSteps | None
) -> list[dict[str, float]]:
    """Seconds of each part, and of the whole, run by run."""
    run()
    runs: list[dict[str, float]] = []
    while len(runs) < MIN_RUNS or sum(run[_WHOLE] for run in runs) < MIN_SECONDS:
        watch.seconds.clear()
        watch.calls.clear()
        if whole is not None:
            whole.seconds_by_kind = watch.seconds
        start_s = time.perf_counter()
        run()
        watch.seconds[_WHOLE] = time.perf_counter() - start_s
        runs.append(dict(watch.seconds))
    if whole is not None:
        whole.seconds_by_kind = None
    return runs


def _usual(runs: list[dict[str, float]]) -> dict[str, float]:
    """The mean of the middle half of the runs, so that the parts still add up."""
    ordered = sorted(runs, key=lambda run: run[_WHOLE])
    middle = ordered[len(runs) // 4 : -(-3 * len(runs) // 4)]
    return {kind: statistics.fmean(run[kind] for run in middle) for kind in runs[0]}


def _median_s(run: Callable[[], object]) -> float:
    run()
    times: list[float] = []
    while len(times) < MIN_RUNS or sum(times) < MIN_SECONDS:
        start_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)
