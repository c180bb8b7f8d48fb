"""What a server writes of each request, and who reads it."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.pure.test_metrics_handoff import handed_over
from twostroke.errors import ConfigError
from twostroke.ledger_file import LedgerFile
from twostroke.plan.diagnose import from_file
from twostroke.twin.traces import read


def test_what_was_served_is_diagnosed_and_played_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    file = LedgerFile(path, origin_s=-2.0)
    for _ in range(3):
        file.add([handed_over()], (1, 2))
    file.close()
    seen = from_file(path)
    assert seen.source == "3 requests of ledger.jsonl"
    assert (seen.prompt_tokens, seen.output_tokens) == (100, 5)
    assert seen.transfer_s == pytest.approx(1.0)
    assert (seen.num_prefill, seen.num_decode) == (1, 2)
    workload = read(path)
    assert workload.arrival_s.tolist() == [2.0, 2.0, 2.0] or workload.arrival_s[0] == 0
    assert workload.output_tokens.tolist() == [5, 5, 5]


def test_requests_without_an_answer_are_left_out(tmp_path: Path) -> None:
    file = LedgerFile(tmp_path / "ledger.jsonl", origin_s=0.0)
    file.add([replace(handed_over(), finish_reason="abort")], (0, 0))
    assert (tmp_path / "ledger.jsonl").read_bytes() == b""
    file.close()


def test_a_disk_that_fails_ends_the_file_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = LedgerFile(Path("/dev/full"), origin_s=0.0)
    for _ in range(2):
        file.add([handed_over()], (1, 2))
    assert caplog.text.count("ends here") == 1


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write the ledger"):
        LedgerFile(tmp_path / "no" / "such", origin_s=0.0)
