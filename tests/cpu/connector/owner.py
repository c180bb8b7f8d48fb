"""A process that owns a pool and lets others read it; it says where, and holds one lease."""

import sys

import msgspec
import numpy as np

from twostroke.connector.base import Transport
from twostroke.connector.nixl import NixlTransport
from twostroke.connector.shm import ShmTransport, shared_memory
from twostroke.kv_messages import KvEndpoint, KvLayoutRecord

WORD = bytes(range(16))
SLOT = 3


def content(num_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, num_bytes, np.uint8)


def main() -> None:
    """Arguments: the layout, and the transport (shm)."""
    layout = msgspec.json.decode(sys.argv[1], type=KvLayoutRecord)
    transport: Transport = NixlTransport() if "nixl" in sys.argv[2:] else ShmTransport()
    memory, pool = shared_memory(layout)
    pool[:] = content(len(pool))
    memory.leases[SLOT] = np.frombuffer(WORD, np.uint8)
    address = transport.open(memory, layout, "owner")
    endpoint = KvEndpoint(
        engine_id="owner", transport=transport.name, addresses=[address], layout=layout
    )
    print(msgspec.json.encode(endpoint).decode(), flush=True)
    for line in sys.stdin:  # what its engine does later
        if line == "expire\n":
            memory.leases[SLOT] = 0
            pool[:] = 0
        print("done", flush=True)


if __name__ == "__main__":
    main()
