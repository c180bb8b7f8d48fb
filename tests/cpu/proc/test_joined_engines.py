"""Engines that join a server over TCP: `twostroke serve --engines-listen`, `twostroke engine`."""

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cpu.proc.serving import Command, Served
from tests.cpu.proc.test_serve import SMALL, complete, leftovers
from twostroke.keys import write_key
from twostroke.testing.tiny_model import write_tiny_checkpoint

PROMPT = "a prompt of several blocks, so that there is some KV to be read by the other engine"
OPTIONS = (*SMALL, "--dtype", "float32", "--cpu-threads", "1")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    write_key(tmp_path / "key")
    return tmp_path / "key"


def test_engines_join_die_return_and_leave(tiny_dir: Path, tmp_path: Path, key: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    env = {"TMPDIR": str(scratch)}
    with contextlib.ExitStack() as stack:

        def started(make: Callable[[list[str], dict[str, str]], Command], *arguments: str):
            command = make([*arguments, *OPTIONS], env)
            stack.callback(command.end)
            return command

        def serve(port: str = "0", engines: str = "127.0.0.1:0") -> Served:
            where = ("--port", port, "--engines-listen", engines, "--key", str(key))
            policy = ("--pd-policy", "always", "--engine-timeout-s", "5")
            return started(Served, str(tiny_dir), *where, *policy)

        def join(role: str, model: Path = tiny_dir, key: Path = key) -> Command:
            where = ("--role", role, "--join", address, "--key", str(key))
            return started(Command, "engine", str(model), *where)

        server = serve()
        address = server.wait_for(r"engines may join at (127\.0\.0\.1:\d+)")
        p, d = join("prefill"), join("decode")
        server.wait_started()
        text = complete(server, PROMPT, max_tokens=16)["choices"][0]["text"]

        write_key(tmp_path / "other")
        stranger = join("decode", key=tmp_path / "other")
        assert stranger.wait() == 2
        assert "does not accept our key" in stranger.output
        model = write_tiny_checkpoint(tmp_path / "model", num_hidden_layers=3)
        wrong = join("decode", model)
        assert wrong.wait() == 2
        reason = "its model model is not tiny-llama as it is here"
        assert reason in wrong.output
        server.wait_for(reason)

        p.process.send_signal(signal.SIGKILL)
        server.wait_for(r"engine \d \(prefill\) is gone: .* its connection is gone")
        assert complete(server, PROMPT, max_tokens=16)["choices"][0]["text"] == text
        p = join("prefill")
        server.wait_for(r"engine \d \(prefill\) is ready", times=2)
        assert complete(server, PROMPT, max_tokens=16)["choices"][0]["text"] == text

        port = server.url.rpartition(":")[2]
        assert server.stop() == 0
        d.wait_for("has ended; waiting for it to come back")
        server = serve(port, address)
        server.wait_for(r"engine \d \((?:prefill|decode)\) is ready", times=2)
        server.wait_started()
        assert complete(server, PROMPT, max_tokens=16)["choices"][0]["text"] == text

        assert p.stop() == 0
        server.wait_for(r"engine \d \(prefill\) is gone: .* it has left")
        assert complete(server, PROMPT, max_tokens=16)["choices"][0]["text"] == text
        assert d.stop() == 0
        with server.client() as client:
            assert client.get("/health").status_code == 503
        assert server.stop() == 0
        for command in (server, p, d):
            assert "Traceback" not in command.output
    assert leftovers(scratch) == []


def test_prefill_and_decode_on_one_host(tiny_dir: Path, tmp_path: Path) -> None:
    """`serve --prefill 1 --decode 1`: goes on without P, and ends once nobody decodes."""
    where = ("--port", "0", "--prefill", "1", "--decode", "1", "--pd-policy", "always")
    server = Served([str(tiny_dir), *where, *OPTIONS], {"TMPDIR": str(tmp_path)})
    try:
        server.wait_started()
        assert "0: prefill, 1: decode  (--prefill, --decode)" in server.output
        server.wait_for(r"Engine 1 reads from 0 +\d+\.\d+ GB/s")
        text = complete(server, PROMPT, max_tokens=16)["choices"][0]["text"]
        p, d = server.cores()
        p.kill()
        server.wait_for(r"engine 0 \(prefill\) is gone: .* killed by signal 9")
        assert complete(server, PROMPT, max_tokens=16)["choices"][0]["text"] == text
        d.kill()
        server.wait_for(r"engine 1 \(decode\) is gone")
        assert server.wait() == 1
    finally:
        server.end()
    assert leftovers(tmp_path) == []
