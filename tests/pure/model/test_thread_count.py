"""Work that is run over and over finds out how many threads it wants."""

from collections import Counter

import pytest

from twostroke.model.thread_count import ThreadCount, ThreadCounts


@pytest.mark.parametrize(("one_s", "all_s", "best"), [(0.2, 0.1, 4), (0.1, 0.2, 1)])
def test_the_faster_number_of_threads_is_kept_and_tried_anew(
    one_s: float, all_s: float, best: int
) -> None:
    threads = ThreadCount()
    for period in range(2):
        chosen = []
        for run in range(ThreadCount.PERIOD):
            chosen.append(threads.choose(4))
            outlier = 10.0 if run < 2 else 0.0  # the first of each kind
            threads.add((one_s if chosen[-1] == 1 else all_s) + outlier)
        trials = 2 * ThreadCount.TRIALS
        assert Counter(chosen[:trials]) == {1: ThreadCount.TRIALS, 4: ThreadCount.TRIALS}, period
        assert set(chosen[trials:]) == {best}
        assert threads.is_one_faster == (best == 1)


def test_what_runs_goes_on_unless_the_other_is_clearly_faster() -> None:
    threads = ThreadCount()
    for _ in range(2 * ThreadCount.TRIALS):
        threads.add(0.095 if threads.choose(2) == 1 else 0.1)
    assert threads.choose(2) == 2


def test_larger_runs_are_tried_only_where_one_thread_is_faster_for_the_smallest() -> None:
    counts = ThreadCounts(3)
    smallest = counts.of(1)
    assert smallest is not None
    assert counts.of(2) is None
    for _ in range(2 * ThreadCount.TRIALS):
        smallest.add(0.1 if smallest.choose(2) == 1 else 0.2)
    assert counts.of(1) is smallest
    assert len({id(counts.of(size)) for size in (1, 2, 3)} - {id(None)}) == 3
    assert counts.of(4) is None
