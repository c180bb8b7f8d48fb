"""A process that reads from another one until it is killed."""

import sys

import msgspec
import numpy as np

from twostroke.connector.nixl import NixlTransport
from twostroke.connector.shm import shared_memory
from twostroke.kv_messages import KvLayoutRecord


def main() -> None:
    """Arguments: the owner's address, and the layout of both."""
    layout = msgspec.json.decode(sys.argv[2], type=KvLayoutRecord)
    memory, pool = shared_memory(layout)
    transport = NixlTransport()
    transport.open(memory, layout, "reader")
    peer = transport.connect(sys.argv[1], "owner")
    number = transport.max_pieces
    offsets = np.random.default_rng(0).permutation(number) * (len(pool) // number)
    pieces = np.stack([offsets, offsets[::-1], np.full(number, len(pool) // number)], axis=1)
    peer.read(pieces)
    print("reading", flush=True)
    while True:
        peer.read(pieces)


if __name__ == "__main__":
    main()
