"""How fast a link is, measured by reading a peer's pool into scratch memory of ours."""

import time

import numpy as np

from twostroke.connector.base import KvMemory, Peer, Transport
from twostroke.connector.layout import pool_bytes
from twostroke.cost import LinkCost
from twostroke.cost_fit import fit_link_cost
from twostroke.kv_messages import KvEndpoint, KvLink

SCRATCH_BYTES = 4 << 20
_PROBES = ((1, 4 << 10), (64, 4 << 10), (1, 1 << 20), (4, 1 << 20))  # messages, bytes of each
_ROUNDS = 3


def measure_link(
    endpoint: KvEndpoint, peer: Peer, memory: KvMemory, transport: Transport
) -> KvLink:
    """Seconds = base + messages * each + bytes / rate, over a few reads. Raises TransferError.

    What the peer's pool holds does not matter; of a small one less is read.
    """
    most = min(memory.scratch_bytes, pool_bytes(endpoint.layout))
    samples = []
    for number, size in _PROBES * _ROUNDS:
        each = min(size, transport.max_piece_bytes, most)
        count = min(number, transport.max_pieces, most // each)
        offsets = np.arange(count, dtype=np.int64) * each
        rows = np.stack([offsets, offsets + memory.pool_bytes, np.full_like(offsets, each)], axis=1)
        start_s = time.perf_counter()
        peer.read(rows)
        samples.append((count, count * each, time.perf_counter() - start_s))
    cost = _fit(samples)
    return KvLink(
        engine_id=endpoint.engine_id,
        base_s=cost.base_s,
        message_s=cost.message_s,
        bytes_per_s=cost.bytes_per_s,
        pipelined=cost.pipelined,
    )


def _fit(samples: list[tuple[int, int, float]]) -> LinkCost:
    messages, sizes, seconds = zip(*samples, strict=True)
    try:
        return fit_link_cost(messages, sizes, seconds)[0]
    except ValueError:  # too little was read for its bytes to be noticed
        return LinkCost(bytes_per_s=max(sizes) / max(1e-9, *seconds))
