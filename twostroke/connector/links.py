"""How fast a link is, measured by reading a peer's pool into scratch memory of ours."""

import time

import numpy as np

from twostroke.connector.base import KvMemory, Peer, Transport
from twostroke.connector.layout import pool_bytes
from twostroke.cost import LinkCost
from twostroke.cost_fit import fit_link_cost
from twostroke.kv_messages import KvEndpoint, KvLink

SCRATCH_BYTES = 16 << 20
_PROBES = ((1, 4 << 10), (64, 4 << 10), (2, 1 << 20), (16, 1 << 20))  # messages, bytes of each
_ROUNDS = 4  # the first is not counted: it touches memory that nobody has touched before


def measure_link(
    endpoint: KvEndpoint, peer: Peer, memory: KvMemory, transport: Transport
) -> KvLink:
    """Seconds = base + messages * each + bytes / rate, over a few reads. Raises TransferError.

    The best time of each kind of read counts, as nothing but the link should. What the peer's pool
    holds does not matter; each round reads another part, and of a small pool less.
    """
    size = pool_bytes(endpoint.layout)
    most = min(memory.scratch_bytes, size)
    samples = []
    for number, wanted in _PROBES:
        each = min(wanted, transport.max_piece_bytes, most)
        count = min(number, transport.max_pieces, most // each)
        offsets = np.arange(count, dtype=np.int64) * each
        seconds = []
        for part in range(_ROUNDS):
            start = min(part * most, size - most)
            columns = (start + offsets, memory.pool_bytes + offsets, np.full_like(offsets, each))
            rows = np.stack(columns, axis=1)
            start_s = time.perf_counter()
            peer.read(rows)
            seconds.append(time.perf_counter() - start_s)
        samples.append((count, count * each, min(seconds[1:])))
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
        return fit_link_cost(messages, sizes, seconds, clean=True)[0]
    except ValueError:  # too little was read for its bytes to be noticed
        return LinkCost(bytes_per_s=max(sizes) / max(1e-9, *seconds))
