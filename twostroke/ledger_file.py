"""The ledger of a run in a file: one JSON line a request, as it ended.

`twostroke serve --save-ledger` and `twostroke twin --save-ledger` write it; `twostroke diagnose`
says why that run was slow, and `twostroke twin --workload` plays it again.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from twostroke.errors import ConfigError

if TYPE_CHECKING:  # prometheus_client takes a while to load, and a workload needs none of it
    from twostroke.metrics import SampleRecord

logger = logging.getLogger(__name__)

Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
Outputs = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
BlockId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 30)]
Time = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class Recorded(msgspec.Struct, omit_defaults=True):
    """One request of a run of ours, measured or simulated.

    `block_ids`, if any, name each begun block of `block_tokens` prompt tokens, equal where prefixes
    are. `intervals` are the seconds of the ledger by interval, in lower case. `engines` are how
    many prefilled and how many decoded then; none where no engine has such a role.
    """

    arrival_s: Time
    prompt_tokens: Tokens
    output_tokens: Outputs
    block_tokens: Tokens = 16
    block_ids: list[BlockId] = []
    ttft_s: float | None = None
    e2e_s: float | None = None
    cached_tokens: int = 0
    num_preemptions: int = 0
    intervals: dict[str, float] = {}
    engines: tuple[int, int] = (0, 0)


class LedgerFile:
    """Takes requests that ended with an answer; arrivals count from `origin_s` on.

    Raises ConfigError if it cannot be begun.
    """

    def __init__(self, path: Path, origin_s: float) -> None:
        self._path = path
        self._origin_ns = round(origin_s * 1e9)
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise ConfigError(f"cannot write the ledger to {path}: {error.strerror}") from None

    def add(self, records: "Sequence[SampleRecord]", engines: tuple[int, int]) -> None:
        """A request has ended: its samples. Those without an answer are left out."""
        lines = b""
        for it in records:
            ledger = it.ledger
            if it.finish_reason not in ("stop", "length") or ledger.first_token_ns is None:
                continue
            row = Recorded(
                arrival_s=max(0, ledger.arrived_ns - self._origin_ns) / 1e9,
                prompt_tokens=it.prompt_tokens,
                output_tokens=it.output_tokens,
                ttft_s=(ledger.first_token_ns - ledger.arrived_ns) / 1e9,
                e2e_s=ledger.total_ns / 1e9,
                cached_tokens=it.cached_tokens,
                num_preemptions=ledger.num_preemptions,
                intervals={name: spent_s for name, spent_s in ledger.spent().items() if spent_s},
                engines=engines,
            )
            lines += msgspec.json.encode(row) + b"\n"
        try:
            self._file.write(lines)
        except (OSError, ValueError) as error:  # ValueError: closed after an error before
            if not self._file.closed:
                logger.error("the ledger in %s ends here: %s", self._path, error)
                self._file.close()

    def close(self) -> None:
        """Nothing is added after this."""
        self._file.close()
