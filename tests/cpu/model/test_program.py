"""The order of a program's calls, on one thread, on several, and on more than there are cores."""

import ctypes
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from twostroke.model.elementwise import kernels

pytestmark = pytest.mark.skipif(kernels() is None, reason="numba cannot be imported")

_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
NUM_CALLS = 12


class Recorder:
    """Calls that write down their number, one at a time: it takes Python's lock."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._functions = [_Function(self._noting(number)) for number in range(NUM_CALLS)]
        addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in self._functions]
        self.calls = [(address or 0, 0) for address in addresses]

    def _noting(self, number: int) -> Callable[[int | None], None]:
        return lambda _argument: self.seen.append(number)


@pytest.mark.parametrize("alone", [[], [0], [3, 4, NUM_CALLS - 1], list(range(NUM_CALLS))])
def test_calls_run_in_order_on_all_threads_or_on_one(threads: int, alone: list[int]) -> None:
    from twostroke.model.program import Program

    recorder = Recorder()
    program = Program(recorder.calls)
    assert program.num_threads in (1, threads)
    times = dict.fromkeys(range(NUM_CALLS), program.num_threads) | dict.fromkeys(alone, 1)
    is_alone = np.isin(np.arange(NUM_CALLS), alone)
    program.share(is_alone, False)
    for _ in range(20):
        recorder.seen.clear()
        program.run(program.num_threads, NUM_CALLS)
        assert recorder.seen == sorted(recorder.seen), "each waits for the one before"
        assert Counter(recorder.seen) == times
    program.share(is_alone, True)
    recorder.seen.clear()
    program.run(program.num_threads, NUM_CALLS)
    assert Counter(recorder.seen) == dict.fromkeys(range(NUM_CALLS), program.num_threads)


def test_the_first_calls_can_be_run_alone(threads: int) -> None:
    from twostroke.model.program import Program

    recorder = Recorder()
    program = Program(recorder.calls)
    for num_calls in (NUM_CALLS, 3, 1, NUM_CALLS):
        recorder.seen.clear()
        program.run(program.num_threads, num_calls)
        assert Counter(recorder.seen) == dict.fromkeys(range(num_calls), program.num_threads)
        assert len(program.run_timed(program.num_threads, num_calls)) == num_calls
    assert threads >= program.num_threads


def test_times_add_up_to_no_more_than_the_run(threads: int) -> None:
    from twostroke.model.program import Program

    recorder = Recorder()
    program = Program(recorder.calls)
    start_s = time.perf_counter()
    seconds = program.run_timed(program.num_threads, NUM_CALLS)
    assert len(seconds) == NUM_CALLS
    assert (seconds > 0).all()
    assert seconds.sum() <= time.perf_counter() - start_s


def test_a_program_can_run_on_one_thread(threads: int) -> None:
    from twostroke.model.program import Program

    recorder = Recorder()
    program = Program(recorder.calls)
    for num_threads in (1, program.num_threads, 1):
        recorder.seen.clear()
        program.run(num_threads, NUM_CALLS)
        assert Counter(recorder.seen) == dict.fromkeys(range(NUM_CALLS), num_threads)
    assert threads >= program.num_threads
