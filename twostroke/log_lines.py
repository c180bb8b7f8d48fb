"""What the log says of requests and of the engines' work: one line a request, one every while."""

from collections.abc import Sequence

from twostroke.ledger import OF_TWO_ENGINES, Interval
from twostroke.messages import EngineStats
from twostroke.metrics import SampleRecord, time_per_output_token_s
from twostroke.metrics_handoff import HandoffNumbers, status_parts


def request_line(request_id: str, samples: Sequence[SampleRecord]) -> str:
    """The log line of an ended request; times are those of its slowest sample."""
    slowest = max(samples, key=lambda sample: sample.ledger.total_ns)
    ledger = slowest.ledger
    reasons = ", ".join(dict.fromkeys(sample.finish_reason for sample in samples))
    output_tokens = sum(sample.output_tokens for sample in samples)
    cached = f" ({slowest.cached_tokens} cached)" if slowest.cached_tokens else ""
    parts = [
        f"{request_id}: {reasons}",
        f"{slowest.prompt_tokens}{cached} + {output_tokens} tokens",
    ]
    if ledger.first_token_ns is not None:
        ttft_ms = (ledger.first_token_ns - ledger.arrived_ns) / 1e6
        parts.append(f"first token {ttft_ms:.0f} ms")
    if per_token_s := time_per_output_token_s(slowest):
        parts.append(f"{1 / per_token_s:.1f} tok/s")
    shown = [i for i in Interval if i not in OF_TWO_ENGINES or ledger.spent_ns[i]]
    if slowest.transfer_bytes and slowest.transfer_s > 0:
        rate = slowest.transfer_bytes / slowest.transfer_s / 1e9
        parts.append(f"KV {slowest.transfer_bytes / 1e6:.1f} MB at {rate:.2f} GB/s")
    spent = [f"{i.name.lower()} {ledger.spent_ns[i] / 1e6:.0f}" for i in shown]
    return f"{', '.join(parts)}, {ledger.total_ns / 1e6:.0f} ms ({', '.join(spent)})"


class StatusLine:
    """The periodic line: rates between two looks at the engine's totals."""

    def __init__(self, now_s: float) -> None:
        self._last = EngineStats()
        self._last_s = now_s
        self._last_handoff = HandoffNumbers()

    def line(
        self, stats: EngineStats, now_s: float, handoff: HandoffNumbers | None = None
    ) -> str | None:
        """The line for the time since the last call; None when nothing ran or waited.

        `handoff` is there where engines have roles.
        """
        last, elapsed_s = self._last, now_s - self._last_s
        self._last, self._last_s = stats, now_s
        before, self._last_handoff = self._last_handoff, handoff or self._last_handoff
        prompt_tokens = stats.prompt_tokens - last.prompt_tokens
        output_tokens = stats.generation_tokens - last.generation_tokens
        busy = prompt_tokens or output_tokens or stats.num_running or stats.num_waiting
        busy = busy or (handoff is not None and handoff.num_waiting)
        if elapsed_s <= 0 or not busy:
            return None
        parts = [
            f"prompt {prompt_tokens / elapsed_s:.1f} tok/s",
            f"generation {output_tokens / elapsed_s:.1f} tok/s",
            f"running {stats.num_running}",
            f"waiting {stats.num_waiting}",
            f"KV {stats.kv_usage:.1%}",
        ]
        if queries := stats.prefix_cache_queries - last.prefix_cache_queries:
            hits = stats.prefix_cache_hits - last.prefix_cache_hits
            parts.append(f"prefix hits {hits / queries:.1%}")
        drafts = stats.spec_decode_num_draft_tokens - last.spec_decode_num_draft_tokens
        if drafts:
            accepted = stats.spec_decode_num_accepted_tokens - last.spec_decode_num_accepted_tokens
            parts.append(f"drafts accepted {accepted / drafts:.1%}")
        if preemptions := stats.num_preemptions - last.num_preemptions:
            parts.append(f"preemptions {preemptions}")
        if handoff is not None:
            parts += status_parts(before, handoff, elapsed_s)
        return ", ".join(parts)
