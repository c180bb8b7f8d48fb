"""What sampling costs: milliseconds for one token of each of 64 rows over a vocabulary of 49,152.

Times are CPU time of one thread (fastest of several), so that a busy machine disturbs little.
`--json` prints one JSON object as the last line.
"""

import argparse
import json
import time

import numpy as np
import torch

from twostroke.messages import NO_TOKENS, NewRequest, SamplingParams
from twostroke.model.memory import keep_freed_memory
from twostroke.worker.sampler import Sampler

VOCAB_SIZE = 49_152
PROMPT_TOKENS = 100
REPEATS = 8

CASES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_k 40, top_p 0.9": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top_p 0.9, flat": {"temperature": 40.0, "top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "penalties": {"temperature": 0.0, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "5 logprobs": {"temperature": 0.0, "logprobs": 5},
}


def measure(params: dict[str, float], num_rows: int, logits: torch.Tensor) -> float:
    """Milliseconds of one `Sampler.sample` over `num_rows` seats with these parameters."""
    sampler = Sampler(
        max_num_seqs=num_rows, vocab_size=VOCAB_SIZE, seed=0, device=torch.device("cpu")
    )
    prompt = np.arange(PROMPT_TOKENS, dtype=np.int32)
    for seat in range(num_rows):
        request = NewRequest(
            slot=seat,
            request_id=f"request {seat}",
            token_ids=prompt,
            num_prompt_tokens=PROMPT_TOKENS,
            params=SamplingParams(**params),
            stop_token_ids=(),
            block_ids=NO_TOKENS,
        )
        sampler.seat(request)
    seats = np.arange(num_rows, dtype=np.int32)
    times_s = []
    for step in range(REPEATS):
        fresh = logits.clone()
        positions = np.full(num_rows, PROMPT_TOKENS + step, np.int32)
        start_s = time.thread_time()
        sampler.sample(fresh, seats, positions)
        times_s.append(time.thread_time() - start_s)
    return min(times_s) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    # Standard deviation 4: most of the mass on a few hundred tokens, as at an uncertain position.
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn((arguments.rows, VOCAB_SIZE), generator=generator)
    results_ms = {name: measure(params, arguments.rows, logits) for name, params in CASES.items()}
    for name, milliseconds in results_ms.items():
        print(f"{name:24} {milliseconds:8.2f} ms")
    if arguments.json:
        print(json.dumps({"rows": arguments.rows, "vocab_size": VOCAB_SIZE, "ms": results_ms}))


if __name__ == "__main__":
    main()
