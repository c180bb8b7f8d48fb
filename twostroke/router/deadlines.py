"""When hand-offs must be over: the jobs' `deadline_s`, in the order in which they are due."""

import heapq
import itertools

from twostroke.router.jobs import Job


class Deadlines:
    """A heap of deadlines, of which those that their job has no more are skipped.

    A job drops its deadline, or gets another, by its `deadline_s` alone.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Job]] = []
        self._order = itertools.count()  # of equal deadlines, the first that was set

    def set(self, job: Job, deadline_s: float) -> None:
        """Give the job a deadline, on the clock, in place of the one that it has."""
        job.deadline_s = deadline_s
        heapq.heappush(self._heap, (deadline_s, next(self._order), job))

    def next_s(self) -> float | None:
        """The earliest that is in force."""
        while self._heap:
            deadline_s, _, job = self._heap[0]
            if job.deadline_s == deadline_s:
                return deadline_s
            heapq.heappop(self._heap)
        return None

    def take_due(self, now_s: float) -> Job | None:
        """The next job whose time is up, once for each deadline; None: no more."""
        deadline_s = self.next_s()
        if deadline_s is None or deadline_s > now_s:
            return None
        return heapq.heappop(self._heap)[2]
