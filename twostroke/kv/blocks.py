"""The pool of KV blocks: reference counts and the free list, in the order blocks are reused.

Blocks are 0 to num_blocks - 1. Block 0 is the null block: a placeholder in block tables that is
never free and never used; here it doubles as the anchor of the free list, which is a circle:

    0 ──next──▶ front (reused first) ──▶ ... ──▶ back (just released) ──▶ 0

A doubly linked list, because a prefix hit takes a block out of the middle. Plain Python lists hold
the links: single items of a list are read several times faster than items of an array.
"""

from collections.abc import Iterable, Iterator

NULL_BLOCK = 0


class BlockPool:
    """Blocks with reference counts; a block is in the free list exactly when its count is 0."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.references = [0] * num_blocks
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    def take(self, count: int) -> list[int]:
        """The `count` blocks at the front, each with one reference. There must be that many."""
        following, references = self._next, self.references
        taken = []
        block = following[NULL_BLOCK]
        for _ in range(count):
            taken.append(block)
            references[block] = 1
            block = following[block]
        following[NULL_BLOCK] = block
        self._previous[block] = NULL_BLOCK
        self.num_free -= count
        return taken

    def pin(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block, taking it out of the free list where it was free."""
        following, previous, references = self._next, self._previous, self.references
        for block in blocks:
            if references[block] == 0:
                before, after = previous[block], following[block]
                following[before] = after
                previous[after] = before
                self.num_free -= 1
            references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop a reference from each, in order; those left with none go to the back, in order."""
        following, previous, references = self._next, self._previous, self.references
        back = previous[NULL_BLOCK]
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            references[block] -= 1
            if references[block] == 0:
                following[back] = block
                previous[block] = back
                back = block
                self.num_free += 1
        following[back] = NULL_BLOCK
        previous[NULL_BLOCK] = back

    def free_blocks(self) -> Iterator[int]:
        """The free list, front to back."""
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            yield block
            block = self._next[block]
