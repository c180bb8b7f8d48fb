"""Throughput without a server: fixed cases with fixed prompts, over the offline API.

The engine comes in as a function, so nothing here knows how one is built. The cases and their
prompts are fixed, so that figures of different engines and of different days can be compared.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twostroke.bench.workload import FIRST_TOKEN_ID

VOCAB_SIZE = 49_152  # SmolLM2's
WARM_UP_PROMPTS, WARM_UP_TOKENS = 8, 8

# Generate `output_tokens` for each prompt, greedily, ignoring EOS; return how many came out.
Generate = Callable[[list[list[int]], int], int]


@dataclass(frozen=True)
class Case:
    """Prompts that are handed over all at once, and the number of tokens each generates."""

    name: str
    label: str
    prompts: list[list[int]]
    output_tokens: int

    @property
    def num_input_tokens(self) -> int:
        return sum(map(len, self.prompts))


@dataclass(frozen=True)
class Measured:
    """The times of a case's runs in seconds, and what was generated in each."""

    case: Case
    times_s: list[float]
    num_output_tokens: int

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s)

    @property
    def input_per_s(self) -> float:
        return self.case.num_input_tokens / self.median_s

    @property
    def output_per_s(self) -> float:
        return self.num_output_tokens / self.median_s

    @property
    def total_per_s(self) -> float:
        return self.input_per_s + self.output_per_s


def peer_cases(seed: int = 0) -> list[Case]:
    """a single stream, b prefill, c batch, d shared prefix. Seed 0 is the one to publish.

    Ids are drawn in this order: a, b, c, the prefix, d.
    """
    draw = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(FIRST_TOKEN_ID, VOCAB_SIZE) for _ in range(count)]

    single, long = ids(32), ids(1024)
    batch = [ids(256) for _ in range(64)]
    prefix = ids(192)
    shared = [prefix + ids(64) for _ in range(256)]
    return [
        Case("a", "single stream, 32 in / 128 out", [single], 128),
        Case("b", "prefill of 1,024", [long], 1),
        Case("c", "64 x 256 in / 64 out", batch, 64),
        Case("d", "256 x (192 shared + 64) in / 32 out", shared, 32),
    ]


def measure(
    case: Case,
    generate: Generate,
    *,
    runs: int,
    reset: Callable[[], object],
    warm_up: Sequence[list[int]],
) -> Measured:
    """Time `runs` runs after a warm-up on other prompts; `reset` empties the prefix cache."""
    generate(list(warm_up[:WARM_UP_PROMPTS]), min(case.output_tokens, WARM_UP_TOKENS))
    times_s = []
    num_output_tokens = 0
    for _ in range(runs):
        reset()
        start_s = time.perf_counter()
        num_output_tokens = generate(case.prompts, case.output_tokens)
        times_s.append(time.perf_counter() - start_s)
    return Measured(case, times_s, num_output_tokens)
