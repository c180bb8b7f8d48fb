"""How many threads run a short piece of work, decided by trying."""

import statistics


class ThreadCount:
    """Whether what is run over and over is faster on all threads or on one.

    Two cores read memory twice as fast as one. Two hyperthreads of a core hardly do, and when
    something else wants the processor each waits for the other: SmolLM2's weights in few bits took
    3.8 ms on one and 11 on two, on a busy machine (median). So each is tried, again and again; what
    runs goes on unless the other is clearly faster. Runs must be alike: one of these for each size.
    """

    TRIALS, PERIOD = 5, 500  # runs of each kind, and after how many runs they are tried anew
    CLEARLY = 0.9  # of the time of what runs

    def __init__(self) -> None:
        self._times: tuple[list[float], list[float]] = ([], [])
        self._best, self._runs = 0, 0  # 0: all

    @property
    def is_one_faster(self) -> bool:
        """Than all, as far as has been tried."""
        return self._best == 1

    def choose(self, most: int) -> int:
        """For the next run: `most` or 1."""
        trying = self._runs < 2 * self.TRIALS
        return (most, 1)[self._runs % 2 if trying else self._best]

    def add(self, seconds: float) -> None:
        """How long it took."""
        if self._runs < 2 * self.TRIALS:
            self._times[self._runs % 2].append(seconds)
        self._runs += 1
        if self._runs == 2 * self.TRIALS:
            medians = [statistics.median(times) for times in self._times]
            if medians[1 - self._best] < self.CLEARLY * medians[self._best]:
                self._best = 1 - self._best
        if self._runs == self.PERIOD:
            self._times, self._runs = ([], []), 0


class ThreadCounts:
    """One for each size of a run, from 1 to `largest`."""

    def __init__(self, largest: int) -> None:
        self._counts = [ThreadCount() for _ in range(largest)]

    def of(self, size: int) -> ThreadCount | None:
        """None: run on all threads.

        Larger runs have more arithmetic, which threads share: where all are faster for the smallest
        they are for every size, and trying would cost.
        """
        if size == 1 or (size <= len(self._counts) and self._counts[0].is_one_faster):
            return self._counts[size - 1]
        return None
