"""One scheduled step, from its choice until its results are processed."""

from dataclasses import dataclass

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


class Step:
    """One scheduled step, from its choice until its results are processed. Rows in columns."""

    __slots__ = (
        "admitted",
        "blocked",
        "budget",
        "ended",
        "freed_slots",
        "grown",
        "handles",
        "held_back",
        "loading",
        "num_computed",
        "num_drafts",
        "num_scheduled",
        "number",
        "preempted",
        "samples",
        "slots",
        "uids",
    )

    def __init__(self, number: int, budget: int) -> None:
        self.number = number
        self.budget = budget
        self.preempted: list[Request] = []
        self.admitted: list[Admission] = []
        self.loading: list[Admission] = []
        self.held_back: list[Request] = []  # for the first time
        self.grown: dict[int, Int64s] = {}  # seat -> new blocks
        self.freed_slots: list[int] = []
        self.blocked: Request | None = None  # the first waiting request that lacked blocks
        self.ended: list[Finished] = []  # could never go on
        self.slots = self.uids = self.handles = _NO_ROWS
        self.num_computed = self.num_scheduled = self.num_drafts = NO_TOKENS
        self.samples = _NO_FLAGS

    def add_rows(
        self,
        slots: Int64s,
        uids: Int64s,
        handles: Int64s,
        num_computed: Int32s,
        num_scheduled: Int32s,
        num_drafts: Int32s,
        samples: Bools,
    ) -> None:
        """Rows, behind those that there are."""
        if len(self.slots):
            slots = np.concatenate((self.slots, slots))
            uids = np.concatenate((self.uids, uids))
            handles = np.concatenate((self.handles, handles))
            num_computed = np.concatenate((self.num_computed, num_computed))
            num_scheduled = np.concatenate((self.num_scheduled, num_scheduled))
            num_drafts = np.concatenate((self.num_drafts, num_drafts))
            samples = np.concatenate((self.samples, samples))
        self.slots, self.uids, self.handles, self.samples = slots, uids, handles, samples
        self.num_computed, self.num_scheduled = num_computed, num_scheduled
        self.num_drafts = num_drafts

    @property
    def is_empty(self) -> bool:
        """Nothing was decided: without news the next step would be the same."""
        return not (len(self.slots) or self.preempted or self.loading or self.ended)
