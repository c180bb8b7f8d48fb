"""The order in which waiting requests are looked at.

Two queues, as in vLLM 0.22.1: `waiting`, and `skipped` for requests that were passed over once (the
transfer of their KV is under way, the connector cannot say yet, their grammar compiles). Under fcfs
`skipped` goes first; under priority the smaller head of the two does.

A queue is a heap on a *place*. Under priority a place is the priority key. Under fcfs it is a
number, counted up at the back and down at the front. Passing over a request never changes the order
within `skipped`, so those that are blocked are kept apart: a step does not look at them at all.
"""

import heapq
from collections.abc import Iterator

from twostroke.config import Policy
from twostroke.core.request import Request, Status

Place = tuple[float | str, ...]
_BLOCKED = (Status.WAITING_FOR_GRAMMAR, Status.WAITING_FOR_REMOTE_KVS)


class _PlaceHeap:
    """Requests by place. Removal leaves a stale heap entry behind, which is skipped later."""

    def __init__(self) -> None:
        self.members: dict[Place, Request] = {}
        self._heap: list[Place] = []

    def push(self, request: Request) -> None:
        self.members[request.place] = request
        heapq.heappush(self._heap, request.place)

    def remove(self, request: Request) -> None:
        del self.members[request.place]
        if len(self._heap) > 2 * len(self.members) + 64:
            self._heap = sorted(self.members)

    def first(self) -> Request | None:
        while self._heap:
            request = self.members.get(self._heap[0])
            if request is not None:
                return request
            heapq.heappop(self._heap)
        return None


class WaitingQueues:
    """`waiting` and `skipped`, with the scan that a step makes over them.

    A scan calls `head` and then exactly one of `take`, `pass_over`, `hide`, `block` or `hold_back`
    on what it got, until it stops; `end_scan` makes passed-over and hidden requests visible again.
    """

    def __init__(self, policy: Policy) -> None:
        self._by_priority = policy == "priority"
        self._waiting = _PlaceHeap()
        self._ready = _PlaceHeap()  # in `skipped`, and able to go on
        self._blocked: dict[Place, Request] = {}  # in `skipped`, and not
        self._held_back = _PlaceHeap()  # in `skipped`, and not until others let something go
        self._passed: list[Request] = []
        self._hidden: list[tuple[_PlaceHeap, Request]] = []
        self._front = 0
        self._back = 0

    def __len__(self) -> int:
        able = len(self._waiting.members) + len(self._ready.members)
        return able + len(self._held_back.members) + len(self._blocked)

    @property
    def num_blocked(self) -> int:
        return len(self._blocked)

    @property
    def num_held_back(self) -> int:
        return len(self._held_back.members)

    def is_blocked(self, request: Request) -> bool:
        """Whether it waits for something outside."""
        return self._blocked.get(request.place) is request

    @property
    def num_holding_blocks(self) -> int:
        """Requests in `skipped` that own blocks: their load is under way or has ended."""
        members = (*self._ready.members.values(), *self._blocked.values())
        return sum(bool(request.table.blocks) for request in members)

    def waiting(self) -> Iterator[Request]:
        """The queue `waiting`, in order."""
        members = self._waiting.members
        return (members[place] for place in sorted(members))

    def skipped(self) -> Iterator[Request]:
        """The queue `skipped`, in order, blocked requests included."""
        members = self._ready.members | self._blocked | self._held_back.members
        return (members[place] for place in sorted(members))

    def _place_at_back(self, request: Request) -> Place:
        if self._by_priority:
            return request.priority_key
        self._back += 1
        return (self._back,)

    def add(self, request: Request) -> None:
        """A new request: at the back of `waiting`, or of `skipped` if it is blocked."""
        request.place = self._place_at_back(request)
        if request.status in _BLOCKED:
            self._blocked[request.place] = request
        else:
            self._waiting.push(request)

    def put_back(self, request: Request) -> None:
        """A preempted request: at the front of `waiting`."""
        if self._by_priority:
            request.place = request.priority_key
        else:
            self._front -= 1
            request.place = (self._front,)
        self._waiting.push(request)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is."""
        for heap in (self._waiting, self._ready, self._held_back):
            if heap.members.get(request.place) is request:
                heap.remove(request)
                return
        if self.is_blocked(request):
            del self._blocked[request.place]

    def wake(self, request: Request) -> None:
        """What a blocked request waited for has happened."""
        if self.is_blocked(request):
            del self._blocked[request.place]
            self._ready.push(request)

    def wake_held_back(self) -> None:
        """The first of those held back may be looked at."""
        request = self._held_back.first()
        if request is not None:
            self._held_back.remove(request)
            self._ready.push(request)

    # ------------------------------------------------------------ scan

    def head(self, *, skipped_only: bool = False) -> Request | None:
        """The request to look at next; None at the end of both queues (or of `skipped`)."""
        skipped = self._ready.first()
        waiting = None if skipped_only else self._waiting.first()
        if skipped is None or waiting is None:
            return skipped or waiting
        if self._by_priority and waiting.place < skipped.place:
            return waiting
        return skipped

    def take(self, request: Request) -> None:
        """The head was admitted."""
        self._leave(request)

    def pass_over(self, request: Request) -> None:
        """The head is not looked at again in this scan; it belongs to `skipped` from now on."""
        self._move_to_skipped(request)
        self._passed.append(request)

    def block(self, request: Request) -> None:
        """The head waits for something outside; it belongs to `skipped` from now on."""
        self._move_to_skipped(request)
        self._blocked[request.place] = request

    def hold_back(self, request: Request) -> None:
        """The head waits until others let something go; it belongs to `skipped` from now on."""
        self._move_to_skipped(request)
        self._held_back.push(request)

    def hide(self, request: Request) -> None:
        """The head is not looked at again in this scan, and keeps its place in its queue."""
        from_waiting = self._leave(request)
        self._hidden.append((self._waiting if from_waiting else self._ready, request))

    def end_scan(self) -> None:
        for request in self._passed:
            self._ready.push(request)
        for heap, request in self._hidden:
            heap.push(request)
        self._passed.clear()
        self._hidden.clear()

    def _leave(self, request: Request) -> bool:
        """Remove the head; True if it came from `waiting`."""
        from_waiting = self._waiting.members.get(request.place) is request
        (self._waiting if from_waiting else self._ready).remove(request)
        return from_waiting

    def _move_to_skipped(self, request: Request) -> None:
        if self._leave(request):
            request.place = self._place_at_back(request)
