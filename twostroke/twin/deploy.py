"""From what was asked for to a `Scenario`: sizes engines and picks costs and links."""

import math
from pathlib import Path
from typing import Any, get_args

from twostroke.config import SchedulerConfig
from twostroke.config_values import parse_rate
from twostroke.cost import BandwidthCurve, HostCost, StepCost
from twostroke.errors import ConfigError
from twostroke.kv.sizing import KvLayout
from twostroke.kv_messages import DTYPE_BYTES
from twostroke.router.dispatch import DispatchSettings, Role
from twostroke.shape import ModelShape, parallel_sizes
from twostroke.twin.hardware import Hardware, find_gpu
from twostroke.twin.models import find_shape
from twostroke.twin.options import Engines, TwinOptions, parse_engines
from twostroke.twin.roofline import Parallel, Roofline, kv_budget
from twostroke.twin.scenario import EngineGroup, Scenario
from twostroke.twin.transfers import Link
from twostroke.twin.workload import Workload, load

_GIB = 1 << 30


def scenario_of(options: TwinOptions) -> Scenario:
    """Everything that `simulate` needs. Raises ConfigError and ModelError."""
    if not options.model:
        raise ConfigError("no model is given", hint="name one: --model Qwen3-30B-A3B")
    if not options.workload:
        raise ConfigError(
            "no workload is given", hint="as --workload poisson:65/s,in=8192,out=1024,n=325"
        )
    shape, gpu = find_shape(options.model), find_gpu(options.gpu)
    for flag, dtype in (("--dtype", options.dtype), ("--kv-cache-dtype", options.kv_cache_dtype)):
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"{flag} is {dtype!r}; choices: {', '.join(DTYPE_BYTES)}")
    roles: tuple[Role, ...] = ("prefill", "decode", "both")
    asked: list[tuple[Role, Engines]] = [
        (role, parse_engines(f"--{role}", text))
        for role in roles
        if (text := getattr(options, role))
    ]
    if not asked:
        raise ConfigError(
            "no engine is given", hint="as --prefill 4xTP8 --decode 7xTP8, or --both 2"
        )
    workload = load(
        options.workload,
        seed=options.seed,
        num_requests=options.num_requests or None,
        speed=options.speed,
    )
    length = _model_length(options, shape, workload)
    size = _Sizer(options, shape, gpu, length)
    return Scenario(
        engines=[size.group(role, engines) for role, engines in asked],
        workload=workload,
        link=_link(options, gpu, max(engines.tp for _, engines in asked)),
        settings=DispatchSettings(
            kv_mode=_choice("--kv-mode", options.kv_mode, DispatchSettings, "kv_mode"),
            pd_policy=_choice("--pd-policy", options.pd_policy, DispatchSettings, "pd_policy"),
        ),
        until_s=options.until_s or math.inf,
        fast_forward=options.fast_forward,
        name=name_of(options),
    )


def name_of(options: TwinOptions) -> str:
    """A deployment in one line."""
    parts = [f"{getattr(options, role)} {role}" for role in ("prefill", "decode", "both")]
    engines = " + ".join(part for part in parts if not part.startswith(" "))
    return f"{options.model} on {options.gpu}: {engines}"


def _choice(flag: str, value: str, owner: type, field: str) -> Any:
    choices = get_args(owner.__annotations__[field])
    if value not in choices:
        raise ConfigError(f"{flag} is {value!r}; choices: {', '.join(choices)}")
    return value


def _model_length(options: TwinOptions, shape: ModelShape, workload: Workload) -> int:
    """The longest sequence: as asked for, or as long as the load needs and the model allows."""
    if not len(workload):
        raise ConfigError(f"the workload {options.workload} has no request")
    longest = int((workload.prompt_tokens.astype("int64") + workload.output_tokens).max())
    if options.max_model_len:
        return options.max_model_len
    return max(min(longest + 1, shape.max_position_embeddings), 2)


class _Sizer:
    """Makes groups of engines: cost, KV pool and scheduler settings."""

    def __init__(
        self, options: TwinOptions, shape: ModelShape, gpu: Hardware, max_model_len: int
    ) -> None:
        self._options, self._shape, self._gpu = options, shape, gpu
        self._max_model_len = max_model_len

    def group(self, role: Role, engines: Engines) -> EngineGroup:
        options, shape = self._options, self._shape
        if engines.tp not in (sizes := parallel_sizes(shape)):
            raise ConfigError(
                f"TP{engines.tp} cannot share {shape.num_heads} heads and {shape.num_kv_heads} KV "
                f"heads; choices: {', '.join(map(str, sizes))}"
            )
        parallel = Parallel(tensor_parallel_size=engines.tp, data_parallel_size=engines.dp)
        layout = KvLayout(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=options.kv_cache_dtype,
            block_size=options.block_size,
            tensor_parallel_size=engines.tp,
        )
        cost, host = self._cost(parallel)
        return EngineGroup(
            role=role,
            count=engines.count * engines.dp,
            cost=cost,
            host=host,
            layout=layout,
            max_hold_share=options.kv_hold_share,
            plans_late=True,
            config=SchedulerConfig(
                block_size=options.block_size,
                num_blocks=1 + self._num_blocks(parallel, layout),
                max_num_seqs=options.max_num_seqs,
                max_num_batched_tokens=options.max_num_batched_tokens,
                max_model_len=self._max_model_len,
                enable_prefix_caching=options.prefix_caching,
            ),
        )

    def _num_blocks(self, parallel: Parallel, layout: KvLayout) -> int:
        options = self._options
        if options.kv_gib:
            blocks = layout.blocks_in(int(options.kv_gib * _GIB))
            if not blocks:
                raise ConfigError(f"--kv-gib {options.kv_gib:g} holds no block")
            return blocks
        return kv_budget(
            self._shape,
            self._gpu,
            parallel,
            memory_share=options.gpu_memory_utilization,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
            block_size=options.block_size,
            dtype=options.dtype,
            kv_dtype=options.kv_cache_dtype,
        ).num_blocks

    def _cost(self, parallel: Parallel) -> tuple[StepCost, HostCost]:
        options = self._options
        if options.cost == "roofline":
            dtype, kv_dtype = options.dtype, options.kv_cache_dtype
            cost = Roofline(self._shape, self._gpu, parallel, dtype=dtype, kv_dtype=kv_dtype)
            return cost, HostCost()
        if options.cost == "aic":
            from twostroke.twin.aic import AicStepCost

            return AicStepCost(self._shape, options.gpu, parallel), HostCost()
        if not Path(options.cost).is_file():
            raise ConfigError(
                f"--cost is {options.cost!r}", hint="choices: roofline, aic, or a profile's file"
            )
        from twostroke.cost_profile import Profile

        profile = Profile.load(Path(options.cost))
        return profile.step, profile.host


def _link(options: TwinOptions, gpu: Hardware, tp: int) -> Link:
    rate = (gpu.nic_bytes_per_s or gpu.pcie_bytes_per_s) * tp
    curve = BandwidthCurve((0.0,), (rate,))
    return Link(
        bandwidth=_curve("--link", options.link) if options.link else curve,
        fabric=_curve("--fabric", options.fabric) if options.fabric else None,
        base_s=options.link_latency_ms / 1e3,
        message_s=options.link_message_us / 1e6,
        pipelined=True,
    )


def _curve(flag: str, text: str) -> BandwidthCurve:
    """A rate with its unit or in GB/s, or a file."""
    try:
        rate = float(text)
    except ValueError:
        if text.strip().endswith(("B/s", "b/s", "Bps", "bps")):
            return BandwidthCurve((0.0,), (parse_rate(text, flag),))
        return BandwidthCurve.from_file(Path(text))
    if not 0 < rate < 1e9:
        raise ConfigError(f"{flag} is {text}; it must be a number of GB/s over 0, or a file")
    return BandwidthCurve((0.0,), (rate * 1e9,))
