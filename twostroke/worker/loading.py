"""What a rank's worker runs on: the model, a draft model if there is one, and memory for their KV.

settings, checkpoint ▶ device and type ▶ weights ▶ what memory is left ▶ KV pool, its connector
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from twostroke.checkpoint import Checkpoint, fingerprint, open_checkpoint
from twostroke.config import EngineConfig
from twostroke.connector.base import KvConnectorWorker
from twostroke.connector.layout import record_of
from twostroke.errors import ConfigError
from twostroke.kv.sizing import KvLayout
from twostroke.model.llama import DecoderModel
from twostroke.model.parallel import Group
from twostroke.model.registry import load_model
from twostroke.shape import ModelShape
from twostroke.worker import handoff, pool
from twostroke.worker.attention import NO_INT8_HINT, why_no_int8
from twostroke.worker.device import (
    DTYPES,
    check_quantization,
    choose_device,
    choose_dtype,
    estimate_activations,
    keeps_whole,
)
from twostroke.worker.draft_model import check_vocabulary
from twostroke.worker.pool import Fact, PoolSize

Progress = Callable[[str, int, int], None]  # stage, done, total

# Weights of few bits are kept in the model's type too, for steps of many tokens, unless that takes
# more than this share of the free memory.
MAX_WHOLE_SHARE = 0.25
_KV_DTYPES = DTYPES | {"int8": torch.int8}


@dataclass(frozen=True)
class Loaded:
    """Weights and pools of one rank; `facts` say what was chosen, and why."""

    device: torch.device
    model: DecoderModel
    size: PoolSize
    kv_pool: Tensor
    connector: KvConnectorWorker | None  # None: KV is not handed over
    draft: DecoderModel | None
    draft_pool: Tensor | None
    facts: list[Fact]


def load(
    config: EngineConfig,
    checkpoint: Checkpoint,
    progress: Progress | None,
    group: Group,
    engine_id: str,
) -> Loaded:
    """Load a rank's part of the model, size the KV pool by what memory is left, and allocate it.

    Raises ConfigError or ModelError when that cannot work.
    """
    shape = checkpoint.shape
    device, device_fact = choose_device(config, group.rank)
    dtype_name, dtype_fact = choose_dtype(config, device, checkpoint)
    dtype = DTYPES[dtype_name]
    pool.wanted_length(config, shape.max_position_embeddings)  # wrong: say so before loading
    # On a CPU all ranks share it: look before any of them has begun to load.
    free_bytes = group.minimum(pool.available_memory()) // group.size
    check_quantization(config, device, dtype)
    layout = _layout(config, shape, dtype_name, device)
    keep_whole = keeps_whole(shape, dtype, free_bytes * MAX_WHOLE_SHARE)
    model, weights_fact = _load_model(
        config, checkpoint, dtype, device, progress, group, keep_whole=keep_whole
    )
    draft, draft_layout = _load_draft(config, shape, dtype, device, progress), None
    weight_bytes = model.weight_bytes
    if draft is not None:
        weight_bytes += draft.weight_bytes
        draft_layout = _layout(config, draft.shape, dtype_name, device)
        layout = replace(layout, draft_token_bytes=draft_layout.token_bytes)

    activation_bytes = estimate_activations(config, shape, dtype.itemsize)
    memory = _memory(config, device, group, free_bytes, weight_bytes, activation_bytes)
    size = pool.size_pool(
        config,
        layout,
        memory,
        model_max_len=shape.max_position_embeddings,
        device=device.type,
    )
    facts = [device_fact, dtype_fact, weights_fact, *size.facts]
    facts += pool.parallel_facts(shape, model.shard)
    kv_pool, connector, handoff_facts = _allocate(
        config, checkpoint, layout, size.num_blocks, device, engine_id, group.rank
    )
    draft_pool = None
    if draft_layout is not None:
        kv_dtype = _KV_DTYPES[draft_layout.dtype]
        draft_pool = pool.allocate_pool(size.num_blocks, draft_layout, kv_dtype, device)
    facts += handoff_facts
    return Loaded(device, model, size, kv_pool, connector, draft, draft_pool, facts)


def _layout(config: EngineConfig, shape: ModelShape, dtype: str, device: torch.device) -> KvLayout:
    """How the KV of a model that runs in `dtype` is laid out."""
    if config.kv_cache_dtype == "int8":
        if why := why_no_int8(device, DTYPES[dtype], shape.head_dim):
            raise ConfigError(f"--kv-cache-dtype is int8, but {why}", hint=NO_INT8_HINT)
        dtype = "int8"
    return KvLayout(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        block_size=config.block_size,
        tensor_parallel_size=config.tensor_parallel_size,
    )


def _load_model(
    config: EngineConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
    group: Group,
    *,
    keep_whole: bool,
) -> tuple[DecoderModel, Fact]:
    start_s = time.monotonic()
    model = load_model(
        checkpoint,
        dtype=dtype,
        device=device,
        seed=config.seed,
        progress=progress,
        group=group,
        quantization=config.quantization,
        keep_dequantised=keep_whole,
    )
    reason = f"loaded in {time.monotonic() - start_s:.1f} s"
    if group.size > 1:
        reason += f" on each of {group.size} ranks"
    if int8 := sum(linear.int8 is not None for linear in model.linears):
        reason += f"; products of {int8} of {len(model.linears)} matrices in 8 bits (W8A8)"
    return model, ("Weights", pool.bytes_text(model.weight_bytes), reason)


def _load_draft(
    config: EngineConfig,
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
) -> DecoderModel | None:
    """The draft model, when the settings ask for one; it runs like the model does."""
    if config.speculative_method != "draft_model":
        return None
    path = Path(config.speculative_model)
    checkpoint = open_checkpoint(path, load_format=config.load_format)
    check_vocabulary(checkpoint.shape, shape, checkpoint.name)
    return load_model(checkpoint, dtype=dtype, device=device, seed=config.seed, progress=progress)


def _memory(
    config: EngineConfig,
    device: torch.device,
    group: Group,
    free_bytes: int,
    weight_bytes: int,
    activation_bytes: int,
) -> pool.Memory:
    """Room for the KV pool, on the rank with the least; `free_bytes`: before weights came."""
    utilization = config.gpu_memory_utilization
    if device.type == "cpu":
        utilization /= len(config.local_roles)  # the engines share the host's memory
        memory = pool.cpu_memory(
            utilization, free_bytes, weight_bytes=weight_bytes, activation_bytes=activation_bytes
        )
    else:
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        memory = pool.gpu_memory(
            utilization, free_bytes, total_bytes, activation_bytes=activation_bytes
        )
    if group.size == 1:
        return memory
    reason = f"{memory.reason}, on each of {group.size} ranks"
    return pool.Memory(group.minimum(memory.budget_bytes), reason)


def _allocate(
    config: EngineConfig,
    checkpoint: Checkpoint,
    layout: KvLayout,
    num_blocks: int,
    device: torch.device,
    engine_id: str,
    rank: int,
) -> tuple[Tensor, KvConnectorWorker | None, list[Fact]]:
    """The KV pool; where KV is handed over, also what moves it between engines."""
    dtype = _KV_DTYPES[layout.dtype]
    if not config.hands_off:
        return pool.allocate_pool(num_blocks, layout, dtype, device), None, []
    record = record_of(layout, num_blocks, fingerprint(checkpoint, config.seed))
    kv_pool, memory = pool.allocate_readable_pool(record, layout, dtype, device)
    engine_id = engine_id or handoff.new_engine_id()
    connector = handoff.make_connector(config, memory, record, engine_id, rank)
    over = f"over {connector.endpoint.transport}"
    return kv_pool, connector, [("KV hand-off", over, f"engine {engine_id}")]
