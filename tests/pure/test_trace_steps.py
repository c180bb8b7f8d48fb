"""Steps come back out of a trace, cut short or mixed with other events, or it is refused."""

from pathlib import Path

import pytest

from twostroke import trace
from twostroke.errors import ConfigError
from twostroke.trace import Tracer
from twostroke.trace_steps import TracedInterval, TracedRead, read_trace


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Steps of an engine, one of them without rows, among other spans."""
    path = tmp_path / "trace.json"
    trace.begin(path)
    core = Tracer(path, "engine core 3")
    core.span("main", "plan 1", 0.5, 0.6, requests=1, tokens=9)
    core.span("input", "decode", 0.4, 0.41, bytes=200)
    work = {"num_tokens": 9, "num_rows": 2, "num_sampled": 1}
    work |= {"context_tokens": 40, "attended_tokens": 123}
    core.span("worker", "step 2", 2.0, 2.25, **work)
    core.span("worker", "step 1", 1.0, 1.5, **work)
    core.span("worker", "step 3", 3.0, 3.1)
    core.span("kv", "load 7", 2.5, 2.75, bytes=1000, messages=4)
    core.span("kv", "load 8", 2.5, 2.75)
    core.span("kv reads", "read 7", 2.5, 2.625, bytes=600)
    core.span("kv reads", "read 8", 2.7, 2.75)
    core.flush()
    monkeypatch.setattr("os.getpid", lambda: 1)
    requests = Tracer(path, "requests")
    requests.span("cmpl-1 0", "queue", 0.25, 0.5)
    requests.span("cmpl-1 0", "frontend", 0.125, 0.25)
    requests.flush()
    return path


def test_steps_of_a_trace_that_is_cut_short(path: Path) -> None:
    trace = read_trace(path)
    (first, second), (load,) = trace.steps, trace.loads
    assert trace.inputs_s == [0.4]
    assert (first.engine, first.start_s, first.end_s) == (3, 1.0, 1.5)
    assert (second.start_s, second.end_s) == (2.0, 2.25)
    assert second.sample.attended_tokens == 123
    assert second.sample.seconds == pytest.approx(0.25)
    assert (load.engine, load.end_s, load.num_bytes, load.num_messages) == (3, 2.75, 1000, 4)
    assert trace.reads == [TracedRead(3, "7", 2.5, 2.625, 600)]
    assert trace.intervals == [
        TracedInterval("cmpl-1 0", "frontend", 0.125, 0.25),
        TracedInterval("cmpl-1 0", "queue", 0.25, 0.5),
    ]
    with path.open("a") as file:
        file.write('{"pid": 1, "name": "step 4", "ts"')
    assert len(read_trace(path).steps) == 2


def test_steps_of_a_finished_trace(path: Path) -> None:
    trace.finish(path)
    assert len(read_trace(path).steps) == 2


@pytest.mark.parametrize("text", ["", "[\n", '{"pid": []}\n[1]\n{"args": 3, "name": "step 1"}\n'])
def test_what_holds_no_step(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="no step"):
        read_trace(path)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "binary")
