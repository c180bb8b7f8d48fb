"""Chooses the engine for a request, from what the front end itself sent and saw end. No I/O.

The load of an engine is the work that a newcomer would find there, in tokens:

    load = prompt tokens sent whose request has no first token yet, less what was to be cached
         + DECODE_TOKENS * unfinished requests
         + DECODE_TOKENS * waiting * 6 * max(0, KV usage - 0.5)     (by the engine's latest stats)

A prompt token weighs 1: it is computed before anything sent later. An unfinished request decodes
one token a step beside the newcomer: over the hundred-odd steps of an answer at about a quarter
of a prompt token's cost each (the weights are read anyway) that is DECODE_TOKENS, so decodes are
balanced by their number. The last term is vLLM 0.22.1's, in tokens: where the pool is full, those
who wait must wait for others to end. vLLM's counts come from the engines, up to 100 ms late, so a
burst goes where it was quiet before; here every send counts at once.

The engine with the least `load - cached prefix` is chosen: what is cached there is work saved. An
engine whose load exceeds MAX_IMBALANCE * the least load + SLACK_TOKENS is no candidate, whatever
it has cached, so a popular prefix spreads as it gets busy; ties go round.

What an engine has cached is guessed: an index of the prompts sent there, block by block, of which
the least recently sent are forgotten once they exceed its pool. A wrong guess costs time only.
"""

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from twostroke.errors import EngineDeadError
from twostroke.messages import EngineStats, Int32s

DECODE_TOKENS = 32
MAX_IMBALANCE = 1.5
SLACK_TOKENS = 8 * DECODE_TOKENS  # so that a prefix is worth something while the others idle
MAX_INDEX_BLOCKS = 1 << 16  # an engine; about 10 MB
FINE_BLOCKS, COARSE = 8, 4  # beyond so many blocks of a prompt only every fourth has a key
_FEW = 8  # this part of them may be too many
_MUCH = 1 << 16  # keys that are listed in vain before they are struck out


class PrefixKeys:
    """Keys of a prompt's blocks, each for all tokens up to the end of one.

    Every block at the beginning has one, later ones every `COARSE`: what is cached of a long prompt
    need not be known to the block. Sums of products with fixed random numbers, modulo 2^64, running
    on from block to block: two prompts share a key with probability below 2^-40, and then one of
    them may go elsewhere.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._multipliers: NDArray[np.uint64] = np.empty(0, np.uint64)

    def of(self, token_ids: Sequence[int] | Int32s, salt: str) -> list[int]:
        """One key for each whole block but the last token's: that token is always computed."""
        num_blocks = (len(token_ids) - 1) // self._block_size
        if num_blocks <= 0:
            return []
        num_tokens = num_blocks * self._block_size
        if num_tokens > len(self._multipliers):
            # The same stream from its start, so keys stay what they were.
            self._multipliers = np.random.Generator(np.random.PCG64(0)).integers(
                0, 1 << 64, 2 * num_tokens, np.uint64
            )
        terms = np.asarray(token_ids[:num_tokens]).astype(np.uint64)
        terms += np.uint64(1)  # else a token 0 would be like no token
        terms *= self._multipliers[:num_tokens]
        chain = terms.cumsum()[self._block_size - 1 :: self._block_size]
        digest = hashlib.blake2b(salt.encode(), digest_size=8).digest()
        chain = chain + np.frombuffer(digest, np.uint64)
        fine: list[int] = chain[:FINE_BLOCKS].tolist()
        coarse: list[int] = chain[FINE_BLOCKS + COARSE - 1 :: COARSE].tolist()
        return fine + coarse


def blocks_of(num_keys: int) -> int:
    """Blocks that a prompt's first keys stand for."""
    return num_keys + max(num_keys - FINE_BLOCKS, 0) * (COARSE - 1)


class PrefixIndex:
    """Which blocks were lately sent to one engine: at most `capacity` (or an eighth more, if it is
    large), the oldest go first.

    The ends of a prompt are older than its beginnings, as in the engine's own cache. So of each
    prompt the blocks up to some one are here, and none behind it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._num_blocks = 0
        self._last: dict[int, int] = {}  # which prompt had a key last, by its number
        # Their numbers and keys, the oldest first; how many keys of each are left out before.
        self._prompts: deque[tuple[int, Sequence[int], int]] = deque()
        self._num_listed = 0  # keys there, those counted that a later prompt had too

    def __len__(self) -> int:
        return self._num_blocks

    def match(self, keys: Sequence[int]) -> int:
        """How many leading blocks it holds."""
        last, low, high = self._last, 0, len(keys)
        if not high or keys[0] not in last:  # most often
            return 0
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in last:
                low = middle + 1
            else:
                high = middle
        return low

    def add(self, keys: Sequence[int]) -> None:
        """These blocks of a prompt are the newest now."""
        if not keys:
            return
        number = self._prompts[-1][0] + 1 if self._prompts else 0
        last, before = self._last, len(self._last)
        last.update(zip(keys[:FINE_BLOCKS], repeat(number)))
        fine = len(last) - before
        last.update(zip(keys[FINE_BLOCKS:], repeat(number)))
        self._num_blocks += fine + COARSE * (len(last) - before - fine)
        self._prompts.append((number, keys, 0))
        self._num_listed += len(keys)
        if self._num_blocks > self.capacity + self.capacity // _FEW:
            self._forget_oldest()
        if self._num_listed > 2 * len(last) + _MUCH:
            self._list_anew()

    def _forget_oldest(self) -> None:
        while self._prompts and (excess := self._num_blocks - self.capacity) > 0:
            number, keys, before = self._prompts.popleft()
            self._num_listed -= len(keys)
            stale = self._num_stale(number, keys)
            # Of its own keys the last ones go: all, or as many as make up for the excess.
            coarse = max(len(keys) - max(FINE_BLOCKS - before, stale), 0)
            dropped = -(-excess // COARSE)
            if dropped > coarse:
                dropped = min(coarse + excess - coarse * COARSE, len(keys) - stale)
            left = len(keys) - dropped
            for key in keys[left:]:
                self._last.pop(key, None)
            coarse = min(coarse, dropped)
            self._num_blocks -= coarse * COARSE + dropped - coarse
            if left > stale:
                self._prompts.appendleft((number, keys[:left], before))
                self._num_listed += left

    def _num_stale(self, number: int, keys: Sequence[int]) -> int:
        """How many of a prompt's keys a later one had too: they are its first ones."""
        last, low, high = self._last, 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if last.get(keys[middle]) == number:
                high = middle
            else:
                low = middle + 1
        return low

    def _list_anew(self) -> None:
        """Without what later prompts had too: of each the keys up to some one."""
        listed, self._prompts, self._num_listed = self._prompts, deque(), 0
        for number, keys, before in listed:
            stale = self._num_stale(number, keys)
            if own := keys[stale:]:
                self._prompts.append((number, own, before + stale))
                self._num_listed += len(own)

    def clear(self) -> None:
        self._last.clear()
        self._prompts.clear()
        self._num_blocks = self._num_listed = 0


@dataclass(slots=True)
class _Engine:
    prefixes: PrefixIndex = field(default_factory=lambda: PrefixIndex(MAX_INDEX_BLOCKS))
    prefill_tokens: int = 0
    num_requests: int = 0
    stats: EngineStats = field(default_factory=EngineStats)


@dataclass(slots=True)
class _Sent:
    engine: int
    prefill_tokens: int  # 0 once it has its first token


class RoutingPolicy:
    """Counts what each engine has to do, and chooses among them.

    Engines 0 to `num_engines` - 1 are there from the start; others are added. Requests are known by
    `handle`, any integer unique among the unfinished; unknown ones are ignored. `block_size` is the
    grain of the prefix index, in tokens; the engines' own may differ. Engines without a prefix
    cache have no `affinity`.
    """

    def __init__(
        self, num_engines: int = 0, *, block_size: int = 16, affinity: bool = True
    ) -> None:
        self._block_size = block_size
        self._affinity = affinity
        self._keys = PrefixKeys(block_size)
        self._engines: dict[int, _Engine] = {i: _Engine() for i in range(num_engines)}
        self._sent: dict[int, _Sent] = {}
        self._first = 0  # the engine that wins a tie

    @property
    def has_affinity(self) -> bool:
        """Whether it matters what an engine has cached."""
        return self._affinity and len(self._engines) > 1

    # ------------------------------------------------------------ what it answers

    def keys_of(self, token_ids: Sequence[int] | Int32s, cache_salt: str = "") -> Sequence[int]:
        """The keys of a prompt's blocks, to be given to the other methods."""
        return self._keys.of(token_ids, cache_salt) if self.has_affinity else ()

    def choose(self, keys: Sequence[int] = (), among: Sequence[int] | None = None) -> int:
        """The engine for a prompt, of those in `among` (None: of all). Changes nothing.

        Raises EngineDeadError when there is none.
        """
        candidates = self._engines if among is None else among
        if len(candidates) <= 1:
            for engine in candidates:
                return engine
            raise EngineDeadError("every engine is gone")
        loads = {i: self.load(i) for i in candidates}
        bound = MAX_IMBALANCE * min(loads.values()) + SLACK_TOKENS
        count = max(loads) + 1
        scores = [
            (load - self.cached_tokens(i, keys), load, (i - self._first) % count, i)
            for i, load in loads.items()
            if load <= bound
        ]
        return min(scores)[-1]

    def load(self, engine: int) -> float:
        """Tokens of work outstanding there, as the module's formula has it."""
        if (it := self._engines.get(engine)) is None:
            return 0
        crowding, stats = 0.0, it.stats
        if stats.num_waiting and stats.kv_usage > 0.5:
            waiting = min(stats.num_waiting, it.num_requests)  # what has ended waits no more
            crowding = waiting * 6 * (stats.kv_usage - 0.5)
        return it.prefill_tokens + DECODE_TOKENS * (it.num_requests + crowding)

    def prefill_tokens(self, engine: int) -> int:
        """Prompt tokens sent there and not computed yet."""
        return self._engines[engine].prefill_tokens

    def cached_tokens(self, engine: int, keys: Sequence[int]) -> int:
        """How many leading tokens of a prompt the engine should have in its cache."""
        return blocks_of(self._engines[engine].prefixes.match(keys)) * self._block_size

    # ------------------------------------------------------------ what it is told

    def add_engine(self, engine: int) -> None:
        """One more engine, or one that is back: with nothing to do, and nothing cached."""
        self._engines[engine] = _Engine()

    def engine_ready(self, engine: int, pool_tokens: int) -> None:
        """The engine's KV pool holds that many tokens: no use in remembering more."""
        capacity = min(MAX_INDEX_BLOCKS, pool_tokens // self._block_size)
        self._engines[engine].prefixes.capacity = capacity

    def engine_stats(self, engine: int, stats: EngineStats) -> None:
        """What the engine last said of itself."""
        self._engines[engine].stats = stats

    def engine_died(self, engine: int) -> None:
        """It is chosen no more, and what it had is forgotten."""
        self._engines.pop(engine, None)
        self._sent = {h: sent for h, sent in self._sent.items() if sent.engine != engine}

    def prefixes_reset(self, engine: int) -> None:
        """The engine's prefix cache is empty now."""
        if (it := self._engines.get(engine)) is not None:
            it.prefixes.clear()

    def cached(self, engine: int, keys: Sequence[int]) -> None:
        """The engine has computed, or got, the KV of these blocks."""
        if (it := self._engines.get(engine)) is not None:
            it.prefixes.add(keys)

    def sent(
        self, handle: int, engine: int, num_prompt_tokens: int, keys: Sequence[int] = ()
    ) -> None:
        """A request was sent to an engine, which computes its prompt as far as it is not cached.

        0 prompt tokens: their KV comes from elsewhere.
        """
        it = self._engines[engine]
        tokens = max(num_prompt_tokens - self.cached_tokens(engine, keys), 0)
        it.prefixes.add(keys)
        self._sent[handle] = _Sent(engine, tokens)
        it.prefill_tokens += tokens
        it.num_requests += 1
        self._first = engine + 1

    def first_token(self, handle: int) -> None:
        """The request's prompt is computed."""
        if (sent := self._sent.get(handle)) is not None:
            self._engines[sent.engine].prefill_tokens -= sent.prefill_tokens
            sent.prefill_tokens = 0

    def ended(self, handle: int) -> None:
        """The request finished or was aborted."""
        if (sent := self._sent.pop(handle, None)) is not None:
            self._engines[sent.engine].prefill_tokens -= sent.prefill_tokens
            self._engines[sent.engine].num_requests -= 1
