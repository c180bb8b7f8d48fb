"""Columns: what is quicker than NumPy is equal to NumPy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as any_array

from twostroke.arrays import are_same, has_all, has_any, least, most, ones, places, quantiles, total

COLUMNS = any_array(np.int32, st.integers(1, 200)) | any_array(np.int64, st.integers(1, 200))
TIMES = any_array(np.float64, st.integers(1, 50), elements=st.floats(-1e9, 1e9))


@given(COLUMNS)
def test_sums_and_extremes(column):
    assert total(column) == sum(int(entry) for entry in column) or len(column) > 64
    assert (least(column), most(column)) == (column.min(), column.max())
    assert are_same(column, column.copy())
    assert not are_same(column, column ^ 1)


def test_a_long_column_is_summed_by_numpy():
    assert total(np.arange(1000, dtype=np.int32)) == 499_500
    assert total(np.empty(0, np.int64)) == 0


@pytest.mark.parametrize("count", [0, 3, 4096, 5000])
def test_constants_of_any_length(count):
    assert ones(count).tolist() == [1] * count
    assert places(count).tolist() == list(range(count))


def test_constants_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        ones(3)[0] = 2


@given(TIMES, st.lists(st.floats(0, 1), max_size=5))
def test_quantiles_are_those_of_numpy_to_the_last_bit(values, shares):
    assert quantiles(values, shares) == np.quantile(values, shares).tolist()


def test_a_quantile_of_what_is_not_a_number():
    assert math.isnan(quantiles(np.array([1.0, math.nan]), [0.0])[0])


def test_whether_any_or_all_flags_are_set():
    none, some, every = np.zeros(9, bool), np.arange(9) == 3, np.ones(9, bool)
    assert [has_any(it) for it in (none, some, some[::3], every)] == [False, True, True, True]
    assert [has_all(it) for it in (none, some, every, every[:0])] == [False, False, True, True]
