"""What can be asked of a benchmark: vLLM's names, their defaults and meanings.

The command line makes its flags from these fields, so this file imports nothing slow.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def _option(default: Any, doc: str, *, minimum: float | None = None) -> Any:
    metadata = {"doc": doc, "minimum": minimum}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Load on a running server (`twostroke bench serve`)."""

    base_url: str = _option("http://127.0.0.1:8000", "the server")
    model: str = _option("", "by its name in the API; default: the first that the server lists")
    api_key: str = _option("", "the server's key, if it wants one")
    dataset_name: str = _option("random", "random, or custom: a JSON-lines file with prompts")
    dataset_path: Path | None = _option(None, "file of the custom dataset")
    num_prompts: int = _option(100, "requests to send", minimum=1)
    request_rate: float = _option(float("inf"), "requests per second; inf: all at once")
    burstiness: float = _option(1.0, "shape of the gamma-distributed gaps; 1: a Poisson process")
    max_concurrency: int | None = _option(None, "most requests at a time", minimum=1)
    random_input_len: int = _option(1024, "tokens of a prompt", minimum=1)
    random_output_len: int = _option(128, "tokens of an answer", minimum=1)
    random_prefix_len: int = _option(
        0, "tokens that all prompts begin with, on top of the input length", minimum=0
    )
    random_range_ratio: float = _option(0.0, "lengths vary by up to this share", minimum=0)
    custom_output_len: int = _option(
        256, "tokens of an answer, where the file says none", minimum=1
    )
    vocab_size: int = _option(0, "random ids are below this; 0: what the server says", minimum=0)
    seed: int = _option(
        0, "of prompts and arrivals; use a fresh one a run, or the prefix cache answers"
    )
    num_warmups: int = _option(1, "requests before the measured ones", minimum=1)
    ignore_eos: bool = _option(False, "all answers have their full length")
    temperature: float = _option(0.0, "of sampling; 0: greedy", minimum=0)
    goodput: list[str] = _option([], "limits in ms of a good request: ttft:200,tpot:50,e2el:3000")
    percentile_metrics: str = _option("ttft,tpot,itl,e2el", "latencies to report")
    metric_percentiles: str = _option("99", "percentiles to report")
    save_result: bool = _option(False, "write the result to a JSON file")
    result_dir: Path = _option(Path(), "directory of that file")
    result_filename: str = _option("", "its name; default: from rate, model and date")


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions:
    """Throughput without a server (`twostroke bench throughput`)."""

    num_prompts: int = _option(64, "prompts, handed over all at once", minimum=1)
    input_len: int = _option(256, "tokens of a prompt", minimum=1)
    output_len: int = _option(64, "tokens of an answer", minimum=1)
    prefix_len: int = _option(0, "tokens that all prompts begin with, on top", minimum=0)
    vocab_size: int = _option(32_000, "random ids are below this", minimum=21)
    runs: int = _option(3, "measured runs after the warm-up; the median counts", minimum=1)
