"""Throughput without a server: fixed cases with fixed prompts, over the offline API.

The engine comes in as an object, so nothing here knows how one is built. The cases and their
prompts are fixed, so that figures of different engines and of different days can be compared.
"""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from twostroke.bench import report, workload
from twostroke.bench.options import ThroughputOptions
from twostroke.bench.workload import FIRST_TOKEN_ID
from twostroke.errors import TwostrokeError
from twostroke.messages import SamplingParams

VOCAB_SIZE = 49_152  # SmolLM2's
WARM_UP_PROMPTS, WARM_UP_TOKENS = 8, 8


class Engine(Protocol):
    """What is measured: `twostroke.LLM` is one."""

    def generate(
        self, prompts: list[list[int]], sampling_params: SamplingParams, *, use_tqdm: bool
    ) -> Sequence[Any]:
        """One result a prompt, with the tokens of its sample at `outputs[0].token_ids`."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False when that was not possible."""
        ...


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

    @property
    def num_output_tokens(self) -> int:
        return len(self.prompts) * self.output_tokens


@dataclass(frozen=True)
class Measured:
    """The times of a case's runs in seconds."""

    case: Case
    times_s: list[float]

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s)

    @property
    def input_per_s(self) -> float:
        return self.case.num_input_tokens / self.median_s

    @property
    def output_per_s(self) -> float:
        return self.case.num_output_tokens / self.median_s

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


def random_case(options: ThroughputOptions, *, seed: int) -> Case:
    """One case of random prompts."""
    prompts = workload.random_prompts(
        options.num_prompts,
        input_tokens=options.input_len,
        output_tokens=options.output_len,
        prefix_tokens=options.prefix_len,
        vocab_size=options.vocab_size,
        seed=seed,
    )
    label = f"{options.num_prompts} x {options.prefix_len + options.input_len} in"
    return Case(
        "random",
        f"{label} / {options.output_len} out",
        [list(prompt.prompt) for prompt in prompts if not isinstance(prompt.prompt, str)],
        options.output_len,
    )


def measure(engine: Engine, case: Case, *, runs: int) -> Measured:
    """Time `runs` runs, each on an empty prefix cache, after a warm-up on other prompts."""
    warm_up = [_other_ids(prompt) for prompt in case.prompts[:WARM_UP_PROMPTS]]
    _generate(engine, warm_up, min(case.output_tokens, WARM_UP_TOKENS))
    times_s = []
    for _ in range(runs):
        if not engine.reset_prefix_cache():
            raise TwostrokeError("the prefix cache could not be emptied between two runs")
        start_s = time.perf_counter()
        num_output_tokens = _generate(engine, case.prompts, case.output_tokens)
        times_s.append(time.perf_counter() - start_s)
        if num_output_tokens != len(case.prompts) * case.output_tokens:
            raise TwostrokeError(
                f"{num_output_tokens} tokens came out, of {len(case.prompts)} prompts with "
                f"{case.output_tokens} each"
            )
    return Measured(case, times_s)


def _generate(engine: Engine, prompts: list[list[int]], output_tokens: int) -> int:
    """Greedy, ignoring EOS; returns how many tokens came out."""
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    results = engine.generate(prompts, params, use_tqdm=False)
    return sum(len(result.outputs[0].token_ids) for result in results)


def _other_ids(prompt: list[int]) -> list[int]:
    """As long, of the same vocabulary, and with no prefix in common."""
    return prompt[::-1]


def table_of(measured: Sequence[Measured]) -> str:
    """One line a case."""
    rows = [
        [
            f"{one.case.name}: {one.case.label}",
            f"{one.median_s:.2f}",
            f"{one.output_per_s:,.0f}",
            f"{one.total_per_s:,.0f}",
            f"{min(one.times_s):.2f} to {max(one.times_s):.2f}",
        ]
        for one in measured
    ]
    return report.table(["case", "median s", "output tok/s", "total tok/s", "all runs, s"], rows)


def result_of(measured: Measured) -> dict[str, float | int | list[float]]:
    """Figures under the keys of vLLM's `bench throughput`, and the times of all runs."""
    case, elapsed_s = measured.case, measured.median_s
    return {
        "elapsed_time": elapsed_s,
        "num_requests": len(case.prompts),
        "total_num_tokens": case.num_input_tokens + case.num_output_tokens,
        "requests_per_second": len(case.prompts) / elapsed_s,
        "tokens_per_second": measured.total_per_s,
        "output_tokens_per_second": measured.output_per_s,
        "times_s": measured.times_s,
    }
