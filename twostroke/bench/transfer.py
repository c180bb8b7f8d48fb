"""How fast scattered blocks move between two processes, by block size, message size and threads.

    case  ─▶ pieces at random places ─▶ once, and every byte is compared ─▶ `repeats` times, timed
    samples of all sizes and totals ─▶ T = base + messages * each + bytes / rate

Moves go through a `Link`, which `proc.transfer_link` makes; this file decides what to measure and
what it means. Pools are filled with words that tell where they lie, so what has arrived can be
checked from any end.
"""

import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Literal, Protocol, cast

import numpy as np

from twostroke.arrays import Int64s, UInt8s
from twostroke.bench.options import TransferOptions
from twostroke.cost import LinkCost
from twostroke.cost_fit import FitError, fit_link_cost
from twostroke.errors import ConfigError

Direction = Literal["read", "write"]
KIB, MIB = 1 << 10, 1 << 20
TRANSPORTS = ("memcpy", "shm", "nixl", "mooncake")
REFERENCE_BYTES = MIB  # of a message of the memory copy that all is compared with
PEAK_SHARE = 0.8
_UNITS = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": 1 << 30, "kb": 10**3, "mb": 10**6}
_UNITS["gb"] = 10**9
_FRACTIONS = (1, 4, 16)  # of the total, for the fit
_WORD = np.uint64(0x9E3779B97F4A7C15)


class Mover(Protocol):
    """Moves pieces; one for each thread."""

    def __call__(self, pieces: Int64s) -> None:
        """Pieces [n, 3] of (offset there, offset here, bytes); waits, without the GIL."""
        ...


class Link(Protocol):
    """A pool there, a pool here, and a way between them."""

    @property
    def transport(self) -> str: ...
    @property
    def directions(self) -> tuple[Direction, ...]: ...
    @property
    def max_pieces(self) -> int:
        """Most pieces of one move."""
        ...

    @property
    def here(self) -> UInt8s: ...
    @property
    def there(self) -> UInt8s | None:
        """The other pool, where this process sees it: needed to verify writes."""
        ...

    def movers(self, number: int, direction: Direction) -> list[Mover]: ...

    def cpu_s(self) -> float:
        """Processor seconds that both ends have used so far."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Case:
    """What is measured at a time."""

    direction: Direction
    block_bytes: int
    message_bytes: int  # a run of adjacent blocks
    threads: int


@dataclass(frozen=True)
class Sample:
    """Some runs of a case with one total."""

    case: Case
    num_bytes: int
    num_messages: int
    seconds: list[float]
    cpu_s: float  # of all runs together

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / statistics.median(self.seconds)

    @property
    def best_bytes_per_s(self) -> float:
        return self.num_bytes / min(self.seconds)

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.num_bytes * len(self.seconds) / 1e9)


@dataclass(frozen=True)
class Fit:
    """T = base + messages * each + bytes / rate, of one direction and number of threads."""

    direction: Direction
    threads: int
    cost: LinkCost
    error: FitError

    @property
    def peak_block_bytes(self) -> float:
        """The size of a message that reaches PEAK_SHARE of the rate, in a long transfer."""
        rate = self.cost.message_s * self.cost.bytes_per_s
        return rate * PEAK_SHARE / (1.0 if self.cost.pipelined else 1 - PEAK_SHARE)


@dataclass(frozen=True)
class Reference:
    """What bandwidth is compared with: a memory copy, or the line."""

    name: str
    bytes_per_s: dict[int, float]  # by threads


@dataclass(frozen=True)
class Result:
    """All that was measured of one transport."""

    transport: str
    reference: Reference
    samples: list[Sample] = field(default_factory=list)
    fits: list[Fit] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """`TransferOptions`, understood. Raises ConfigError for what cannot be measured."""

    transports: list[str]
    cases: list[Case]
    total_bytes: int
    pool_bytes: int

    @classmethod
    def of(cls, options: TransferOptions) -> "Plan":
        pool_bytes = size_of(options.pool, "--pool") // MIB * MIB
        total_bytes = size_of(options.total, "--total")
        if not MIB <= total_bytes <= pool_bytes:
            raise ConfigError(
                f"--total is {total_bytes:,} bytes; it must be at least 1 MiB and at most "
                f"--pool {pool_bytes:,}"
            )
        transports = _words(options.transport, "--transport", TRANSPORTS)
        directions = cast(
            list[Direction], _words(options.direction, "--direction", ("read", "write"))
        )
        merges = numbers_of(options.merge, "--merge", least=0)
        cases = [
            Case(direction, block * KIB, max(1, merge // block) * block * KIB, threads)
            for direction in directions
            for threads in numbers_of(options.threads, "--threads", most=256)
            for block in numbers_of(options.block_kib, "--block-kib")
            for merge in merges
        ]
        for case in cases:
            if case.message_bytes > total_bytes:
                raise ConfigError(
                    f"a message of {case.message_bytes:,} bytes is more than --total "
                    f"{total_bytes:,}"
                )
        return cls(transports, list(dict.fromkeys(cases)), total_bytes, pool_bytes)


def reference_of(memcpy: Link | None, plan: Plan, options: TransferOptions) -> Reference:
    """The line's rate, if it is known; else that of a memory copy of the same total."""
    threads = sorted({case.threads for case in plan.cases})
    if memcpy is None:
        return Reference("the line", dict.fromkeys(threads, options.line_gbps * 1e9 / 8))
    size = min(REFERENCE_BYTES, plan.total_bytes)
    cases = [Case("read", size, size, number) for number in threads]
    samples = [next(_run(memcpy, case, plan, options)) for case in cases]
    return Reference("memcpy", {it.case.threads: it.bytes_per_s for it in samples})


def measure(
    link: Link,
    reference: Reference,
    plan: Plan,
    options: TransferOptions,
    tick: Callable[[], None],
) -> Result:
    """All cases over a link. `tick` is called after each.

    Raises ConfigError, what the link raises, and RuntimeError when a byte arrived wrong.
    """
    for case in plan.cases:
        if case.direction not in link.directions:
            raise ConfigError(
                f"--direction {case.direction} does not go with --transport {link.transport}",
                hint=f"it only {' and '.join(link.directions)}s",
            )
    result = Result(link.transport, reference)
    for case in plan.cases:
        result.samples.extend(_run(link, case, plan, options))
        tick()
    result.fits.extend(_fits(result.samples))
    return result


def _run(link: Link, case: Case, plan: Plan, options: TransferOptions) -> Iterator[Sample]:
    """Samples of a case, the largest total first; that one is verified."""
    rng = np.random.default_rng(options.seed)
    movers = link.movers(case.threads, case.direction)
    seen = set[int]()
    with ThreadPoolExecutor(case.threads) as threads:
        for fraction in _FRACTIONS:
            number = max(1, plan.total_bytes // fraction // case.message_bytes)
            if number in seen:
                continue
            seen.add(number)
            pieces = scattered(rng, number, case.message_bytes, plan.pool_bytes)
            shares = [share for share in np.array_split(pieces, case.threads) if len(share)]

            def once(shares: list[Int64s] = shares) -> float:
                return _timed(threads, movers, shares, link.max_pieces)

            _verified(link, case, pieces, once)
            cpu_s = link.cpu_s()
            seconds = [once() for _ in range(options.repeats)]
            cpu_s = link.cpu_s() - cpu_s
            yield Sample(case, number * case.message_bytes, number, seconds, cpu_s)


def _timed(
    threads: ThreadPoolExecutor, movers: Sequence[Mover], shares: list[Int64s], max_pieces: int
) -> float:
    """Seconds from when the first thread begins, all being ready, to when all is moved."""
    ready = threading.Barrier(len(shares))

    def move(mover: Mover, share: Int64s) -> tuple[float, float]:
        ready.wait()
        start_s = time.perf_counter()
        for start in range(0, len(share), max_pieces):
            mover(share[start : start + max_pieces])
        return start_s, time.perf_counter()

    moves = [
        threads.submit(move, mover, share) for mover, share in zip(movers, shares, strict=False)
    ]
    spans = [each.result() for each in moves]
    return max(end_s for _, end_s in spans) - min(start_s for start_s, _ in spans)


def scattered(rng: np.random.Generator, number: int, message_bytes: int, pool_bytes: int) -> Int64s:
    """[number, 3] Messages at random distinct places of both pools."""
    slots = pool_bytes // message_bytes
    there, here = (rng.permutation(slots)[:number] * message_bytes for _ in range(2))
    return np.stack([there, here, np.full(number, message_bytes)], axis=1).astype(np.int64)


def pattern(offset: int, num_bytes: int) -> UInt8s:
    """What lies at an offset of a pool that is moved from; both are multiples of 8."""
    start = offset // 8
    words = np.arange(start + 1, start + 1 + num_bytes // 8, dtype=np.uint64) * _WORD
    return words.view(np.uint8)


def fill(pool: UInt8s) -> None:
    """Let a pool tell at each word where it lies."""
    for start in range(0, len(pool), MIB):
        part = pool[start : start + MIB]
        part[:] = pattern(start, len(part))


def _verified(link: Link, case: Case, pieces: Int64s, once: Callable[[], float]) -> None:
    """Move once; RuntimeError unless each byte arrived."""
    source, target = (0, 1) if case.direction == "read" else (1, 0)
    pool = link.here if case.direction == "read" else link.there
    assert pool is not None, "a link that writes shows where it writes to"
    if case.direction == "write":
        fill(link.here)
    pool[:] = 0
    once()
    for row in pieces.tolist():
        arrived = pool[row[target] : row[target] + row[2]]
        if not np.array_equal(arrived, pattern(row[source], row[2])):
            raise RuntimeError(
                f"{link.transport} moved wrong bytes: {case.direction} of {row[2]} bytes from "
                f"{row[source]} to {row[target]}"
            )
    if case.direction == "write" and link.transport == "memcpy":
        fill(pool)  # it is read from, too


def _fits(samples: Sequence[Sample]) -> list[Fit]:
    """One for each direction and number of threads, if there is enough to go by.

    Of the fastest runs, as a `LinkCost` is that of an idle link.
    """
    found = []
    for direction, threads in dict.fromkeys((s.case.direction, s.case.threads) for s in samples):
        chosen = [
            sample
            for sample in samples
            if (sample.case.direction, sample.case.threads) == (direction, threads)
        ]
        try:
            cost, error = fit_link_cost(
                [sample.num_messages for sample in chosen],
                [sample.num_bytes for sample in chosen],
                [min(sample.seconds) for sample in chosen],
            )
        except ValueError:  # time does not grow with bytes: too little was moved
            continue
        found.append(Fit(direction, threads, cost, error))
    return found


def result_of(results: Sequence[Result], options: TransferOptions, host: str) -> dict[str, object]:
    """All of it as JSON. `link` is the first fit of the first transport."""
    fits = [(result, fit) for result in results for fit in result.fits]
    return {
        "host": host,
        "options": {
            name: value
            for name, value in asdict(options).items()
            if name not in ("json", "plot", "key", "serve")
        },
        "link": asdict(fits[0][1].cost) if fits else None,
        "links": [
            {
                "transport": result.transport,
                "direction": fit.direction,
                "threads": fit.threads,
                **asdict(fit.cost),
                "peak_block_bytes": fit.peak_block_bytes,
                "error": asdict(fit.error),
            }
            for result, fit in fits
        ],
        "reference": {
            "name": results[0].reference.name,
            "bytes_per_s_by_threads": {
                str(number): rate for number, rate in results[0].reference.bytes_per_s.items()
            },
        },
        "samples": [
            {
                "transport": result.transport,
                **asdict(sample.case),
                "num_bytes": sample.num_bytes,
                "num_messages": sample.num_messages,
                "seconds": sample.seconds,
                "bytes_per_s": sample.bytes_per_s,
                "best_bytes_per_s": sample.best_bytes_per_s,
                "cpu_s_per_gb": sample.cpu_s_per_gb,
            }
            for result in results
            for sample in result.samples
        ],
    }


# ---------------------------------------------------------------- what users write


def size_of(text: str, shown: str) -> int:
    """Bytes of `256MiB`, `1 GiB`, `64000`. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if not match or match[2].lower() not in _UNITS:
        raise ConfigError(f"{shown} is {text!r}; it must be a size", hint="for example 256MiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def numbers_of(text: str, shown: str, *, least: int = 1, most: int = MIB) -> list[int]:
    """The numbers of `4,96,384`, and of `4..64`: 4, 8, 16, 32, 64. Raises ConfigError."""
    found: list[int] = []
    for part in text.split(","):
        first, dots, last = part.strip().partition("..")
        if not first.isdecimal() or (dots and not last.isdecimal()):
            raise ConfigError(
                f"{shown} is {text!r}; it must be numbers", hint="for example 4,96,384 or 4..4096"
            )
        number, end = int(first), int(last or first)
        if not least <= number <= end <= most or (dots and number == 0):
            raise ConfigError(f"{shown} has {part.strip()}; it must be from {least} to {most}")
        while number <= end:
            found.append(number)
            number = max(2 * number, 1)
    return list(dict.fromkeys(found))


def _words(text: str, shown: str, known: Sequence[str]) -> list[str]:
    found = [word.strip() for word in text.split(",")]
    for word in found:
        if word not in known:
            raise ConfigError(f"{shown} has {word!r}; choices: {', '.join(known)}")
    return list(dict.fromkeys(found))
