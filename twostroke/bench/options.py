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
class StepOptions:
    """Where a step's time goes (`twostroke bench step`)."""

    rows: list[int] = _option([1, 16, 64], "requests of a step; give it several times")
    tokens: int = _option(1, "tokens of each: 1 is a decode, more a piece of a prompt", minimum=1)
    context: int = _option(256, "tokens of each that are computed already", minimum=0)


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


@dataclass(frozen=True, kw_only=True)
class TransferOptions:
    """One-sided reads of scattered blocks between two processes (`twostroke bench transfer`)."""

    transport: str = _option("shm", "what to measure, with commas: memcpy, shm, nixl, mooncake")
    block_kib: str = _option(
        "4,8,24,96,384,1024,4096", "sizes of a block in KiB; 4..4096 is all doublings"
    )
    merge: str = _option(
        "0", "sizes in KiB up to which adjacent blocks move as one message; 0: none are adjacent"
    )
    threads: str = _option("1", "numbers of threads that read")
    direction: str = _option("read", "read, write (memcpy and mooncake), or both with a comma")
    total: str = _option("256MiB", "bytes moved at a time; 1/4 and 1/16 of it as well, for the fit")
    pool: str = _option("1GiB", "memory at either end over which the blocks are scattered")
    repeats: int = _option(5, "timed runs of each case after the verified one", minimum=1)
    line_gbps: float = _option(
        0.0, "line rate in Gbit/s to compare with; 0: memory copy", minimum=0
    )
    serve: str = _option("", "only be read from, at this address of this host, until Ctrl-C (nixl)")
    peer: str = _option("", "read from where --serve runs, at the address that it prints (nixl)")
    key: Path | None = _option(None, "key file that --serve and --peer share: twostroke key FILE")
    seed: int = _option(0, "of where the blocks are")
    json: Path | None = _option(None, "write all figures to this file, as JSON")
    plot: Path | None = _option(None, "draw bandwidth by block size into this file (SVG)")
