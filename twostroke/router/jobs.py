"""A request as the dispatcher sees it: the job, and its legs on engines."""

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from twostroke.cost import StepCost
from twostroke.kv_messages import KvTicket
from twostroke.ledger import DECODE_LEG, PREFILL_LEG
from twostroke.messages import AddRequest
from twostroke.router.engines import Engine, Need
from twostroke.router.policy import PromptKeys

# Handles that the dispatcher gives start here; those below are the clients'.
FIRST_OWN_HANDLE = 1 << 62


@dataclass(frozen=True, kw_only=True)
class DispatchSettings:
    """How requests are spread over engines. `max_retries` 0: what an engine loses is lost.

    `handoff_timeout_s` bounds a hand-off from the first message to the KV's arrival; what is asked
    of engines is derived from what is left of it. `recompute_max_tokens`: the longest prompt that
    may be prefilled where it decodes when a hand-off failed; None: any.
    """

    pd_policy: Literal["always", "cost", "never"] = "always"
    kv_mode: Literal["pull", "stream"] = "pull"
    lease_s: float = 30.0
    handoff_timeout_s: float = 120.0
    max_retries: int = 1
    recompute_max_tokens: int | None = None
    affinity: bool = True
    expected_output_tokens: int = 256  # until there is a mean to go by
    step_cost: StepCost | None = None  # of every engine, if known; else learned by pd_policy cost


class LegKind(IntEnum):
    """What an engine does for a request; the value is added to the numbers of its events."""

    WHOLE = 0  # both strokes
    PREFILL = PREFILL_LEG
    DECODE = DECODE_LEG  # its KV comes from elsewhere


@dataclass(eq=False, slots=True)
class Leg:
    """A request that an engine has. It stays known until its end has come from there."""

    job: "Job"
    engine: Engine
    handle: int  # the engine's name for it
    kind: LegKind
    is_open: bool = True
    is_muted: bool = False  # given up: what still comes of it is not the client's
    is_loaded: bool = False  # its load is over, well or not
    reads_from: str = ""  # engine id, while its KV is on the way
    num_bytes: int = 0  # of that
    load_error: str = ""
    load_reason: str = ""
    transfer_ids: set[bytes] = field(default_factory=set)  # of the tickets that came of it

    @property
    def lacks_kv(self) -> bool:
        """It was to get KV from elsewhere, and has not."""
        return self.kind is LegKind.DECODE and (not self.is_loaded or bool(self.load_error))


@dataclass(eq=False, slots=True)
class Job:
    """A client's request, whatever it takes to serve it."""

    request: AddRequest
    keys: PromptKeys  # of its prompt's blocks
    beside: Set[int] = frozenset()  # engines that have a sibling of it
    prefill: Leg | None = None
    serving: Leg | None = None  # whose tokens are the client's
    source: Engine | None = None  # is to prefill once the other end has its blocks
    reader: Engine | None = None  # where room is reserved to serve it
    need: Need | None = None  # there
    ticket: KvTicket | None = None  # for the whole prompt, when it was pulled
    is_prefilled: bool = False
    holds: list[bytes] = field(default_factory=list)  # transfer ids not released
    deadline_s: float | None = None
    num_retries: int = 0
    whole_reason: str = ""  # it must not be handed over, and why
    avoid: Engine | None = None  # it failed there
    has_streamed: bool = False  # the client has tokens, so it cannot begin again

    @property
    def handle(self) -> int:
        return self.request.handle

    @property
    def engines(self) -> set[int]:
        """Those that it is on, or is going to."""
        legs = [leg.engine for leg in (self.prefill, self.serving) if leg is not None]
        return {it.index for it in (*legs, self.source, self.reader) if it is not None}

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)


@dataclass
class Counters:
    """What a dispatcher counted since its start, by reason where there is one."""

    decisions: Counter[tuple[str, str]] = field(default_factory=Counter)  # (where, reason)
    retries: Counter[str] = field(default_factory=Counter)
    recomputes: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)  # of loads
    num_transfers: int = 0
    transfer_bytes: int = 0
    transfer_messages: int = 0
    transfer_s: float = 0.0
    transfer_tokens: int = 0
    num_late: int = 0  # hand-offs over their deadline
    num_unknown_tickets: int = 0
    num_ended: int = 0
