"""The prefix cache: which block holds the KV of which token prefix.

A block's key stands for *all* tokens up to its end, so equal keys mean equal prefixes. Keys are
128 bits of multilinear hashing: with secret random 64-bit numbers r,

    key(t[0:n]) = four lanes of  (start + sum over i < n of (t[i] + 1) * r[i])  mod 2^64, top half

Such a hash is strongly universal in each lane (Lemire and Kaser, "Strongly universal string hashing
is fast", 2014): two different prefixes share a key with probability 2^-128, whatever their tokens,
and the secret is drawn anew in each process, so nobody can construct a collision. The sum runs on
from block to block, which makes it a chain, and NumPy does a whole prompt in a few operations: 64
blocks take about a third of the time of 64 calls of a cryptographic hash. `t + 1` keeps a token 0
from hashing like no token at all. `start` is drawn from the request's domain (its cache salt).
"""

import hashlib
import secrets
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from twostroke.kv.blocks import NULL_BLOCK
from twostroke.messages import Int32s, Int64s

UInt64s = NDArray[np.uint64]

LANES = 4
KEY_BYTES = LANES * 4
_TOP_HALF = np.uint64(32)
_SHORTEST_RUN = 16

# Keys of a prefix's blocks: hashable, equal where prefixes are. A list or an array of numbers.
Keys = Any


class Hasher(Protocol):
    """Makes keys of token prefixes, which a `KeyMap` of its kind understands."""

    def no_keys(self) -> Keys: ...
    def start(self, domain: str) -> UInt64s: ...
    def extend_one(
        self, sums: UInt64s, first_block: int, tokens: Int32s
    ) -> tuple[Keys, UInt64s]: ...
    def extend_many(
        self, sums: UInt64s, blocks: Int32s, tokens: Int32s
    ) -> tuple[Sequence[Any], UInt64s]: ...


class KeyMap(Protocol):
    """key -> blocks that hold it, oldest first. A free block keeps its key until it is reused."""

    def find(self, keys: Keys) -> Int64s:
        """The oldest block of each key, up to the first that has none."""
        ...

    def find_each(self, keys: Keys) -> Int64s:
        """The oldest block of each key; the null block where there is none."""
        ...

    def add(self, keys: Keys, blocks: Int64s) -> None:
        """Register each block under its key, unless it has one already or is the null block."""
        ...

    def remove_all(self, blocks: Int64s) -> bool:
        """Take the key from each block that has one; whether any had."""
        ...

    def clear(self) -> None: ...

    def blocks_by_key(self) -> dict[Any, list[int]]:
        """Everything registered, for checks."""
        ...

    def keys_by_block(self) -> dict[int, Any]:
        """The same the other way round."""
        ...


class PrefixHasher:
    """The engine's `Hasher`. `secret` is for tests; by default it is random."""

    def __init__(self, block_size: int, *, secret: bytes | None = None) -> None:
        self._block_size = block_size
        self._secret = secrets.token_bytes(32) if secret is None else secret
        self._multipliers: UInt64s = np.empty((0, block_size, LANES), np.uint64)
        self._root = self._start_of("")

    def _start_of(self, domain: str) -> UInt64s:
        digest = hashlib.blake2b(domain.encode(), key=self._secret, digest_size=8 * LANES).digest()
        return np.frombuffer(digest, np.uint64)

    def _multipliers_of(self, num_blocks: int) -> UInt64s:
        """[num_blocks, block_size, LANES], the same for each block index at every call."""
        known = len(self._multipliers)
        if num_blocks > known:
            wanted = max(num_blocks, 2 * known, 64)
            stream = hashlib.shake_256(b"multipliers" + self._secret)
            raw = stream.digest(wanted * self._block_size * LANES * 8)
            self._multipliers = np.frombuffer(raw, np.uint64).reshape(
                wanted, self._block_size, LANES
            )
        return self._multipliers

    def no_keys(self) -> Keys:
        """Where a table's keys are collected."""
        return []

    def start(self, domain: str) -> UInt64s:
        """The running sum [LANES] before the first token of a prefix in `domain`."""
        return self._start_of(domain) if domain else self._root

    def extend_one(
        self, sums: UInt64s, first_block: int, tokens: Int32s
    ) -> tuple[list[bytes], UInt64s]:
        """Keys of the full blocks of `tokens`, which begin at block index `first_block`.

        `sums` [LANES] is the running sum before them. Returns the keys and the sum after them.
        """
        size = self._block_size
        num_blocks = len(tokens) // size
        if num_blocks == 0:
            return [], sums
        values = tokens[: num_blocks * size].astype(np.uint64).reshape(num_blocks, size)
        values += np.uint64(1)
        end = first_block + num_blocks
        multipliers = self._multipliers_of(end)[first_block:end]
        chain = np.einsum("bj,bjk->bk", values, multipliers)
        np.cumsum(chain, axis=0, out=chain)
        chain += sums
        return _keys_of(chain), chain[-1]

    def extend_many(
        self, sums: UInt64s, blocks: Int32s, tokens: Int32s
    ) -> tuple[list[bytes], UInt64s]:
        """One more block of each of m prefixes: sums [m, LANES], block index [m], tokens [m, size].

        Returns m keys and the new sums.
        """
        values = tokens.astype(np.uint64)
        values += np.uint64(1)
        multipliers = self._multipliers_of(int(blocks.max()) + 1)[blocks]
        chain = np.einsum("bj,bjk->bk", values, multipliers)
        chain += sums
        return _keys_of(chain), chain


def _keys_of(chain: UInt64s) -> list[bytes]:
    # Of the ways to cut memory into `bytes` of equal size this is several times the fastest.
    halves = (chain >> _TOP_HALF).astype(np.uint32)
    keys: list[bytes] = halves.view(f"V{KEY_BYTES}").reshape(-1).tolist()
    return keys


def run_of(blocks: list[int]) -> slice | None:
    """Where a list by block has the entries of these, if each is beside the last, up or down.

    Most tables of prompts are such runs, and a slice is many times as fast as a loop.
    """
    count = len(blocks)
    if count < _SHORTEST_RUN:
        return None
    first, last = blocks[0], blocks[-1]
    step = 1 if last > first else -1
    if last - first != step * (count - 1) or blocks != list(range(first, last + step, step)):
        return None
    return slice(first, last + step if last + step >= 0 else None, step)


class PrefixMap:
    """The engine's `KeyMap`."""

    def __init__(self, num_blocks: int) -> None:
        self.key_of: list[bytes | None] = [None] * num_blocks
        self.first: dict[bytes, int] = {}
        self._later: dict[bytes, list[int]] = {}

    def find(self, keys: list[bytes]) -> Int64s:
        hits: list[int] = []
        for block in map(self.first.get, keys):
            if block is None:
                break
            hits.append(block)
        return np.array(hits, np.int64)

    def find_each(self, keys: list[bytes]) -> Int64s:
        return np.array([self.first.get(key, NULL_BLOCK) for key in keys], np.int64)

    def add(self, keys: list[bytes], blocks: Int64s) -> None:
        key_of, first = self.key_of, self.first
        added = blocks.tolist()
        run = run_of(added)
        present = key_of[run] if run is not None else [key_of[block] for block in added]
        if NULL_BLOCK in added or any(present):
            known = [i for i, b in enumerate(added) if b != NULL_BLOCK and key_of[b] is None]
            keys, added, run = [keys[i] for i in known], [added[i] for i in known], None
        holders = list(map(first.setdefault, keys, added))
        if run is not None:
            key_of[run] = keys
        else:
            for key, block in zip(keys, added, strict=True):
                key_of[block] = key
        if holders != added:
            for key, block, holder in zip(keys, added, holders, strict=True):
                if holder != block:
                    self._later.setdefault(key, []).append(block)

    def remove_all(self, blocks: Int64s) -> bool:
        key_of, first, later = self.key_of, self.first, self._later
        removed = blocks.tolist()
        run = run_of(removed)
        if run is not None and not any(key_of[run]):
            return False
        keyed = [(block, key) for block in removed if (key := key_of[block]) is not None]
        for block, key in keyed:
            if later and key in later:
                self.remove(block)
            else:
                key_of[block] = None
                del first[key]
        return bool(keyed)

    def remove(self, block: int) -> None:
        """Take the key from a block that has one."""
        key = self.key_of[block]
        assert key is not None
        self.key_of[block] = None
        later = self._later.get(key)
        if later is None:
            del self.first[key]
            return
        if self.first[key] == block:
            self.first[key] = later.pop(0)
        else:
            later.remove(block)
        if not later:
            del self._later[key]

    def clear(self) -> None:
        self.key_of = [None] * len(self.key_of)
        self.first.clear()
        self._later.clear()

    def blocks_by_key(self) -> dict[bytes, list[int]]:
        return {key: [block, *self._later.get(key, ())] for key, block in self.first.items()}

    def keys_by_block(self) -> dict[int, bytes]:
        return {block: key for block, key in enumerate(self.key_of) if key is not None}
