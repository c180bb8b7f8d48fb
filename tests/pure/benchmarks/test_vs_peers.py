"""The comparison with other engines, on runners that need none of them."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

RUNNER = """
import sys
sys.path.insert(0, {peers!r})
from protocol import serve

def load():
    print("a banner of the peer")
    return lambda job: len(job.prompts) * job.output_tokens

serve(load, "1.2")
"""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def start(tmp_path: Path):
    """Starts a side whose runner is `source`; all are ended after the test."""
    from peers.sides import Command, Side

    started = []

    def start_side(source: str = RUNNER) -> Side:
        script = tmp_path / "runner.py"
        script.write_text(source.replace("{peers!r}", repr(str(BENCHMARKS / "peers"))))
        side = Side(Command("fake", (sys.executable, str(script))), tmp_path / "fake.log")
        started.append(side)
        return side

    yield start_side
    for side in started:
        side.close()


def small_case():
    from twostroke.bench.offline import Case

    return Case("small", "2 x 3 in / 4 out", [[1, 2, 3], [4, 5, 6]], 4)


def test_a_side_loads_and_runs_cases(start, tmp_path):
    side = start()
    side.warm_up(small_case())
    run = side.run(small_case())
    assert side.version == "1.2"
    assert 0 <= run.elapsed_s < 60
    assert run.cpu_s >= 0
    assert run.foreign >= 0
    assert side.processes.peak_bytes() > 1 << 20
    assert "a banner of the peer" in (tmp_path / "fake.log").read_text()


def test_a_side_stands_still_while_the_other_runs(start):
    from peers.sides import running

    side = start()
    side.processes.pause()
    process = psutil.Process(side.processes.popen.pid)
    assert process.status() == psutil.STATUS_STOPPED
    with running(side.processes):
        side.run(small_case())
    assert process.status() == psutil.STATUS_STOPPED


def test_a_peer_that_cannot_load_is_named_with_its_last_words(start):
    from peers.sides import SideError

    with pytest.raises(SideError, match="fake ended with exit code 1: no such model"):
        start("import sys; sys.exit('no such model')")


def test_a_peer_that_dies_in_a_job_is_named(start):
    from peers.sides import SideError

    dies = RUNNER.replace("lambda job: len(job.prompts) * job.output_tokens", "lambda job: 1 // 0")
    side = start(dies)
    with pytest.raises(SideError, match="ZeroDivisionError"):
        side.run(small_case())


def test_missing_tokens_are_an_error(start):
    from peers.sides import SideError

    side = start(RUNNER.replace("len(job.prompts) *", "1 *"))
    with pytest.raises(SideError, match="made 4 tokens of case small; 8 were asked for"):
        side.run(small_case())


@pytest.mark.parametrize(("lower_is_better", "ratio"), [(False, 0.5), (True, 2.0)])
def test_a_ratio_says_how_many_times_better_ours_is(lower_is_better, ratio):
    from vs_peers import Row

    row = Row("a", "fake", "bf16", "tok/s", lower_is_better, [1.0, 2.0, 3.0], [2.0, 4.0, 3.0])
    assert row.ratio() == ratio
    assert row.cells() == ["a, tok/s", "fake", "bf16", "2.00", "3.00", f"{ratio:.2f}", "", ""]
    assert json.loads(json.dumps(row.result()))["ratio"] == ratio


def compare(*flags: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(BENCHMARKS / "vs_peers.py"), *flags]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_a_missing_peer_is_named_with_the_command_that_installs_it(tmp_path):
    missing = f"llama.cpp={tmp_path / 'no' / 'python'}"
    done = compare("--peers", "llama.cpp", "--python", missing)
    assert done.returncode == 1
    assert "pip install llama-cpp-python==" in done.stderr
    assert "--python llama.cpp=" in done.stderr
    assert done.stderr.endswith("no peer to compare with\n")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--cases", "a,z"), "unknown case: z; known: a, b"),
        (("--formats", "int3"), "unknown format: int3; known: q4_1, bf16, int8"),
        (("--python", "nobody=x"), "--python nobody=x: PEER=PATH expected"),
        (("--rounds", "0"), "--rounds 0: at least 1"),
    ],
)
def test_wrong_options_are_named(flags, complaint):
    done = compare(*flags)
    assert done.returncode == 2
    assert complaint in done.stderr


def test_every_peer_has_its_runner_and_a_command_that_installs_it():
    from peers.catalogue import OURS_FORMS, PEERS
    from peers.sides import HERE

    for name, peer in PEERS.items():
        assert (HERE / peer.runner).is_file()
        assert set(peer.model_forms) <= set(OURS_FORMS)
        assert f"pip install {peer.pip}" in peer.advice()
        assert f"--python {name}=" in peer.advice()
