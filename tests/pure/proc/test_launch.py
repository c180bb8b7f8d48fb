import pytest

from twostroke.config import EngineConfig
from twostroke.errors import ConfigError
from twostroke.proc import launch
from twostroke.proc.launch import startup_block
from twostroke.proc.start import cores_of


@pytest.mark.parametrize(
    ("settings", "cores"),
    [
        ({"cpu_threads": 2}, [{1, 3}]),
        ({"cpu_threads": 2, "prefill": 1, "decode": 2}, [{1, 3}, {5, 7}, {9, 11}]),
        ({"cpu_threads": 3, "prefill": 1, "decode": 2}, [set(), set(), set()]),  # too few
        ({"prefill": 1, "decode": 1}, [set(), set()]),
    ],
)
def test_engines_are_kept_to_cores_of_their_own_when_their_threads_are_given(
    settings, cores, monkeypatch
):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {11, 9, 7, 5, 3, 1}, raising=False)
    config = EngineConfig(**settings)
    assert [cores_of(config, engine) for engine in range(len(cores))] == cores


def test_a_server_joins_nobody():
    with pytest.raises(ConfigError, match="a server joins nobody; run twostroke engine"):
        launch.serve(EngineConfig(join="h:1", key="k"), [])


def test_the_block_lines_up():
    assert startup_block([("A", "1", ""), ("Long", "2", "why")]) == "  A     1\n  Long  2  (why)"
