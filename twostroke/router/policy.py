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
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

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

UInt64s = NDArray[np.uint64]
_NO_KEYS = array("Q")


# Numbers, one behind the other. In an array they take an eighth of the memory.
PromptKeys: TypeAlias = "list[int] | array[int]"


class KeyMaker(Protocol):
    """Makes keys of prompts' blocks: equal where the prompts are equal up to there."""

    def __init__(self, block_size: int) -> None: ...

    def of(self, token_ids: Sequence[int] | Int32s, salt: str) -> PromptKeys:
        """One for each whole block but the last token's, those beyond `FINE_BLOCKS` thinned out."""
        ...


class PrefixKeys:
    """Keys of a prompt's blocks, each for all tokens up to the end of one.

    Every block at the beginning has one, later ones every `COARSE`: what is cached of a long prompt
    need not be known to the block. Sums of products with fixed random numbers, modulo 2^64, running
    on from block to block: two prompts share a key with probability below 2^-40, and then one of
    them may go elsewhere.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._multipliers: UInt64s = np.empty(0, np.uint64)

    def of(self, token_ids: Sequence[int] | Int32s, salt: str) -> "array[int]":
        """One key for each whole block but the last token's: that token is always computed."""
        size = self._block_size
        num_blocks = (len(token_ids) - 1) // size
        if num_blocks <= 0:
            return _NO_KEYS
        num_fine = min(num_blocks, FINE_BLOCKS) * size
        num_tokens = num_fine + (num_blocks * size - num_fine) // (COARSE * size) * COARSE * size
        if num_tokens > len(self._multipliers):
            # The same stream from its start, so keys stay what they were.
            self._multipliers = np.random.Generator(np.random.PCG64(0)).integers(
                0, 1 << 64, 2 * num_tokens, np.uint64
            )
        terms = np.asarray(token_ids[:num_tokens]).astype(np.uint64)
        terms += np.uint64(1)  # else a token 0 would be like no token
        factors = self._multipliers[:num_tokens]
        fine = _products(terms[:num_fine], factors[:num_fine], size)
        coarse = _products(terms[num_fine:], factors[num_fine:], COARSE * size)
        digest = hashlib.blake2b(salt.encode(), digest_size=8).digest()
        chain = np.concatenate((np.frombuffer(digest, np.uint64), fine, coarse)).cumsum()
        return array("Q", chain[1:].tobytes())


def _products(terms: UInt64s, factors: UInt64s, size: int) -> UInt64s:
    """The sum of `terms * factors` over each `size` of them."""
    sums: UInt64s = np.einsum("ij,ij->i", terms.reshape(-1, size), factors.reshape(-1, size))
    return sums


def blocks_of(num_keys: int) -> int:
    """Blocks that a prompt's first keys stand for."""
    return num_keys + max(num_keys - FINE_BLOCKS, 0) * (COARSE - 1)


@dataclass(slots=True, eq=False)
class _Stretch:
    """Keys of a prompt, one behind the other, that were last sent together."""

    start: int  # how many keys of the prompt are before them
    keys: PromptKeys

    def num_shared(self, keys: PromptKeys) -> int:
        """How many of them a prompt has that has the first."""
        own, start = self.keys, self.start
        low, high = 1, min(len(own), len(keys) - start)
        if own[high - 1] == keys[start + high - 1]:  # most often
            return high
        while low < high:
            middle = (low + high) // 2
            if own[middle] == keys[start + middle]:
                low = middle + 1
            else:
                high = middle
        return low


class PrefixIndex:
    """Which blocks were lately sent to one engine: at most `capacity` (or an eighth more, if it is
    large), the oldest go first.

    The ends of a prompt are older than its beginnings, as in the engine's own cache. So of each
    prompt the blocks up to some one are here, and none behind it. As a key stands for all that is
    before it, prompts need not be looked at key by key, but where they part:

        prompts     a b c d e f      a b c g h i      a b c g k
        stretches   a b c    d e f    g    h i    k
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._num_blocks = 0
        self._by_first: dict[int, _Stretch] = {}  # by the first of its keys
        self._by_age: OrderedDict[_Stretch, None] = OrderedDict()  # the oldest first

    def __len__(self) -> int:
        return self._num_blocks

    def match(self, keys: PromptKeys) -> int:
        """How many leading blocks it holds."""
        held, by_first = 0, self._by_first
        while held < len(keys) and (stretch := by_first.get(keys[held])) is not None:
            shared = stretch.num_shared(keys)
            held += shared
            if shared < len(stretch.keys):
                break
        return held

    def add(self, keys: PromptKeys) -> int:
        """These blocks of a prompt are the newest now. Returns how many of them it held before."""
        held, path = 0, []
        while held < len(keys) and (stretch := self._by_first.get(keys[held])) is not None:
            shared = stretch.num_shared(keys)
            if shared < len(stretch.keys):
                stretch = self._part(stretch, shared)
            path.append(stretch)
            held += shared
        if held < len(keys):
            rest = self._by_first[keys[held]] = _Stretch(held, keys[held:])
            path.append(rest)
            self._num_blocks += blocks_of(len(keys)) - blocks_of(held)
        for stretch in reversed(path):
            self._by_age[stretch] = None
            self._by_age.move_to_end(stretch)
        if self._num_blocks > self.capacity + self.capacity // _FEW:
            self._forget_oldest()
        return held

    def _part(self, stretch: _Stretch, at: int) -> _Stretch:
        """Cut it in two; what is behind the cut stays as old as it is. Returns the other half."""
        front = _Stretch(stretch.start, stretch.keys[:at])
        stretch.start, stretch.keys = stretch.start + at, stretch.keys[at:]
        self._by_first[front.keys[0]], self._by_first[stretch.keys[0]] = front, stretch
        return front

    def _forget_oldest(self) -> None:
        while self._by_age and (excess := self._num_blocks - self.capacity) > 0:
            stretch = next(iter(self._by_age))  # nothing follows it any more
            start, end = stretch.start, stretch.start + len(stretch.keys)
            # Its last keys go: all, or as many as make up for the excess.
            num_coarse = max(end - max(start, FINE_BLOCKS), 0)
            dropped = -(-excess // COARSE)
            if dropped > num_coarse:
                dropped = min(num_coarse + excess - num_coarse * COARSE, end - start)
            self._num_blocks -= blocks_of(end) - blocks_of(end - dropped)
            if dropped < end - start:
                del stretch.keys[-dropped:]
            else:
                del self._by_age[stretch], self._by_first[stretch.keys[0]]

    def clear(self) -> None:
        self._by_first.clear()
        self._by_age.clear()
        self._num_blocks = 0


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
        self._keys: KeyMaker = PrefixKeys(block_size)
        self._engines: dict[int, _Engine] = {i: _Engine() for i in range(num_engines)}
        self._sent: dict[int, _Sent] = {}
        self._first = 0  # the engine that wins a tie

    @property
    def has_affinity(self) -> bool:
        """Whether it matters what an engine has cached."""
        return self._affinity and len(self._engines) > 1

    def use_keys(self, maker: type[KeyMaker]) -> None:
        """Know prompts by other keys than a server does. Before the first prompt."""
        self._keys = maker(self._block_size)

    # ------------------------------------------------------------ what it answers

    def keys_of(self, token_ids: Sequence[int] | Int32s, cache_salt: str = "") -> PromptKeys:
        """The keys of a prompt's blocks, to be given to the other methods."""
        return self._keys.of(token_ids, cache_salt) if self.has_affinity else _NO_KEYS

    def choose(self, keys: PromptKeys = _NO_KEYS, among: Sequence[int] | None = None) -> int:
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
        stats = it.stats
        if not stats.num_waiting or stats.kv_usage <= 0.5:
            return it.prefill_tokens + DECODE_TOKENS * it.num_requests
        waiting = min(stats.num_waiting, it.num_requests)  # what has ended waits no more
        crowding = waiting * 6 * (stats.kv_usage - 0.5)
        return it.prefill_tokens + DECODE_TOKENS * (it.num_requests + crowding)

    def prefill_tokens(self, engine: int) -> int:
        """Prompt tokens sent there and not computed yet."""
        return self._engines[engine].prefill_tokens

    def cached_tokens(self, engine: int, keys: PromptKeys) -> int:
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

    def cached(self, engine: int, keys: PromptKeys) -> None:
        """The engine has computed, or got, the KV of these blocks."""
        if (it := self._engines.get(engine)) is not None:
            it.prefixes.add(keys)

    def sent(
        self, handle: int, engine: int, num_prompt_tokens: int, keys: PromptKeys = _NO_KEYS
    ) -> None:
        """A request was sent to an engine, which computes its prompt as far as it is not cached.

        0 prompt tokens: their KV comes from elsewhere.
        """
        it = self._engines[engine]
        cached_tokens = blocks_of(it.prefixes.add(keys)) * self._block_size
        tokens = max(num_prompt_tokens - cached_tokens, 0)
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
