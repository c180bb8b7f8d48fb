"""One scheduled step, from its choice until its results are processed."""

from dataclasses import dataclass, field

import numpy as np

from twostroke.core.request import Request
from twostroke.messages import NO_TOKENS, Bools, Finished, Int32s, Int64s

_NO_ROWS: Int64s = np.empty(0, np.int64)
_NO_FLAGS: Bools = np.empty(0, np.bool_)


@dataclass(slots=True)
class Admission:
    """A request that left the waiting queues in a step, to run or to load.

    Tokens: `num_computed` in place before the step, of which `num_local` are a prefix hit (None: no
    look-up was made) and `num_external` come from the connector.
    """

    request: Request
    num_computed: int
    num_local: int | None
    num_external: int
    resumed: bool


@dataclass(slots=True)
class Step:
    """One scheduled step, from its choice until its results are processed. Rows in columns."""

    number: int
    budget: int
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    loading: list[Admission] = field(default_factory=list)
    held_back: list[Request] = field(default_factory=list)  # for the first time
    grown: dict[int, list[int]] = field(default_factory=dict)  # seat -> new blocks
    freed_slots: list[int] = field(default_factory=list)
    blocked: Request | None = None  # the first waiting request that lacked blocks
    ended: list[Finished] = field(default_factory=list)  # could never go on
    slots: Int64s = field(default_factory=lambda: _NO_ROWS)
    uids: Int64s = field(default_factory=lambda: _NO_ROWS)
    handles: Int64s = field(default_factory=lambda: _NO_ROWS)
    num_computed: Int32s = field(default_factory=lambda: NO_TOKENS)
    num_scheduled: Int32s = field(default_factory=lambda: NO_TOKENS)
    num_drafts: Int32s = field(default_factory=lambda: NO_TOKENS)
    samples: Bools = field(default_factory=lambda: _NO_FLAGS)

    @property
    def is_empty(self) -> bool:
        """Nothing was decided: without news the next step would be the same."""
        return not (len(self.slots) or self.preempted or self.loading or self.ended)
