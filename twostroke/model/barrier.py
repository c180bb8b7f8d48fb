"""Where the threads of a kernel wait for each other.

OpenMP's own barrier asks the operating system at every turn to wake sleepers, though there are
none; a step of few tokens has some 200 turns. Here a thread spins for a moment, and then sleeps for
moments: on a busy machine its fellows may be waiting for its processor. (Yielding is not enough: a
thread that yields counts as one that runs, so the others are not moved to where it is.)
"""

import ctypes
from typing import Any

import numpy as np

from twostroke.arrays import Int64s
from twostroke.model.compiled import (
    add_atomically,
    call_for_int,
    call_with,
    inner,
    load_atomically,
    numbers,
    pause,
    store_atomically,
)
from twostroke.model.openmp import address_in

_SPINS = 2000  # about 25 us
_SLEEP_US = 20  # with the timer's slack, some 70

# Words of the state. The two that threads write have cache lines of their own.
_ARRIVED, _TURN, _TEAM_SIZE, _SLEEP, _NUM_WORDS = 0, 8, 16, 17, 24


class Barrier:
    """For the threads of one parallel region at a time, run by `openmp`; None: a lone thread."""

    def __init__(self, openmp: ctypes.CDLL | None) -> None:
        self._state: Int64s = np.zeros(_NUM_WORDS, np.int64)
        self.address: int = self._state.ctypes.data  # for the functions below
        if openmp is not None:
            # OpenMP may give fewer threads than were asked for.
            self._state[_TEAM_SIZE] = address_in(openmp.omp_get_num_threads)
            self._state[_SLEEP] = address_in(ctypes.CDLL(None).usleep)


@inner
def turn_of(barrier: int) -> Any:
    """To be asked before arriving."""
    return load_atomically(barrier + 8 * _TURN)


@inner
def is_last_to_arrive(barrier: int) -> Any:
    """The last one must `release` the others, which must `wait`."""
    words = numbers(barrier, _NUM_WORDS)
    others = call_for_int(words[_TEAM_SIZE]) - 1 if words[_TEAM_SIZE] else 0
    return add_atomically(barrier + 8 * _ARRIVED, 1) == others


@inner
def release(barrier: int, turn: int) -> None:
    store_atomically(barrier + 8 * _ARRIVED, 0)
    store_atomically(barrier + 8 * _TURN, turn + 1)


@inner
def wait(barrier: int, turn: int) -> None:
    spins, usleep = 0, numbers(barrier, _NUM_WORDS)[_SLEEP]
    while load_atomically(barrier + 8 * _TURN) == turn:
        spins += 1
        if spins < _SPINS:
            pause()
        else:
            call_with(usleep, _SLEEP_US)


@inner
def meet(barrier: int) -> None:
    """Go on when all have come."""
    turn = turn_of(barrier)
    if is_last_to_arrive(barrier):
        release(barrier, turn)
    else:
        wait(barrier, turn)
