"""Prefixes by numbers: what a twin has in place of hashes of tokens.

Its prompts are long runs of equal tokens, so a prefix is walked run by run. Each prefix that ends
with a block has a number, and the blocks of a run have numbers in a row:

    prefix       a a a a a a a b b b c c c c        (a, b, c: blocks of one token id each)
    its keys     0 1 2 3 4 5 6 32 33 34 64 65 66 67

A number stands for all tokens up to there, exactly: `_RUN` numbers at a time are given to the
blocks of one token id that follow a prefix, and one to a block of several. Maps by number are
columns, so that a prompt of a thousand blocks is looked up, entered or forgotten at once. A
`Prompt` says of what runs it is made; other tokens are looked through for them.
"""

import sys
from array import array
from collections.abc import Sequence

import numpy as np

from twostroke.arrays import Int32s, Int64s, are_same, has_all, has_any
from twostroke.kv.blocks import NULL_BLOCK
from twostroke.kv.prefix import LANES, UInt64s
from twostroke.router.policy import COARSE, FINE_BLOCKS
from twostroke.twin.prompt import runs_of

_RUN = 32  # blocks, of 16 tokens those of Mooncake's 512
_MIXED = -1  # in place of a token id
_NOWHERE = -2  # in place of a number
_NO_KEY, _NOT_TO_HAVE = -1, -2
# As arrays, for NumPy: with Python's numbers it takes twice as long.
_FIRST_KEY, _IS_WITHOUT, _NULL = np.array(0), np.array(_NO_KEY), np.array(NULL_BLOCK)
_FEW = 32  # blocks that are looked at one by one


class RunHasher:
    """`kv.prefix.Hasher` of one engine: its numbers are those of prefixes that came to it.

    Where others have running sums it has the number of the last block, and 1.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._first: dict[tuple[int, int | bytes | str], int] = {}  # number, by what it follows
        self._token_of: list[int] = []  # of each _RUN numbers
        self._goes_on = bytearray()  # whether they follow those before them, and need no entry
        self._next_mixed = 0
        self.num_numbers = 0  # all that were given are below this

    def no_keys(self) -> "array[int]":
        return array("q")

    def start(self, domain: str) -> UInt64s:
        sums = np.zeros(LANES, np.uint64)
        if domain:
            sums[0] = self._mixed(-1, domain) + 1
        return sums

    def extend_one(
        self, sums: UInt64s, first_block: int, tokens: Int32s
    ) -> "tuple[array[int], UInt64s]":
        size = self._block_size
        num_blocks = len(tokens) // size
        if num_blocks <= _FEW:
            return self._extend_by_few(sums, tokens[: num_blocks * size].tobytes())
        last, (values, counts) = int(sums[0]) - 1, runs_of(tokens)
        most = _RUN * size
        num_whole = len(counts) - (counts[-1] < most)
        if (last + 1) % _RUN == 0 and counts.count(most) == num_whole:
            return self._extend_by_runs(last, values[: -(-num_blocks // _RUN)], num_blocks)
        block, start = 0, 0
        spans: list[tuple[int, int]] = []
        for token, count in zip(values, counts, strict=True):
            if block * size < start and block < num_blocks:  # it began with other tokens
                last = self._next(last, tokens[block * size : (block + 1) * size].tobytes())
                spans.append((last, last + 1))
                block += 1
            start += count
            missing = start // size - block
            while missing > 0:
                first = self._follower(last, token)
                length = min(missing, _RUN - first % _RUN)
                spans.append((first, first + length))
                last, block, missing = first + length - 1, block + length, missing - length
        return _numbers_in(spans), self._sums_of(last)

    def _extend_by_runs(
        self, last: int, values: Sequence[int], num_blocks: int
    ) -> "tuple[array[int], UInt64s]":
        """The same where each `_RUN` blocks are of one token id, one of `values`."""
        spans: list[tuple[int, int]] = []
        end = last + 1
        for token in values:
            first = self._find(end - 1, token)
            if first is None:
                break
            end = first + _RUN
            spans.append((first, end))
        if new := values[len(spans) :]:  # nothing has come behind this prefix yet
            first = self._new_runs(end - 1, new)
            spans.append((first, first + _RUN * len(new)))
        keys = _numbers_in(spans)
        del keys[num_blocks:]
        return keys, self._sums_of(keys[-1])

    def _extend_by_few(self, sums: UInt64s, content: bytes) -> "tuple[array[int], UInt64s]":
        """The same for a few blocks, which lie there one behind the other."""
        if not content:
            return array("q"), sums
        keys, last, size = array("q"), int(sums[0]) - 1, 4 * self._block_size
        if not _is_even(content):
            last = self._next(last, content[:size])
            keys.append(last)
            content = content[size:]
        if content and _is_even(content):  # what is left of it is an answer
            token, missing = int.from_bytes(content[:4], sys.byteorder), len(content) // size
            while missing > 0:
                first = self._follower(last, token)
                last = min(first + missing, first - first % _RUN + _RUN) - 1
                keys.extend(range(first, last + 1))
                missing -= last + 1 - first
            return keys, self._sums_of(last)
        for start in range(0, len(content), size):
            last = self._next(last, content[start : start + size])
            keys.append(last)
        return keys, self._sums_of(last)

    def _next(self, last: int, block: bytes) -> int:
        """The number of a block that follows the prefix `last`."""
        token = block[:4]
        if token * self._block_size != block:
            return self._mixed(last, block)
        return self._follower(last, int.from_bytes(token, sys.byteorder))

    def extend_many(
        self, sums: UInt64s, blocks: Int32s, tokens: Int32s
    ) -> tuple[Sequence[int], UInt64s]:
        content, size = tokens.tobytes(), 4 * self._block_size
        keys = [
            self._next(last - 1, content[row * size : (row + 1) * size])
            for row, last in enumerate(sums[:, 0].tolist())
        ]
        ends = np.zeros_like(sums)
        ends[:, 0] = np.array(keys) + 1
        return keys, ends

    @staticmethod
    def _sums_of(last: int) -> UInt64s:
        sums = np.zeros(LANES, np.uint64)
        sums[0] = last + 1
        return sums

    def _find(self, last: int, token: int) -> int | None:
        """The number of the block of this one token that follows the prefix `last`, if it has one.

        Without a look into the books where it goes on in a run, or in the run behind it.
        """
        run = (last + 1) // _RUN
        is_next = run < len(self._token_of) and self._token_of[run] == token
        if is_next and ((last + 1) % _RUN or self._goes_on[run]):
            return last + 1
        return self._first.get((last, token))

    def _follower(self, last: int, token: int) -> int:
        """The same; it is given one if it has none."""
        first = self._find(last, token)
        return self._new_runs(last, [token]) if first is None else first

    def _new_runs(self, last: int, tokens: Sequence[int]) -> int:
        """Numbers for the blocks of these ids, `_RUN` each, behind a prefix; returns the first."""
        first = self.num_numbers
        self.num_numbers += _RUN * len(tokens)
        self._token_of += tokens
        self._goes_on += bytes((first == last + 1,)) + b"\1" * (len(tokens) - 1)
        if first != last + 1:
            self._first[last, tokens[0]] = first
        return first

    def _mixed(self, last: int, content: bytes | str) -> int:
        """The number of any other block. They are given one by one."""
        number = self._first.get((last, content))
        if number is None:
            if self._next_mixed % _RUN == 0:
                self._next_mixed = self._new_runs(_NOWHERE, [_MIXED])
            number = self._first[last, content] = self._next_mixed
            self._next_mixed += 1
        return number


def _is_even(content: bytes) -> bool:
    """Whether all of these tokens are the same."""
    return content == content[:4] * (len(content) // 4)


def _numbers_in(spans: Sequence[tuple[int, int]]) -> "array[int]":
    """All numbers from each first one to before each end, in order."""
    numbers, start, end = array("q"), 0, 0
    for first, next_end in spans:
        if first != end:
            numbers.frombytes(np.arange(start, end).tobytes())
            start = first
        end = next_end
    numbers.frombytes(np.arange(start, end).tobytes())
    return numbers


class RunKeys:
    """`router.policy.KeyMaker` of a router in the twin: a block's key is its prefix's number."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._hasher = RunHasher(block_size)

    def of(self, token_ids: Sequence[int] | Int32s, salt: str) -> "array[int]":
        hasher = self._hasher
        tokens = np.asanyarray(token_ids, np.int32)
        numbers, _ = hasher.extend_one(hasher.start(salt), 0, tokens)
        end = (len(token_ids) - 1) // self._block_size
        fine = numbers[: min(end, FINE_BLOCKS)]
        return fine + numbers[FINE_BLOCKS + COARSE - 1 : end : COARSE]


class NumberMap:
    """`kv.prefix.KeyMap` of one engine, for the numbers of a `RunHasher`."""

    def __init__(self, num_blocks: int, hasher: RunHasher) -> None:
        self._hasher = hasher
        self._block_of: Int64s = np.zeros(0, np.int64)  # the oldest with that key
        self._key_of: Int64s = np.full(num_blocks, _NO_KEY, np.int64)
        self._key_of[NULL_BLOCK] = _NOT_TO_HAVE
        self._later: dict[int, list[int]] = {}

    def _column(self, keys: "array[int] | list[int]") -> Int64s:
        """The keys as a column, with room for all of them."""
        if len(self._block_of) < self._hasher.num_numbers:
            room = np.zeros(4 * self._hasher.num_numbers, np.int64)  # untouched it takes no memory
            room[: len(self._block_of)] = self._block_of
            self._block_of = room
        return np.frombuffer(keys, np.int64) if isinstance(keys, array) else np.array(keys)

    def find(self, keys: "array[int]") -> Int64s:
        blocks = self.find_each(keys[:_FEW])
        if len(blocks) < len(keys) and not has_any(blocks == _NULL):
            blocks = self.find_each(keys)
        missing = (blocks == _NULL).nonzero()[0]
        return blocks[: missing[0]] if len(missing) else blocks

    def find_each(self, keys: "array[int]") -> Int64s:
        numbers = self._column(keys)
        blocks: Int64s = self._block_of[numbers]
        return blocks

    def add(self, keys: "array[int] | list[int]", blocks: Int64s) -> None:
        numbers = self._column(keys)
        has_key = self._key_of[blocks] != _IS_WITHOUT
        if has_any(has_key):
            numbers, blocks = numbers[~has_key], blocks[~has_key]
        self._key_of[blocks] = numbers
        is_held = self._block_of[numbers] != _NULL
        if has_any(is_held):
            self._add_singly(numbers[is_held], blocks[is_held])
            numbers, blocks = numbers[~is_held], blocks[~is_held]
        self._block_of[numbers] = blocks
        if not are_same(self._block_of[numbers], blocks):  # one key twice among them
            self._block_of[numbers] = NULL_BLOCK
            self._add_singly(numbers, blocks)

    def _add_singly(self, numbers: Int64s, blocks: Int64s) -> None:
        """Keys that may be there already."""
        for key, block in zip(numbers.tolist(), blocks.tolist(), strict=True):
            if self._block_of[key] == NULL_BLOCK:
                self._block_of[key] = block
            else:
                self._later.setdefault(key, []).append(block)

    def remove_all(self, blocks: Int64s) -> bool:
        numbers = self._key_of[blocks]
        has_key = numbers >= _FIRST_KEY
        if not has_any(has_key):
            return False
        if not has_all(has_key):
            numbers, blocks = numbers[has_key], blocks[has_key]
        self._key_of[blocks] = _NO_KEY
        if self._later and not self._later.keys().isdisjoint(numbers.tolist()):
            for key, block in zip(numbers.tolist(), blocks.tolist(), strict=True):
                self._remove(key, block)
        else:
            self._block_of[numbers] = NULL_BLOCK
        return True

    def _remove(self, key: int, block: int) -> None:
        later = self._later.get(key, [])
        if block in later:
            later.remove(block)
        else:
            self._block_of[key] = later.pop(0) if later else NULL_BLOCK
        if not later:
            self._later.pop(key, None)

    def clear(self) -> None:
        self._block_of[:] = NULL_BLOCK
        self._key_of[1:] = _NO_KEY
        self._later.clear()

    def blocks_by_key(self) -> dict[int, list[int]]:
        keys = np.flatnonzero(self._block_of).tolist()
        return {key: [int(self._block_of[key]), *self._later.get(key, ())] for key in keys}

    def keys_by_block(self) -> dict[int, int]:
        blocks = np.flatnonzero(self._key_of >= 0).tolist()
        return {block: int(self._key_of[block]) for block in blocks}
