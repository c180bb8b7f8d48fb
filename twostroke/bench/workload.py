"""What is sent and when: prompts, and the moments at which they are sent.

All of it follows from a seed, so that two servers can be given the same load. Prompts are token
ids, not text: a server counts as many tokens as were drawn, whatever its tokenizer.
"""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twostroke.errors import ConfigError

# Ids below this are control tokens in the vocabularies served here.
FIRST_TOKEN_ID = 20


@dataclass(frozen=True)
class Prompt:
    """One request: token ids or text, and the number of tokens to generate."""

    prompt: list[int] | str
    output_tokens: int


def random_prompts(
    num_prompts: int,
    *,
    input_tokens: int,
    output_tokens: int,
    prefix_tokens: int = 0,
    range_ratio: float = 0.0,
    vocab_size: int,
    seed: int,
) -> list[Prompt]:
    """Prompts of random ids behind one shared random prefix.

    As in vLLM's random dataset, lengths are drawn evenly from [len * (1 - ratio),
    len * (1 + ratio)], and the prefix comes on top of the input length.
    """
    if not 0 <= range_ratio < 1:
        raise ConfigError(f"--random-range-ratio is {range_ratio}; it must be in [0, 1)")
    if vocab_size <= FIRST_TOKEN_ID:
        raise ConfigError(f"--vocab-size is {vocab_size}; it must be over {FIRST_TOKEN_ID}")
    draw = random.Random(seed)

    def token_ids(count: int) -> list[int]:
        return [draw.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(count)]

    def length(mean: int) -> int:
        low, high = math.floor(mean * (1 - range_ratio)), math.ceil(mean * (1 + range_ratio))
        return max(1, draw.randint(low, high))

    prefix = token_ids(prefix_tokens)
    return [
        Prompt(prefix + token_ids(length(input_tokens)), length(output_tokens))
        for _ in range(num_prompts)
    ]


def prompts_from_file(path: Path, num_prompts: int, *, output_tokens: int) -> list[Prompt]:
    """Prompts of a JSON-lines file, as vLLM's custom dataset: `prompt`, perhaps `output_tokens`.

    A file with fewer lines than `num_prompts` gives what it has.
    """
    prompts: list[Prompt] = []
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the dataset {path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if len(prompts) == num_prompts:
            break
        try:
            row = json.loads(line)
            prompts.append(Prompt(row["prompt"], int(row.get("output_tokens", output_tokens))))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f"line {number} of {path} is not an object with a prompt: {line[:60]}",
                hint='write {"prompt": "..."} on each line',
            ) from None
    if not prompts:
        raise ConfigError(f"the dataset {path} has no prompt")
    return prompts


def arrival_offsets_s(
    num_requests: int, *, request_rate: float, burstiness: float, seed: int
) -> Sequence[float]:
    """Seconds from the start at which each request is sent; all 0 for an infinite rate.

    Gaps are gamma-distributed with shape `burstiness` (1: a Poisson process; less: burstier; more:
    more even), then scaled so that the last request leaves at exactly num_requests / request_rate:
    otherwise two seeds would offer loads that differ by a few percent (vLLM does the same).
    """
    if not request_rate > 0:
        raise ConfigError(f"--request-rate is {request_rate}; it must be over 0, or inf")
    if not burstiness > 0:
        raise ConfigError(f"--burstiness is {burstiness}; it must be over 0")
    if math.isinf(request_rate):
        return [0.0] * num_requests
    draw = random.Random(seed)
    offsets: list[float] = []
    now = 0.0
    for _ in range(num_requests):
        now += 1.0 if math.isinf(burstiness) else draw.gammavariate(burstiness, 1 / burstiness)
        offsets.append(now)
    scale = num_requests / request_rate / now
    return [offset * scale for offset in offsets]
