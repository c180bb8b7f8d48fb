"""The table of a step's parts: what is read, computed, possible, and left to the host."""

import msgspec
import pytest

from twostroke.bench.step_report import Ceilings, Part, StepTimes, result_of, table_of

CEILINGS = Ceilings(read_gb_per_s=10.0, gflop_per_s=100.0)
READING = Part(name="qkv", calls=30, seconds=0.002, bytes_read=10_000_000, flops=10_000_000)
COMPUTING = Part(name="down", calls=30, seconds=0.004, bytes_read=1_000_000, flops=200_000_000)
STEP = StepTimes(rows=4, tokens=1, context=1024, seconds=0.007, parts=[READING, COMPUTING])


def test_the_limit_is_the_slower_of_reading_and_computing() -> None:
    assert READING.limit_s(CEILINGS) == pytest.approx(0.001)
    assert COMPUTING.limit_s(CEILINGS) == pytest.approx(0.002)


def test_products_in_8_bits_have_a_limit_of_their_own() -> None:
    ceilings = Ceilings(read_gb_per_s=10.0, gflop_per_s=100.0, int8_gflop_per_s=200.0)
    for int8_flops, limit_s in ((200_000_000, 0.001), (100_000_000, 0.0015), (0, 0.002)):
        part = msgspec.structs.replace(COMPUTING, int8_flops=int8_flops)
        assert part.limit_s(ceilings) == pytest.approx(limit_s)


def test_what_no_part_takes_is_the_hosts() -> None:
    assert STEP.host_s == pytest.approx(0.001)


def test_the_table_says_the_whole_first() -> None:
    lines = table_of(STEP, CEILINGS).splitlines()
    assert lines[0] == (
        "4 requests of 1 token after 1,024: 7.00 ms a step; the limit is 3.00 ms (43%)"
    )
    assert lines[2].split() == ["qkv", "30", "2,000", "29%", "10.0", "5.0", "5.0", "1,000", "50%"]
    assert lines[-1].split() == ["host", "1,000", "14%"]
    assert max(map(len, lines)) <= 80


def test_the_result_has_all_of_it() -> None:
    result = result_of([STEP], CEILINGS)
    assert result["steps"][0]["parts"][0]["limit_s"] == pytest.approx(0.001)
    assert result["ceilings"] == {
        "read_gb_per_s": 10.0,
        "gflop_per_s": 100.0,
        "int8_gflop_per_s": 0.0,
    }
