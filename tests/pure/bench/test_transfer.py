"""What is measured of a link and what is said about it, with links that only exist here."""

import math
import xml.dom.minidom

import numpy as np
import pytest

from twostroke.bench import transfer, transfer_report
from twostroke.bench.options import TransferOptions
from twostroke.bench.transfer import (
    KIB,
    MIB,
    Case,
    Fit,
    Plan,
    Reference,
    Result,
    Sample,
    fill,
    numbers_of,
    pattern,
    scattered,
    size_of,
)
from twostroke.cost import LinkCost
from twostroke.cost_fit import FitError
from twostroke.errors import ConfigError


class CopyLink:
    """A link by NumPy. `damage`: what it does to what has arrived."""

    transport = "copy"
    directions = ("read", "write")
    max_pieces = 100

    def __init__(self, num_bytes: int, damage=lambda pool: None) -> None:
        self.here, self.there = (np.zeros(num_bytes, np.uint8) for _ in range(2))
        fill(self.there)
        self.damage = damage
        self.moves: list[np.ndarray] = []
        self.cpu = 0.0

    def movers(self, number: int, direction: str) -> list:
        source, target = (self.there, self.here) if direction == "read" else (self.here, self.there)
        columns = [0, 1, 2] if direction == "read" else [1, 0, 2]

        def move(pieces: np.ndarray) -> None:
            self.moves.append(pieces)
            self.cpu += 1.0
            for start, end, size in pieces[:, columns].tolist():
                target[end : end + size] = source[start : start + size]
            self.damage(target)

        return [move] * number

    def cpu_s(self) -> float:
        return self.cpu

    def close(self) -> None: ...


def options(**given) -> TransferOptions:
    defaults = {"pool": "4MiB", "total": "1MiB", "block_kib": "4,64", "repeats": 2}
    return TransferOptions(**{**defaults, **given})


def measured(link: CopyLink, **given) -> Result:
    chosen = options(**given)
    plan = Plan.of(chosen)
    ticks: list[int] = []
    reference = transfer.reference_of(link, plan, chosen)
    result = transfer.measure(link, reference, plan, chosen, lambda: ticks.append(1))
    assert len(ticks) == len(plan.cases)
    return result


@pytest.mark.parametrize("threads", [1, 3])
def test_every_case_has_a_sample_a_total(threads: int):
    link = CopyLink(4 * MIB)
    result = measured(link, threads=str(threads), direction="read,write", merge="0,16")
    cases = {(s.case.direction, s.case.block_bytes, s.case.message_bytes) for s in result.samples}
    expected = {(4, 4), (4, 16), (64, 64)}  # KiB; 64 KiB are more than what is merged
    assert cases == {
        (direction, block * KIB, message * KIB)
        for direction in ("read", "write")
        for block, message in expected
    }
    for sample in result.samples:
        assert sample.num_bytes == sample.num_messages * sample.case.message_bytes
        assert len(sample.seconds) == 2
        assert min(sample.seconds) > 0
    totals = [s.num_bytes for s in result.samples if s.case.message_bytes == 4 * KIB]
    assert totals == [MIB, MIB // 4, MIB // 16] * 2
    assert max(len(pieces) for pieces in link.moves) <= link.max_pieces
    assert {fit.direction for fit in result.fits} <= {"read", "write"}
    assert result.samples[0].cpu_s_per_gb > 0


def test_a_wrong_byte_is_an_error():
    def damage(pool: np.ndarray) -> None:
        pool[np.flatnonzero(pool)[0]] ^= 1

    with pytest.raises(RuntimeError, match="copy moved wrong bytes: read of 1048576 bytes from"):
        measured(CopyLink(4 * MIB, damage))


def test_a_link_that_only_reads_does_not_write():
    link = CopyLink(4 * MIB)
    link.directions = ("read",)
    with pytest.raises(ConfigError, match="--direction write does not go with --transport copy"):
        measured(link, direction="write")


def test_a_line_rate_in_place_of_a_copy():
    chosen = options(line_gbps=200.0, threads="1,2")
    reference = transfer.reference_of(None, Plan.of(chosen), chosen)
    assert reference == Reference("the line", {1: 25e9, 2: 25e9})


def test_messages_are_scattered_and_do_not_overlap():
    pieces = scattered(np.random.default_rng(0), 100, 24 * KIB, 4 * MIB)
    assert (pieces[:, 2] == 24 * KIB).all()
    for column in (0, 1):
        starts = np.sort(pieces[:, column])
        assert (np.diff(starts) >= 24 * KIB).all()
        assert starts[-1] + 24 * KIB <= 4 * MIB
        assert (np.diff(pieces[:, column]) != 24 * KIB).any()
    assert not np.array_equal(pieces[:, 0], pieces[:, 1])


def test_a_pool_tells_where_its_words_lie():
    pool = np.zeros(3 * MIB, np.uint8)
    fill(pool)
    assert np.array_equal(pool[MIB + 64 : MIB + 4096], pattern(MIB + 64, 4096 - 64))
    assert len(np.unique(pool.view(np.uint64))) == len(pool) // 8
    assert pool.view(np.uint64).all()


# ---------------------------------------------------------------- what is said


def a_result(pipelined: bool = False) -> Result:
    cost = LinkCost(base_s=50e-6, message_s=1e-6, bytes_per_s=8e9, pipelined=pipelined)
    result = Result("shm", Reference("memcpy", {1: 8e9}))
    for kib in (4, 384, 4096):
        size = kib * KIB
        number = 256 * MIB // size
        seconds = cost.transfer_s(number, number * size)
        case = Case("read", size, size, 1)
        result.samples.append(Sample(case, number * size, number, [seconds, seconds], 0.1))
        result.samples.append(Sample(case, size, 1, [1e-3], 0.1))
    result.fits.append(Fit("read", 1, cost, FitError(6, 0.01, 0.02, 0.0)))
    return result


def test_the_answer_comes_first_and_fits_the_screen():
    text = transfer_report.text_of(a_result())
    assert text.startswith("shm reads 384 KiB blocks at 7.")
    first = text.split("\n\n")[0]
    assert first.endswith("% of memcpy;\n80 % of its own peak needs blocks of 31.3 KiB")
    assert "T = 50 us + messages x 1.00 us + bytes / 8.00 GB/s" in text
    assert max(map(len, text.splitlines())) <= 100
    assert len([line for line in text.splitlines() if "  read  " in line]) == 3
    assert "max(messages x 1.00 us, bytes / 8.00 GB/s)" in transfer_report.text_of(a_result(True))


def test_the_size_that_reaches_the_share_of_the_peak_does():
    for pipelined in (False, True):
        fit = a_result(pipelined).fits[0]
        size = fit.peak_block_bytes
        number = 100_000
        seconds = fit.cost.transfer_s(number, round(number * size)) - fit.cost.base_s
        assert number * size / seconds == pytest.approx(0.8 * fit.cost.bytes_per_s, rel=1e-3)


def test_without_a_fit_it_says_so():
    result = a_result()
    result.fits.clear()
    assert transfer_report.answer(result).endswith(
        "too little was moved to say how that depends on the size"
    )
    xml.dom.minidom.parseString(transfer_report.svg_of([result]))


def test_the_plot_shows_each_point_within_the_picture():
    document = xml.dom.minidom.parseString(transfer_report.svg_of([a_result(), a_result(True)]))
    dots = document.getElementsByTagName("circle")
    assert len(dots) == 3 * 2 + 1  # both have one name, and so one entry in the legend
    for dot in dots:
        assert 0 < float(dot.getAttribute("cx")) < 760
        assert 0 < float(dot.getAttribute("cy")) < 420


def test_json_has_what_plan_and_twin_read():
    found = transfer.result_of([a_result()], options(), "host")
    assert LinkCost(**found["link"]).message_s == 1e-6
    (link,) = found["links"]
    assert link["transport"] == "shm"
    assert link["error"]["median"] == 0.01
    assert len(found["samples"]) == 6
    assert all(math.isfinite(sample["bytes_per_s"]) for sample in found["samples"])


# ---------------------------------------------------------------- what users write


@pytest.mark.parametrize(
    ("text", "size"),
    [("256MiB", 256 * MIB), ("1 GiB", 1 << 30), ("1.5kib", 1536), ("64000", 64000), ("2GB", 2e9)],
)
def test_sizes(text: str, size: int):
    assert size_of(text, "--total") == size


@pytest.mark.parametrize("text", ["", "x", "1XB", "-1MiB", "1MiB2", "MiB"])
def test_what_is_no_size(text: str):
    with pytest.raises(ConfigError, match=r"--total is .*; it must be a size"):
        size_of(text, "--total")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("4,96", [4, 96]),
        ("4..64", [4, 8, 16, 32, 64]),
        ("4..48", [4, 8, 16, 32]),
        ("4,4..8", [4, 8]),
    ],
)
def test_numbers(text: str, numbers: list[int]):
    assert numbers_of(text, "--block-kib") == numbers


@pytest.mark.parametrize(
    "text", ["", "a", "1,", "4..", "..4", "8..4", "0", "0..4", "1.5", "2097152"]
)
def test_what_are_no_numbers(text: str):
    with pytest.raises(ConfigError, match="--block-kib"):
        numbers_of(text, "--block-kib")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"total": "1KiB"}, "--total is 1,024 bytes; it must be at least 1 MiB"),
        ({"total": "8MiB"}, "at most --pool 4,194,304"),
        ({"transport": "rdma"}, "--transport has 'rdma'; choices: memcpy, shm, nixl, mooncake"),
        ({"direction": "up"}, "--direction has 'up'; choices: read, write"),
        ({"threads": "257"}, "--threads has 257; it must be from 1 to 256"),
        ({"block_kib": "2048"}, "a message of 2,097,152 bytes is more than --total 1,048,576"),
    ],
)
def test_what_cannot_be_measured(given: dict, message: str):
    with pytest.raises(ConfigError) as error:
        Plan.of(options(**given))
    assert message in str(error.value)
