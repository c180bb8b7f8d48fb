"""What a runner and the benchmark say to each other: JSON lines over stdin and stdout.

Imported by runners inside the environments of peers, so it needs nothing but Python. A runner says
`{"version", "load_s"}` once it has loaded, then answers each job, `{"prompts", "output_tokens"}`,
with `{"elapsed_s", "num_output_tokens"}`. It ends when its stdin does. What a peer prints itself
goes to stderr.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple


class Job(NamedTuple):
    """Prompts as token ids, handed over all at once; greedy, and the end of text is ignored."""

    prompts: list[list[int]]
    output_tokens: int


def serve(load: Callable[[], Callable[[Job], int]], version: str) -> None:
    """Load a peer, then run jobs until stdin ends.

    `load` gives the function that runs a job on an empty prefix cache and returns how many tokens
    came out.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # peers print progress bars and banners to stdout

    def say(answer: dict[str, object]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    start_s = time.perf_counter()
    generate = load()
    say({"version": version, "load_s": time.perf_counter() - start_s})
    for line in sys.stdin:
        job = Job(**json.loads(line))
        start_s = time.perf_counter()
        num_output_tokens = generate(job)
        say({"elapsed_s": time.perf_counter() - start_s, "num_output_tokens": num_output_tokens})
