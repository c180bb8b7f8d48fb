"""A rank's part in hand-offs between engines, made as the settings want it: memory that others can
read, and the worker's half of the connector.
"""

import hashlib
import os
import secrets
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from twostroke.config import EngineConfig
from twostroke.connector.base import KvConnectorWorker, KvMemory, Transport
from twostroke.connector.layout import pool_bytes
from twostroke.connector.links import SCRATCH_BYTES
from twostroke.connector.transfer import TransferWorker
from twostroke.errors import ConfigError
from twostroke.keys import read_key
from twostroke.kv_messages import TRANSFER_ID_BYTES, KvLayoutRecord


def new_engine_id() -> str:
    """An id for one start of an engine; all its ranks go by it."""
    return secrets.token_hex(8)


def allocate_memory(record: KvLayoutRecord, device: torch.device) -> tuple[KvMemory, Tensor]:
    """A rank's pool, zeroed, as bytes, and what a transport needs to know of it.

    On a CPU it lies in a memory file, whose descriptor is the caller's to close. OSError or
    torch.OutOfMemoryError when the device refuses that much.
    """
    if device.type == "cpu":
        from twostroke.connector.shm import shared_memory

        memory, pool = shared_memory(record)
        return memory, torch.from_numpy(pool)
    size = pool_bytes(record)
    whole = torch.zeros(size + SCRATCH_BYTES, dtype=torch.uint8, device=device)
    memory = KvMemory(
        address=whole.data_ptr(),
        pool_bytes=size,
        scratch_bytes=SCRATCH_BYTES,
        leases=np.zeros((record.num_blocks, TRANSFER_ID_BYTES), np.uint8),
        device=str(device),
    )
    return memory, whole[:size]


def make_connector(
    config: EngineConfig, memory: KvMemory, record: KvLayoutRecord, engine_id: str, rank: int
) -> KvConnectorWorker:
    """The worker's half for one rank; takes `memory.fd` over. ConfigError if it cannot work."""
    try:
        return TransferWorker(
            _transport(config, memory.device), memory, record, engine_id=engine_id, rank=rank
        )
    finally:
        if memory.fd >= 0:
            os.close(memory.fd)


def _transport(config: EngineConfig, device: str) -> Transport:
    if config.kv_transport == "nixl":
        from twostroke.connector.nixl import NixlTransport

        return NixlTransport(config.kv_host, _kv_key(config))
    if device != "cpu":
        raise ConfigError(
            f"--kv-transport {config.kv_transport} reads memory of the host, and KV is on {device}",
            hint="use --kv-transport nixl",
        )
    from twostroke.connector.shm import ShmTransport

    return ShmTransport()


def _kv_key(config: EngineConfig) -> bytes:
    """What readers on other hosts show that they know; derived from the key for joining."""
    if not config.key:
        return b""
    secret = read_key(Path(config.key)).engine.secret
    return hashlib.blake2b(secret, digest_size=32, person=b"twostroke-kv").digest()
