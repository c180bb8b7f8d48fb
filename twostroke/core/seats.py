"""Running requests in columns, one row a seat, so that a step over many decodes is array work.

A seat is what the worker knows a request by (`StepPlan.slots`). The counters of a seated request
live here and nowhere else; `read` and `write` carry them to and from the `Request` for the few that
need Python in a step. Seats that index columns have 64 bits, because NumPy takes several times as
long by fewer. Thresholds are kept beside the counters, so that "does this row need a block, a
registration, a stop check?" is one comparison per row:

    room          tokens that its block table holds     (needs a block when it would exceed this)
    register_at   tokens at which its next block is full and can enter the prefix cache
    window_at     computed tokens at which its next block falls out of the sliding window
    stop_at       length at which it certainly stops
"""

from collections.abc import Iterable

import numpy as np

from twostroke.arrays import has_all, has_any, most
from twostroke.core.request import Request, append_tokens
from twostroke.kv.manager import KvManager
from twostroke.kv.prefix import LANES
from twostroke.messages import Bools, Int32s, Int64s

NEVER = 2**31 - 1
VACANT = -1
_FILTER_SIZE = 4096


class Seats:
    """Columns [num_seats] and the tokens [num_seats, max_model_len + slack] of running requests.

    Of tokens that had keys when a request took its seat there are none.
    """

    def __init__(
        self, num_seats: int, kv: KvManager, *, max_model_len: int, max_length: int, num_drafts: int
    ) -> None:
        def column() -> Int32s:
            return np.zeros(num_seats, np.int32)

        self.uid: Int64s = np.full(num_seats, VACANT, np.int64)
        self.handle: Int64s = np.zeros(num_seats, np.int64)
        self.computed: Int32s = column()
        self.known: Int32s = column()
        self.placeholders: Int32s = column()
        self.num_drafts: Int32s = column()
        self.num_prompt: Int32s = column()
        self.end: Int32s = column()  # prompt + max_tokens
        self.stop_at: Int32s = column()
        self.room: Int32s = column()
        self.register_at: Int32s = np.full(num_seats, NEVER, np.int32)
        self.window_at: Int32s = np.full(num_seats, NEVER, np.int32)
        self.num_keys: Int32s = column()  # blocks whose prefix key is known
        self.special: Bools = np.zeros(num_seats, np.bool_)  # its results need Python
        self.sums = np.zeros((num_seats, LANES), np.uint64)
        self.drafts: Int32s = np.zeros((num_seats, num_drafts), np.int32)
        self.tokens: Int32s = np.zeros((num_seats, max_model_len + num_drafts + 1), np.int32)
        self.request_of: list[Request | None] = [None] * num_seats
        # How many seated requests stop at a token id, by the id's last bits: rules nearly all
        # tokens out without looking at each request's stop ids.
        self.stop_filter: Int32s = np.zeros(_FILTER_SIZE, np.int32)
        self._num_stop_ids = 0
        self._tokens_from = [0] * num_seats  # those before are in `Request.tokens` alone
        self._kv = kv
        self._max_length = max_length
        self._vacant = list(range(num_seats - 1, -1, -1))
        self._block_offsets = np.arange(kv.block_size)

    # ------------------------------------------------------------ sitting and leaving

    def sit(self, request: Request) -> int:
        """Give a request a seat; its counters move into the columns."""
        slot = self._vacant.pop()
        request.slot = slot
        self.request_of[slot] = request
        self.uid[slot] = request.uid
        self.handle[slot] = request.handle
        self.num_prompt[slot] = request.num_prompt_tokens
        longest = request.num_prompt_tokens + request.max_tokens
        self.end[slot] = min(longest, NEVER)
        self.stop_at[slot] = min(longest, self._max_length)
        self.num_drafts[slot] = 0
        self.sums[slot] = request.table.sums
        if request.num_known >= self.tokens.shape[1]:
            self.tokens = np.pad(self.tokens, ((0, 0), (0, request.num_known)))
        # Tokens whose blocks have keys are not looked at again while it runs.
        start = self._tokens_from[slot] = len(request.table.keys) * self._kv.block_size
        self.tokens[slot, start : request.num_known] = request.tokens[start:]
        for token in request.stop_ids.all:
            self.stop_filter[token % _FILTER_SIZE] += 1
        self._num_stop_ids += len(request.stop_ids.all)
        self.write(request)
        return slot

    def leave(self, request: Request, *, keep_tokens: bool = True) -> int:
        """Take the seat away; counters and, unless nobody needs them, tokens go to the request."""
        slot = request.slot
        self.read(request)
        if keep_tokens:
            request.tokens = self.tokens_of(request)
            request.table.sums = self.sums[slot].copy()
        request.slot = -1
        self.request_of[slot] = None
        self.uid[slot] = VACANT
        self._vacant.append(slot)
        for token in request.stop_ids.all:
            self.stop_filter[token % _FILTER_SIZE] -= 1
        self._num_stop_ids -= len(request.stop_ids.all)
        return slot

    def read(self, request: Request) -> None:
        """Copy a seated request's counters into the request."""
        slot = request.slot
        request.num_computed = int(self.computed[slot])
        request.num_known = int(self.known[slot])
        request.num_placeholders = int(self.placeholders[slot])

    def write(self, request: Request) -> None:
        """Copy the request's counters into its seat's columns."""
        slot = request.slot
        self.computed[slot] = request.num_computed
        self.known[slot] = request.num_known
        self.placeholders[slot] = request.num_placeholders
        self.special[slot] = request.frames_to_discard > 0
        self.num_keys[slot] = len(request.table.keys)
        self.refresh_table(request)

    def refresh_table(self, request: Request) -> None:
        """Recompute the thresholds that follow from a seated request's block table."""
        kv, slot, table = self._kv, request.slot, request.table
        self.room[slot] = len(table.blocks) * kv.block_size
        if kv.caching:
            self.register_at[slot] = ((table.num_registered or 0) + 1) * kv.block_size
        if kv.windowed:
            self.window_at[slot] = kv.window_boundary(table)

    # ------------------------------------------------------------ tokens

    def tokens_of(self, request: Request) -> Int32s:
        """All known tokens of a seated request, which was `read`."""
        start = self._tokens_from[request.slot]
        own = self.tokens[request.slot, start : request.num_known]
        return np.concatenate((request.tokens[:start], own))

    def append(self, request: Request, new: list[int]) -> None:
        """Add known tokens to a request, seated or not. `read` it before, `write` it after."""
        end = request.num_known + len(new)
        if request.slot < 0:
            request.tokens = append_tokens(request.tokens, new)
        else:
            if end > self.tokens.shape[1]:
                self.tokens = np.pad(self.tokens, ((0, 0), (0, end)))
            self.tokens[request.slot, request.num_known : end] = new
        request.num_known = end

    def hash_blocks(self, slots: Int64s, up_to: Int32s) -> None:
        """Extend prefix keys of these seats over the full blocks of their first `up_to` tokens."""
        size = self._kv.block_size
        first = self.num_keys[slots]
        missing = most(up_to // size - first)
        if missing <= 0:
            return
        if 2 * missing >= len(slots):
            for slot, start, end in zip(
                slots.tolist(), first.tolist(), up_to.tolist(), strict=True
            ):
                self._hash_row(slot, start, end)
            return
        due = (first + 1) * size <= up_to
        while has_any(due):
            if not has_all(due):
                slots, first, up_to = slots[due], first[due], up_to[due]
            positions = (first * size)[:, None] + self._block_offsets
            tokens = self.tokens[slots[:, None], positions]
            keys, sums = self._kv.hasher.extend_many(self.sums[slots], first, tokens)
            self.sums[slots] = sums
            first = first + 1
            self.num_keys[slots] = first
            for slot, key in zip(slots.tolist(), keys, strict=True):
                request = self.request_of[slot]
                assert request is not None
                request.table.keys.append(key)
            due = (first + 1) * size <= up_to

    def _hash_row(self, slot: int, first: int, up_to: int) -> None:
        """As `hash_blocks`, for one seat with many blocks to hash."""
        request = self.request_of[slot]
        assert request is not None
        tokens = self.tokens[slot, first * self._kv.block_size : up_to]
        keys, self.sums[slot] = self._kv.hasher.extend_one(self.sums[slot], first, tokens)
        request.table.keys += keys
        self.num_keys[slot] = first + len(keys)

    @property
    def have_stop_ids(self) -> bool:
        """Whether any seated request stops at a token."""
        return self._num_stop_ids > 0

    def may_stop(self, tokens: Int32s) -> Bools:
        """Which of these tokens could be a stop id of some seated request."""
        counts: Int32s = self.stop_filter[tokens & (_FILTER_SIZE - 1)]
        return counts > 0

    def requests(self) -> Iterable[Request]:
        return (request for request in self.request_of if request is not None)
