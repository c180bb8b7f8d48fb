"""The pool of KV blocks: reference counts and the free list, in the order blocks are reused.

Blocks are 0 to num_blocks - 1. Block 0 is the null block: a placeholder in block tables that is
never free and never used. The free list is a queue:

    places     ... head                                              tail
    front (used first)   [released first ...            released last]

A prefix hit takes a block out of its middle. The block's entry stays behind, and whoever comes to
it passes it over: an entry counts only at the place that `_place_of` has for its block. All of it
is columns, so that a whole prompt's blocks are taken, pinned or released in a few operations; ids
have 64 bits, because NumPy is several times slower at indexing by fewer.
"""

import numpy as np

from twostroke.arrays import ONE, ZERO, Int32s, Int64s, has_all

NULL_BLOCK = 0
NO_BLOCKS: Int64s = np.empty(0, np.int64)
_HELD = np.array(-1)  # the place of a block that is not free
_SLACK_ENTRIES = 1024
_LEAST_LOOK = 64  # entries that are looked at together where some do not count


class BlockPool:
    """Blocks with reference counts; a block is in the free list exactly when its count is 0."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_usable = self.num_free = num_blocks - 1
        self.references: Int32s = np.zeros(num_blocks, np.int32)
        self._queue: Int64s = np.empty(4 * num_blocks + _SLACK_ENTRIES, np.int64)
        self._queue[: self.num_free] = np.arange(1, num_blocks)
        self._places = np.arange(len(self._queue))
        self._place_of = np.arange(-1, num_blocks - 1)  # of a block's entry in the queue
        self._head, self._tail = 0, self.num_free

    def take(self, count: int) -> Int64s:
        """The `count` blocks at the front, each with one reference. There must be that many."""
        end = self._head + count
        if self._all_count(end):
            taken = self._queue[self._head : end].copy()
            self._head = end
        else:
            taken = self._take_counting(count)
        self.num_free -= count
        self.references[taken] = ONE
        self._place_of[taken] = _HELD
        return taken

    def _all_count(self, end: int) -> bool:
        """Whether each entry of the queue before this place counts."""
        if self._tail - self._head == self.num_free:
            return True
        entries = self._queue[self._head : end]
        return end <= self._tail and has_all(
            self._place_of[entries] == self._places[self._head : end]
        )

    def _take_counting(self, count: int) -> Int64s:
        """The same, passing over entries that do not count."""
        taken = [NO_BLOCKS]
        while count:
            end = min(self._head + max(count, _LEAST_LOOK), self._tail)
            places = self._counting(self._head, end)[:count]
            taken.append(self._queue[self._head : end][places])
            count -= len(places)
            self._head = self._head + places.item(-1) + 1 if not count else end
        return taken[1] if len(taken) == 2 else np.concatenate(taken)

    def pin(self, blocks: Int64s) -> None:
        """Add a reference to each of these blocks, all different, out of the free list or not."""
        references = self.references[blocks]
        free = blocks[references == ZERO]
        self._place_of[free] = _HELD
        self.num_free -= len(free)
        references += ONE
        self.references[blocks] = references

    def release(self, blocks: Int64s) -> None:
        """Drop a reference from each, in order; those left with none go to the back, in order.

        They must all be different, but for null blocks.
        """
        left = self.references[blocks]
        left -= ONE
        freed = blocks[left == ZERO]
        if len(freed) < len(blocks):
            null = blocks == NULL_BLOCK
            left[null] = 0
        self.references[blocks] = left
        if self._tail + len(freed) > len(self._queue):
            self._close_up()
        end = self._tail + len(freed)
        self._queue[self._tail : end] = freed
        self._place_of[freed] = self._places[self._tail : end]
        self._tail = end
        self.num_free += len(freed)

    def _close_up(self) -> None:
        """Move the free list to the front of the queue's memory."""
        free = self.free_blocks()
        self._head, self._tail = 0, len(free)
        self._queue[: len(free)] = free
        self._place_of[free] = np.arange(len(free))

    def free_blocks(self) -> Int64s:
        """The free list, front to back."""
        return self._queue[self._head : self._tail][self._counting(self._head, self._tail)]

    def _counting(self, start: int, end: int) -> Int64s:
        """Which entries of this part of the queue count, from `start` on."""
        entries = self._queue[start:end]
        places: Int64s = (self._place_of[entries] == self._places[start:end]).nonzero()[0]
        return places
