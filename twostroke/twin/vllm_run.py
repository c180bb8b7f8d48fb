"""Recorded runs of vLLM: what was served, when each request got its tokens; and the same here.

A directory holds meta.json (`model`, `engine_kwargs` under vLLM's names) and requests.jsonl (a
line a request: `input_toks`, `output_toks`, `arrival_time` by the wall's clock, `queued_ts`,
`first_token_ts` and `last_token_ts` by the engine's), as LLMServingSim's `bench` records them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from twostroke.arrays import Float64s, Int32s
from twostroke.config import SchedulerConfig
from twostroke.cost import StepCost
from twostroke.cost_fit import FitError, fit_step_cost, work_of
from twostroke.cost_profile import Profile
from twostroke.errors import ConfigError
from twostroke.kv.sizing import KvLayout
from twostroke.messages import StepSample
from twostroke.shape import ModelShape
from twostroke.twin.hardware import Hardware
from twostroke.twin.roofline import Parallel, Roofline, Software, kv_budget
from twostroke.twin.scenario import EngineGroup, Result, Scenario, simulate
from twostroke.twin.traces import read
from twostroke.twin.workload import Workload

_Positive = Annotated[int, msgspec.Meta(ge=1)]

ALL = slice(None)

MakeCost = Callable[[Parallel, Software], StepCost]


class EngineKwargs(msgspec.Struct, kw_only=True):
    """vLLM's arguments as far as they decide how long steps are; defaults are those of 0.19."""

    tensor_parallel_size: _Positive = 1
    data_parallel_size: _Positive = 1
    enable_expert_parallel: bool = False
    max_num_seqs: _Positive = 256
    max_num_batched_tokens: _Positive = 2048
    max_model_len: _Positive | None = None
    block_size: _Positive = 16
    dtype: str = "bfloat16"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    num_gpu_blocks: _Positive | None = None
    num_gpu_blocks_override: _Positive | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    async_scheduling: bool = True


class _Meta(msgspec.Struct, kw_only=True):
    model: str
    engine_kwargs: EngineKwargs
    num_gpu_blocks: _Positive | None = None


class _Row(msgspec.Struct, kw_only=True):
    input_toks: _Positive
    output_toks: _Positive
    arrival_time: float
    queued_ts: float
    first_token_ts: float
    last_token_ts: float


@dataclass(frozen=True, kw_only=True)
class VllmRun:
    """One run; columns have an entry a request, in order of arrival, times from the first one."""

    name: str
    model: str
    settings: EngineKwargs
    workload: Workload
    first_s: Float64s
    last_s: Float64s
    output_tokens: Int32s

    @property
    def arrival_s(self) -> Float64s:
        return self.workload.arrival_s


def read_run(directory: Path) -> VllmRun:
    """Read a directory of the form above. Raises ConfigError naming file and field."""
    try:
        meta = msgspec.json.decode((directory / "meta.json").read_bytes(), type=_Meta)
        lines = (directory / "requests.jsonl").read_bytes().splitlines()
        rows = [msgspec.json.decode(line, type=_Row) for line in lines if line.strip()]
    except OSError as error:
        raise ConfigError(f"cannot read the run in {directory}: {error}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{directory} holds no run of vLLM: {error}") from None
    if len(rows) < 2:
        raise ConfigError(f"{directory} has {len(rows)} requests; at least 2 are needed")
    settings = meta.engine_kwargs
    if settings.num_gpu_blocks is None:
        settings.num_gpu_blocks = settings.num_gpu_blocks_override or meta.num_gpu_blocks
    # The two clocks differ by what they do for the request that waited least to be queued.
    offset_s = min(row.queued_ts - row.arrival_time for row in rows)
    rows.sort(key=lambda row: row.arrival_time)
    zero_s = rows[0].arrival_time + offset_s
    return VllmRun(
        name=directory.resolve().name,
        model=meta.model,
        settings=settings,
        workload=read(directory / "requests.jsonl"),
        first_s=np.array([row.first_token_ts for row in rows]) - zero_s,
        last_s=np.array([row.last_token_ts for row in rows]) - zero_s,
        output_tokens=np.array([row.output_toks for row in rows], np.int32),
    )


def scenario_of(
    run: VllmRun, shape: ModelShape, hardware: Hardware, make_cost: MakeCost, software: Software
) -> Scenario:
    """The run's deployment and load in the twin.

    KV blocks are those that vLLM reported, else what the memory of the device leaves. Engines that
    share experts step together; other data-parallel engines go their own ways.
    """
    settings = run.settings
    shares = shape.num_experts > 0 and settings.data_parallel_size > 1
    parallel = Parallel(
        tensor_parallel_size=settings.tensor_parallel_size,
        data_parallel_size=settings.data_parallel_size if shares else 1,
        expert_parallel=settings.enable_expert_parallel,
    )
    kv_dtype = "float8" if settings.kv_cache_dtype.startswith("fp8") else "bfloat16"
    blocks = settings.num_gpu_blocks
    if blocks is None:
        blocks = kv_budget(
            shape,
            hardware,
            parallel,
            memory_share=settings.gpu_memory_utilization,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            block_size=settings.block_size,
            dtype=weight_dtype(settings),
            kv_dtype=kv_dtype,
        ).num_blocks
    config = SchedulerConfig(
        block_size=settings.block_size,
        num_blocks=blocks,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len or shape.max_position_embeddings,
        enable_prefix_caching=settings.enable_prefix_caching,
        enable_chunked_prefill=settings.enable_chunked_prefill,
        async_scheduling=settings.async_scheduling,
    )
    layout = KvLayout(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=kv_dtype,
        block_size=settings.block_size,
        tensor_parallel_size=settings.tensor_parallel_size,
    )
    engines = EngineGroup(
        role="both",
        cost=make_cost(parallel, software),
        config=config,
        layout=layout,
        count=settings.data_parallel_size,
        steps_together=shares,
    )
    return Scenario(engines=[engines], workload=run.workload, name=run.name)


def weight_dtype(settings: EngineKwargs) -> str:
    """That of the weights, as `kv.sizing` names it."""
    if settings.quantization and "fp8" in settings.quantization:
        return "float8"
    return {"half": "float16", "float": "float32", "auto": "bfloat16"}.get(
        settings.dtype, settings.dtype
    )


# ---------------------------------------------------------------- the twin against the run


class Figure(NamedTuple):
    """One figure of both, latencies in ms."""

    name: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def compare(run: VllmRun, result: Result, requests: slice = ALL) -> list[Figure]:
    """TTFT and TPOT of some requests; of all of them, tokens a second too.

    Times count from a request's arrival, in both.
    """
    gaps = np.maximum(run.output_tokens - 1, 1)
    columns = {
        "TTFT": (run.first_s - run.arrival_s, result.ttft_s),
        "TPOT": ((run.last_s - run.first_s) / gaps, result.tpot_s),
    }
    figures = []
    for name, (measured, predicted) in columns.items():
        pair = measured[requests] * 1e3, predicted[requests] * 1e3
        figures.append(Figure(f"mean {name} ms", *(float(np.mean(side)) for side in pair)))
        for share in (50, 90, 99):
            sides = (float(np.percentile(side, share)) for side in pair)
            figures.append(Figure(f"P{share} {name} ms", *sides))
    if requests == ALL:
        measured_s = float(run.last_s.max() - run.arrival_s.min())
        rates = (
            float(run.output_tokens.sum()) / measured_s,
            float(result.output_tokens.sum()) / result.duration_s,
        )
        figures.append(Figure("tokens/s", *rates))
    return figures


FIT_ROUNDS = 6


def fit_software(
    run: VllmRun, make_scenario: Callable[[Software], Scenario], requests: Sequence[int]
) -> Software:
    """What share of the kernels' speed the program reaches, from how long some requests decoded.

    A replay tells how long they would have decoded with the share assumed; the shares that would
    have given what was measured are averaged (least relative squares), and so on, since when what
    runs depends on it. Raises ConfigError when none of these requests decoded.
    """
    chosen = np.asarray(requests)
    chosen = chosen[run.output_tokens[chosen] > 1]
    if not len(chosen):
        raise ConfigError("nothing to fit to: no request has more than one token of output")
    measured_s = (run.last_s - run.first_s)[chosen]
    software = Software()
    for _ in range(FIT_ROUNDS):
        result = simulate(make_scenario(software))
        ratio = (result.e2e_s - result.ttft_s)[chosen] / measured_s * software.kernel_share
        software = Software(kernel_share=float((ratio**2).sum() / ratio.sum()))
    return software


def profile_of(run: VllmRun, shape: ModelShape, hardware: Hardware) -> Profile:
    """A profile from a recorded run: per-request times say nothing of single steps, so the roofline
    is set right by them, and its answers over the run's range of steps are what is fitted.

    `step_error` is of the decoding of the first half of the requests, to which the share was
    fitted, as predicted by a replay with the profile itself; `held_out` of the other half.
    """

    def roofline(parallel: Parallel, software: Software) -> StepCost:
        return Roofline(
            shape, hardware, parallel, dtype=weight_dtype(run.settings), software=software
        )

    def replay(software: Software) -> Scenario:
        return scenario_of(run, shape, hardware, roofline, software)

    half = len(run.first_s) // 2
    software = fit_software(run, replay, range(half))
    (engines,) = replay(software).engines
    step, _ = fit_step_cost(_samples(engines, int(run.workload.prompt_tokens.max())))
    scenario = replace(replay(software), engines=[replace(engines, cost=step)])
    result = simulate(scenario)
    predicted_s, measured_s = result.e2e_s - result.ttft_s, run.last_s - run.first_s
    decoded = np.flatnonzero(run.output_tokens > 1)
    errors = [
        FitError.of(predicted_s[which], measured_s[which])
        for which in (decoded[decoded < half], decoded[decoded >= half])
    ]
    return Profile(
        model=run.model,
        device=hardware.name,
        step=step,
        step_error=errors[0],
        held_out=errors[1],
        settings={
            "recorded": run.name,
            "tensor_parallel_size": str(run.settings.tensor_parallel_size),
            "data_parallel_size": str(run.settings.data_parallel_size),
            "kernel_share": f"{software.kernel_share:.3f}",
        },
    )


def _samples(engines: EngineGroup, longest: int) -> list[StepSample]:
    """Steps as such a run has them: decodes of all batch sizes, with a chunk of a prompt or not."""
    config, samples = engines.config, []
    batches = {2**i for i in range(11) if 2**i < config.max_num_seqs}
    for rows in sorted(batches | {0, config.max_num_seqs}):
        for chunk in (0, *(2**i for i in range(4, 20) if 2**i <= config.max_num_batched_tokens)):
            for context in (64, longest // 4, longest):
                if rows + chunk == 0 or rows + chunk > config.max_num_batched_tokens:
                    continue
                all_rows = rows + (chunk > 0)
                sample = StepSample(
                    num_tokens=rows + chunk,
                    num_rows=all_rows,
                    num_sampled=all_rows,
                    context_tokens=context * all_rows,
                    attended_tokens=rows * context + chunk * (context + chunk // 2),
                    seconds=0.0,
                )
                sample.seconds = engines.cost.step_s(work_of(sample))
                samples.append(sample)
    return samples
