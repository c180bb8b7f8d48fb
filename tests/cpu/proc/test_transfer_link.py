"""`bench transfer` between two processes, with every byte compared."""

import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from twostroke.bench.options import TransferOptions
from twostroke.bench.transfer import pattern
from twostroke.cli_bench import bench_app
from twostroke.connector.nixl_agent import PACKAGES
from twostroke.cost import LinkCost
from twostroke.errors import ConfigError
from twostroke.keys import write_key
from twostroke.proc import transfer_link
from twostroke.proc.transfer_link import opened

SMALL = ("--pool", "8MiB", "--total", "4MiB", "--block-kib", "4,96", "--repeats", "2")
with_nixl = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in PACKAGES), reason="NIXL is not installed"
)
with_mooncake = pytest.mark.skipif(
    not importlib.util.find_spec("mooncake"), reason="mooncake is not installed"
)


@pytest.mark.parametrize(
    ("transport", "direction", "threads"),
    [
        ("memcpy", "read,write", "1,2"),
        ("shm", "read", "1,2"),
        pytest.param("nixl", "read", "2", marks=with_nixl),
        pytest.param("mooncake", "read,write", "1", marks=with_mooncake),
    ],
)
def test_a_small_run(transport: str, direction: str, threads: str, tmp_path: Path):
    figures, plot = tmp_path / "figures.json", tmp_path / "plot.svg"
    command = ["transfer", "--transport", transport, "--direction", direction, *SMALL]
    command += ["--threads", threads, "--json", str(figures), "--plot", str(plot)]
    outcome = CliRunner().invoke(bench_app, command, catch_exceptions=False)
    assert outcome.exit_code == 0
    assert f"{transport} reads 96 KiB blocks at " in outcome.output
    found = json.loads(figures.read_text())
    if found["link"]:  # none where the noise of a run this small hides that bytes take time
        assert LinkCost(**found["link"]).bytes_per_s > 1e6
    assert all(sample["bytes_per_s"] > 1e5 for sample in found["samples"])
    assert {sample["direction"] for sample in found["samples"]} == set(direction.split(","))
    assert all(sample["cpu_s_per_gb"] > 0 for sample in found["samples"])
    assert plot.read_text().startswith("<svg")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path):
    command = ["transfer", "--transport", "memcpy", *SMALL, "--json", str(tmp_path / "no" / "file")]
    outcome = CliRunner().invoke(bench_app, command)
    assert isinstance(outcome.exception, ConfigError)
    assert "cannot write" in str(outcome.exception)


@with_nixl
def test_over_an_address_that_another_host_could_reach(tmp_path: Path):
    key = tmp_path / "key"
    write_key(key)
    both = {"transport": "nixl", "pool": "8MiB", "total": "4MiB", "key": key}
    serving = transfer_link.serve(TransferOptions(serve="127.0.0.1", **both))
    address = next(serving)
    assert address.startswith("127.0.0.1:")
    with opened("nixl", TransferOptions(peer=address, **both)) as link:
        (read,) = link.movers(1, "read")
        read(np.array([[4096, 8192, 4096]]))
        expected = pattern(4096, 4096)
        assert (link.here[8192 : 8192 + 4096] == expected).all()
    with (
        pytest.raises(ConfigError, match="nixl cannot be measured: no handshake"),
        opened("nixl", TransferOptions(peer=address, **{**both, "key": None})) as link,
    ):
        link.movers(1, "read")
    serving.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"transport": "shm", "peer": "127.0.0.1:1"}, "--peer does not go with --transport shm"),
        ({"transport": "mooncake", "peer": "h:1"}, "--peer does not go with --transport mooncake"),
    ],
)
def test_what_does_not_go_together(given: dict, message: str):
    with (
        pytest.raises(ConfigError, match=message),
        opened(given["transport"], TransferOptions(**given)),
    ):
        pytest.fail("opened")


def test_only_nixl_serves_other_hosts():
    with pytest.raises(ConfigError, match="--serve does not go with --transport shm"):
        next(transfer_link.serve(TransferOptions(serve="127.0.0.1")))


def test_processor_time_of_processes_is_counted_by_thread():
    def cpu_s() -> float:
        return transfer_link.cpu_s_of([os.getpid()])

    before = cpu_s()
    # The system brings the account up to date now and then only.
    assert any(sum(range(200_000)) and cpu_s() > before for _ in range(1000))
    assert transfer_link.cpu_s_of([1 << 22]) == 0
