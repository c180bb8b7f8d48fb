import subprocess
import sys

import pytest

from twostroke.config import EngineConfig
from twostroke.errors import ConfigError
from twostroke.proc import start


def test_a_core_that_gets_no_settings_ends_by_itself():
    process = start.start_core(EngineConfig(worker_process=True), 0)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 4


def test_only_a_core_with_the_worker_inside_imports_torch_ahead(monkeypatch):
    commands = []
    monkeypatch.setattr("subprocess.Popen", lambda command, **_: commands.append(command))
    for settings in ({}, {"worker_process": True}, {"tensor_parallel_size": 3}):
        start.start_core(EngineConfig(**settings), 0)
    assert [start.IMPORT_TORCH in command for command in commands] == [True, False, False]


def test_begun_cores_end_with_a_start_that_fails(monkeypatch):
    begun = []

    def start_core(config, engine):
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        begun.append(process)
        return process

    monkeypatch.setattr(start, "start_core", start_core)
    monkeypatch.setattr("gc.disable", lambda: None)
    with pytest.raises(ConfigError, match="a server joins nobody"):
        start.serve(EngineConfig(join="h:1", key="k"), [])
    assert len(begun) == 1
    assert all(process.returncode is not None for process in begun)
