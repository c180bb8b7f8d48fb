"""The pool of KV blocks: reference counts and the free list, in the order blocks are reused.

Blocks are 0 to num_blocks - 1. Block 0 is the null block: a placeholder in block tables that is
never free and never used. The free list is a range of blocks that were never used, and a queue:

    front (used first)   [fresh, fresh + 1 .. num_blocks - 1]   released first .. released last

A prefix hit takes a block out of its middle. The block's entry stays behind and is `stale` from
then on: whoever comes to it passes it over. If the block is released again, it gets a second
entry further back, so of several entries of a block the first ones are the stale ones. Plain Python
containers hold all this: single items of a list are read several times faster than of an array.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain

NULL_BLOCK = 0
_SLACK_ENTRIES = 1024
_SHORTEST_RUN = 16


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


class BlockPool:
    """Blocks with reference counts; a block is in the free list exactly when its count is 0."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.references = [0] * num_blocks
        self._fresh = NULL_BLOCK + 1  # the first block that was never used
        self._queue: deque[int] = deque()
        self._stale: dict[int, int] = {}  # how many entries of a block in the queue are

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    def take(self, count: int) -> list[int]:
        """The `count` blocks at the front, each with one reference. There must be that many."""
        first, references = self._queue.popleft, self.references
        taken: list[int] = []
        while missing := count - len(taken):
            fresh = self._fresh
            self._fresh = min(fresh + missing, self.num_blocks)
            batch = [*range(fresh, self._fresh)] or [first() for _ in range(missing)]
            taken += self._without_stale(batch) if self._stale else batch
        run = run_of(taken)
        if run is not None:
            references[run] = [1] * count
        else:
            for block in taken:
                references[block] = 1
        self.num_free -= count
        return taken

    def _without_stale(self, batch: list[int]) -> list[int]:
        """Pass over the stale ones among entries that just left the queue."""
        stale = self._stale
        passed = [block for block in batch if block in stale]
        once = set(passed)
        if len(once) == len(passed):
            for block in passed:
                self._pass_over(stale, block)
            return [block for block in batch if block not in once] if passed else batch
        # A block's stale entries and its own are in one batch: one by one.
        taken = []
        for block in batch:
            if block in stale:
                self._pass_over(stale, block)
            else:
                taken.append(block)
        return taken

    @staticmethod
    def _pass_over(stale: dict[int, int], block: int) -> None:
        if stale[block] == 1:
            del stale[block]
        else:
            stale[block] -= 1

    def pin(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block, taking it out of the free list where it was free."""
        references, stale = self.references, self._stale
        for block in blocks:
            if references[block] == 0:
                stale[block] = stale.get(block, 0) + 1
                self.num_free -= 1
            references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop a reference from each, in order; those left with none go to the back, in order."""
        references, blocks = self.references, list(blocks)
        run, ones = run_of(blocks), [1] * len(blocks)
        if run is not None and references[run] == ones:
            references[run] = [0] * len(blocks)
            freed = blocks
        else:
            freed = []
            for block in blocks:
                if block != NULL_BLOCK:
                    left = references[block] - 1
                    references[block] = left
                    if not left:
                        freed.append(block)
        self._queue.extend(freed)
        self.num_free += len(freed)
        # A prefix that is hit again and again leaves an entry behind each time.
        if len(self._queue) > 2 * self.num_free + _SLACK_ENTRIES:
            self._queue = deque(block for block in self.free_blocks() if block < self._fresh)
            self._stale = {block: 1 for block in self._stale if block >= self._fresh}

    def free_blocks(self) -> Iterator[int]:
        """The free list, front to back."""
        stale = dict(self._stale)
        for block in chain(range(self._fresh, self.num_blocks), self._queue):
            if block in stale:
                self._pass_over(stale, block)
            else:
                yield block
