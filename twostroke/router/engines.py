"""The engines behind a dispatcher: roles, states, room, and who may read whose KV.

    loading ─ ready ─▶ ready ─ another role asked for ─▶ draining ─ nothing left ─▶ ready
       └──────────────────┴──────────────── gone ◀────────────┘

A role says what the router gives an engine; the engine itself knows of none, which is why a role
can change while it runs. An engine that is gone keeps its place, so that people see what happened
to it; one that comes back under the same index begins anew, with another `engine_id`.

Room is counted in blocks, and twice, because either way is wrong alone. `committed_blocks` are the
final sizes of all that was sent there: known at once, but blind to prefixes that requests share.
What the engine says it uses, plus what is on its way and what the running ones may grow by, sees
the sharing. The smaller of the two counts.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from twostroke.cost import LinkCost
from twostroke.errors import RequestError
from twostroke.kv_messages import KvEndpoint, KvLayoutRecord, KvLink, KvReceived
from twostroke.messages import EngineReady, EngineStats

Role = Literal["prefill", "decode", "both"]
State = Literal["loading", "ready", "draining", "gone"]

# A pair whose transfers fail is left alone for a while, twice as long each time it fails again.
BREAK_AFTER = 3  # failures in a row
BREAK_S, MAX_BREAK_S = 5.0, 300.0
_FULL = 0.95  # KV usage at which an engine that has work gets no more
_RATE_WEIGHT = 0.2  # of the newest transfer, in the mean of their rates


@dataclass(frozen=True, kw_only=True)
class Need:
    """Blocks of a request on one engine: for its prompt, and for the output it may come to."""

    prompt_blocks: int
    output_blocks: int

    @property
    def blocks(self) -> int:
        return self.prompt_blocks + self.output_blocks


@dataclass
class EnginePair:
    """A reader and whom it reads from, by the other's `engine_id`."""

    link: LinkCost | None = None  # as the reader measured it
    bytes_per_s: float | None = None  # mean of what transfers got
    error: str = ""  # of the last handshake
    num_failures: int = 0  # in a row, of handshakes and transfers
    broken_until_s: float = 0.0
    bytes_under_way: int = 0

    def is_usable(self, now_s: float) -> bool:
        return not self.error and now_s >= self.broken_until_s

    def measured(self, link: KvLink, now_s: float) -> None:
        """The reader shook hands with the other, and says how it went."""
        if self.error and not link.error:
            self.broken_until_s = 0.0
        self.error = link.error
        if link.error:
            self.num_failures += 1
            self._break(now_s, self.num_failures - 1)
        elif link.bytes_per_s > 0:
            self.link = LinkCost(
                base_s=link.base_s,
                message_s=link.message_s,
                bytes_per_s=link.bytes_per_s,
                pipelined=link.pipelined,
            )

    def received(self, received: KvReceived, now_s: float) -> None:
        """A transfer is over."""
        if received.error:
            self.num_failures += 1
            if self.num_failures >= BREAK_AFTER:
                self._break(now_s, self.num_failures - BREAK_AFTER)
            return
        self.num_failures = 0
        seconds = received.moving_s
        if received.num_bytes and seconds > 0:
            rate = received.num_bytes / seconds
            mean = self.bytes_per_s or rate
            self.bytes_per_s = mean + _RATE_WEIGHT * (rate - mean)

    def _break(self, now_s: float, times: int) -> None:
        self.broken_until_s = now_s + min(BREAK_S * 2 ** min(times, 10), MAX_BREAK_S)

    def wants_handshake(self, now_s: float) -> bool:
        """The last one failed, long enough ago. Asks once in a while."""
        if not self.error or now_s < self.broken_until_s:
            return False
        self.broken_until_s = now_s + MAX_BREAK_S
        return True

    def transfer_s(self, num_messages: int, num_bytes: int) -> float | None:
        """Seconds for so much, behind what is under way; None when nothing is known."""
        if self.link is not None:
            return self.link.transfer_s(num_messages, num_bytes + self.bytes_under_way)
        if self.bytes_per_s is not None:
            return (num_bytes + self.bytes_under_way) / self.bytes_per_s
        return None


@dataclass(eq=False)
class Engine:
    """What the router knows of one engine."""

    index: int
    role: Role
    state: State = "loading"
    next_role: Role | None = None  # what it drains for
    is_leaving: bool = False  # it will be gone soon, and has asked for nothing new
    error: str = ""  # why it is gone
    ready: EngineReady | None = None
    stats: EngineStats = field(default_factory=EngineStats)
    connected: set[str] = field(default_factory=set)  # engine ids that it was told of
    busy_s: float = 0.0  # spent in steps
    num_legs: int = 0  # open: being served there, or to be
    num_holds: int = 0  # prompts that it keeps for others
    committed_blocks: int = 0
    arriving_blocks: int = 0  # of requests without a first token
    growth_blocks: int = 0  # that those with one may take yet

    @property
    def endpoint(self) -> KvEndpoint | None:
        return None if self.ready is None else self.ready.kv

    @property
    def takes_work(self) -> bool:
        return self.state == "ready" and not self.is_leaving

    @property
    def decodes_now(self) -> bool:
        """It can take the second stroke of a request, be it its last."""
        return self.state in ("ready", "draining") and self.role != "prefill"

    @property
    def may_decode(self) -> bool:
        """It serves the second stroke, now or once it has loaded."""
        stays = self.state != "gone" and not self.is_leaving
        return stays and (self.next_role or self.role) != "prefill"

    @property
    def is_idle(self) -> bool:
        return not self.num_legs and not self.num_holds

    @property
    def has_nothing_left(self) -> bool:
        """Idle, and no request waits to come here."""
        return self.is_idle and not self.committed_blocks

    @property
    def num_blocks(self) -> int:
        """Usable ones; block 0 never is."""
        return 0 if self.ready is None else self.ready.num_blocks - 1

    def need(self, num_prompt_tokens: int, num_output_tokens: int) -> Need:
        """Blocks that a request takes here."""
        size = 16 if self.ready is None else self.ready.block_size
        prompt = -(-num_prompt_tokens // size)
        return Need(
            prompt_blocks=prompt,
            output_blocks=-(-(num_prompt_tokens + num_output_tokens) // size) - prompt,
        )

    def has_room(self, need: Need) -> bool:
        """Whether one more may be sent. An engine without work takes whatever comes."""
        if not self.num_legs and not self.committed_blocks:
            return True
        if self.stats.kv_usage >= _FULL:
            return False
        expected = round(self.stats.kv_usage * self.num_blocks)
        expected += self.arriving_blocks + self.growth_blocks
        return min(self.committed_blocks, expected) + need.blocks <= self.num_blocks

    def reserve(self, need: Need) -> None:
        """A request is to be served here."""
        self.committed_blocks += need.blocks
        self.arriving_blocks += need.blocks

    def arrived(self, need: Need) -> None:
        """It has its first token here: its blocks are among those that the engine says it uses."""
        self.arriving_blocks -= need.blocks
        self.growth_blocks += need.output_blocks

    def unreserve(self, need: Need, *, has_arrived: bool) -> None:
        """It is not served here any more."""
        self.committed_blocks -= need.blocks
        if has_arrived:
            self.growth_blocks -= need.output_blocks
        else:
            self.arriving_blocks -= need.blocks


class Fleet:
    """All engines, by index, and the pairs among them."""

    def __init__(self) -> None:
        self.engines: dict[int, Engine] = {}
        self._pairs: dict[tuple[int, str], EnginePair] = {}  # reader's index, engine id
        self._look_at_s = 0.0  # when somebody may have to be introduced
        self._is_draining = False  # whether some engine may have another role to come

    def __getitem__(self, index: int) -> Engine:
        return self.engines[index]

    def __iter__(self) -> Iterator[Engine]:
        return iter(self.engines.values())

    @property
    def has_roles(self) -> bool:
        """Some engine serves one stroke only, so that KV may have to move."""
        return any(engine.role != "both" for engine in self)

    def with_role(self, *roles: Role) -> list[Engine]:
        """Those that take work in any of these roles."""
        return [engine for engine in self if engine.role in roles and engine.takes_work]

    def pair(self, reader: Engine, engine_id: str) -> EnginePair:
        """What is known of `reader` reading from an engine."""
        return self._pairs.setdefault((reader.index, engine_id), EnginePair())

    def known_pair(self, reader: Engine, engine_id: str) -> EnginePair | None:
        """The same, unless one of them is gone."""
        return self._pairs.get((reader.index, engine_id))

    def may_read(self, reader: Engine, other: Engine, now_s: float) -> bool:
        """Whether KV can go from `other` to `reader`."""
        mine, theirs = reader.endpoint, other.endpoint
        if mine is None or theirs is None or not _hand_over(other, reader):
            return False
        if not _same_kv(mine.layout, theirs.layout):
            return False
        return self.pair(reader, theirs.engine_id).is_usable(now_s)

    def look_again(self) -> None:
        """Roles, states or links have changed: there may be somebody to introduce."""
        self._look_at_s = 0.0

    def may_introduce(self, now_s: float) -> bool:
        """Whether there may be `introductions`."""
        return now_s >= self._look_at_s

    def introductions(self, now_s: float) -> Iterator[tuple[Engine, KvEndpoint]]:
        """Readers with endpoints that they may read from and were not told of, or were in vain."""
        self._look_at_s = math.inf
        sources = self.with_role("prefill", "both")
        for reader, other in itertools.product(self.with_role("decode", "both"), sources):
            endpoint = other.endpoint
            if endpoint is None or reader.endpoint is None or not _hand_over(other, reader):
                continue
            pair = self.pair(reader, endpoint.engine_id)
            if endpoint.engine_id not in reader.connected or pair.wants_handshake(now_s):
                reader.connected.add(endpoint.engine_id)
                yield reader, endpoint
            if pair.error:
                self._look_at_s = min(self._look_at_s, pair.broken_until_s)

    def forget(self, engine_id: str) -> list[Engine]:
        """An engine is gone for good; returns those that know of it and are to be told."""
        self._pairs = {key: pair for key, pair in self._pairs.items() if key[1] != engine_id}
        told = [engine for engine in self if engine_id in engine.connected]
        for engine in told:
            engine.connected.discard(engine_id)
        return [engine for engine in told if engine.state != "gone"]

    # ------------------------------------------------------------ roles

    @property
    def can_decode(self) -> bool:
        """Whether any engine is there, or is being loaded, that serves to the end."""
        return any(engine.may_decode for engine in self)

    def set_role(self, index: int, role: Role) -> None:
        """See `Dispatcher.set_role`."""
        it = self.engines.get(index)
        if it is None or it.state == "gone":
            raise RequestError(f"engine {index} is not there", param="engine")
        if role == "prefill" and not any(other.may_decode for other in self if other is not it):
            raise RequestError(
                f"engine {index} is the last one that decodes",
                param="role",
                hint="give another engine the role decode or both first",
            )
        if it.state == "loading" or role in (it.role, "both"):  # nothing has to end for it
            it.role, it.next_role = role, None
        else:
            it.next_role, self._is_draining = role, True
        if it.state != "loading":
            it.state = "draining" if it.next_role else "ready"
        self.look_again()

    def switch_drained(self) -> None:
        """Engines that have drained get their new roles."""
        if not self._is_draining:
            return
        for engine in self:
            if engine.next_role is not None and engine.is_idle:
                engine.role, engine.next_role, engine.state = engine.next_role, None, "ready"
                self.look_again()
        self._is_draining = any(engine.next_role is not None for engine in self)

    def died(self, engine: Engine, error: str) -> None:
        """An engine is gone, and what it measured. The last one that decodes keeps its role."""
        engine.state, engine.error, engine.next_role = "gone", error, None
        self.look_again()
        self._pairs = {key: pair for key, pair in self._pairs.items() if key[0] != engine.index}
        if not self.can_decode:
            for other in self:
                if other.state == "draining" and other.role != "prefill":
                    other.state, other.next_role = "ready", None


def _hand_over(source: Engine, reader: Engine) -> bool:
    """Whether there is a point: two engines that serve both strokes do it as well alone."""
    return source is not reader and (source.role, reader.role) != ("both", "both")


def _same_kv(one: KvLayoutRecord, other: KvLayoutRecord) -> bool:
    """Whether two engines' KV means the same; how it is cut into blocks may differ."""

    def content(it: KvLayoutRecord) -> tuple[object, ...]:
        return it.version, it.model, it.dtype, it.num_layers, it.num_kv_heads, it.head_dim

    return content(one) == content(other)
