"""How results are printed: vLLM's block for a load run, small tables, one JSON object a run."""

import json
from collections.abc import Mapping, Sequence

from twostroke.bench.stats import METRICS, Result

WIDTH = 50  # of vLLM's block

_TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}

# Below this share of the offered rate queues grow, and latencies say more about the length of the
# run than about the server.
SATURATED = 0.9


def serving_block(result: Result) -> str:
    """The block that `vllm bench serve` prints, line for line."""
    lines = [" Serving Benchmark Result ".center(WIDTH, "=")]

    def row(label: str, key: str) -> None:
        value = result.get(key)
        if value is not None:
            shown = f"{value:<10.2f}" if isinstance(value, float) else f"{value:<10}"
            lines.append(f"{label:<40} {shown}".rstrip())

    row("Successful requests:", "completed")
    row("Failed requests:", "failed")
    row("Maximum request concurrency:", "max_concurrency")
    if result.get("request_rate") != "inf":
        row("Request rate configured (RPS):", "request_rate")
    row("Benchmark duration (s):", "duration")
    row("Total input tokens:", "total_input_tokens")
    row("Total generated tokens:", "total_output_tokens")
    row("Request throughput (req/s):", "request_throughput")
    row("Request goodput (req/s):", "request_goodput")
    row("Output token throughput (tok/s):", "output_throughput")
    row("Peak output token throughput (tok/s):", "max_output_tokens_per_s")
    row("Peak concurrent requests:", "max_concurrent_requests")
    row("Total token throughput (tok/s):", "total_token_throughput")
    for name in METRICS:
        if f"mean_{name}_ms" not in result:
            continue
        lines.append(_TITLES[name].center(WIDTH, "-"))
        row(f"Mean {name.upper()} (ms):", f"mean_{name}_ms")
        row(f"Median {name.upper()} (ms):", f"median_{name}_ms")
        for key in result:
            percentile, _, rest = key.partition("_")
            if rest == f"{name}_ms" and percentile[1:].replace(".", "").isdigit():
                row(f"{percentile.upper()} {name.upper()} (ms):", key)
    lines.append("=" * WIDTH)
    return "\n".join(lines)


def notes(result: Result) -> list[str]:
    """Sentences on what makes the figures doubtful: a server that did not keep up, failures."""
    found = []
    rate, done = result.get("request_rate"), result["request_throughput"]
    if isinstance(rate, float) and isinstance(done, float) and done < SATURATED * rate:
        found.append(
            f"note: {rate:.2f} requests/s were offered and {done:.2f} completed: the server did "
            "not keep up (or the run was too short to tell), so latencies depend on --num-prompts"
        )
    if result["failed"]:
        found.append(f"note: the first of {result['failed']} failures: {result['first_error']}")
    return found


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = (
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join([first, *others]).rstrip()

    return "\n".join([line(headers), "  ".join("-" * width for width in widths), *map(line, rows)])


def json_line(result: Mapping[str, object]) -> str:
    """One JSON object on one line."""
    return json.dumps(result, separators=(", ", ": "), allow_nan=False)
