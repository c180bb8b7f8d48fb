"""Reads back out of a Chrome trace what `serve --trace` wrote: steps, KV loads, requests' lives."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twostroke.errors import ConfigError
from twostroke.messages import StepSample

_WORK = ("num_tokens", "num_rows", "num_sampled", "context_tokens", "attended_tokens")
_ENGINE = re.compile(r"engine core (\d+)")


@dataclass(frozen=True)
class TracedStep:
    """A step of an engine that ran rows, on the monotonic clock."""

    engine: int
    start_s: float
    end_s: float
    sample: StepSample


@dataclass(frozen=True)
class TracedLoad:
    """KV that an engine has read from another; no error among them."""

    engine: int
    start_s: float
    end_s: float
    num_bytes: int
    num_messages: int


@dataclass(frozen=True)
class TracedRead:
    """A part of a load: what was read for one ticket, without a pause."""

    engine: int
    load: str
    start_s: float
    end_s: float
    num_bytes: int


@dataclass(frozen=True)
class TracedInterval:
    """An interval of the ledger of a request, named in lower case."""

    request: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Trace:
    """All steps that ran rows, and all loads, by their start; and when messages reached engines.

    `reads` are the parts of the loads, and `intervals` those of all requests, by their start.
    """

    steps: list[TracedStep]
    loads: list[TracedLoad]
    inputs_s: list[float]
    reads: list[TracedRead] = field(default_factory=list)
    intervals: list[TracedInterval] = field(default_factory=list)


def read_trace(path: Path) -> Trace:
    """Read a trace, one that was cut short too.

    Raises ConfigError when the file cannot be read, or holds no step with its work.
    """
    try:
        with path.open() as file:
            events = list(_events(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from None
    engines: dict[int, int] = {}
    for event in events:
        match = _ENGINE.fullmatch(str(_arguments(event).get("name")))
        if event.get("name") == "process_name" and match:
            engines[_pid(event)] = int(match[1])
    steps = [
        step
        for event in events
        if _pid(event) in engines and (step := _step(event, engines[_pid(event)]))
    ]
    if not steps:
        raise ConfigError(
            f"{path} holds no step with what it did", hint="record one: twostroke serve --trace"
        )
    loads = [
        load
        for event in events
        if _pid(event) in engines and (load := _load(event, engines[_pid(event)]))
    ]
    inputs_s = [
        float(event["ts"]) / 1e6
        for event in events
        if _pid(event) in engines and event.get("name") == "decode" and "ts" in event
    ]
    reads = [
        read
        for event in events
        if _pid(event) in engines and (read := _read(event, engines[_pid(event)]))
    ]
    return Trace(
        sorted(steps, key=_start_s),
        sorted(loads, key=_start_s),
        sorted(inputs_s),
        sorted(reads, key=_start_s),
        sorted(_intervals(events), key=_start_s),
    )


def _start_s(item: TracedStep | TracedLoad | TracedRead | TracedInterval) -> float:
    return item.start_s


def _intervals(events: Iterable[dict[str, Any]]) -> Iterable[TracedInterval]:
    """Each request is a track of the process that is called `requests`."""
    processes: set[int] = set()
    tracks: dict[tuple[int, object], str] = {}
    for event in events:
        pid, track = _pid(event), event.get("tid")
        if event.get("ph") == "M":
            named = str(_arguments(event).get("name"))
            if event.get("name") == "process_name" and named == "requests":
                processes.add(pid)
            elif event.get("name") == "thread_name" and pid in processes:
                tracks[pid, track] = named
        elif (pid, track) in tracks and (times_s := _times_s(event)) is not None:
            yield TracedInterval(tracks[pid, track], str(event.get("name")), *times_s)


def _times_s(event: dict[str, Any]) -> tuple[float, float] | None:
    try:
        start_s = float(event["ts"]) / 1e6
        return start_s, start_s + float(event["dur"]) / 1e6
    except (KeyError, TypeError, ValueError):
        return None


def _events(lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    """The writer puts one event on each line, so a line is whole or the last."""
    for line in lines:
        text = line.strip().rstrip(",")
        if not text.startswith("{"):
            continue
        try:
            event = json.loads(text)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def _pid(event: dict[str, Any]) -> int:
    pid = event.get("pid")
    return pid if isinstance(pid, int) else -1


def _arguments(event: dict[str, Any]) -> dict[str, Any]:
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}


def _step(event: dict[str, Any], engine: int) -> TracedStep | None:
    arguments, name = _arguments(event), event.get("name")
    if not (isinstance(name, str) and name.startswith("step ")):
        return None
    try:
        work = [int(arguments[key]) for key in _WORK]
        start_s, seconds = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6
    except (KeyError, TypeError, ValueError):  # a step without rows says nothing of its work
        return None
    if work[0] <= 0 or seconds <= 0:
        return None
    sample = StepSample(
        num_tokens=work[0],
        num_rows=work[1],
        num_sampled=work[2],
        context_tokens=work[3],
        attended_tokens=work[4],
        seconds=seconds,
    )
    return TracedStep(engine, start_s, start_s + seconds, sample)


def _load(event: dict[str, Any], engine: int) -> TracedLoad | None:
    arguments, name = _arguments(event), event.get("name")
    if not (isinstance(name, str) and name.startswith("load ")):
        return None
    try:
        start_s, seconds = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6
        sizes = int(arguments["bytes"]), int(arguments["messages"])
    except (KeyError, TypeError, ValueError):
        return None
    return TracedLoad(engine, start_s, start_s + seconds, *sizes)


def _read(event: dict[str, Any], engine: int) -> TracedRead | None:
    name, num_bytes = event.get("name"), _arguments(event).get("bytes")
    times_s = _times_s(event)
    if not (isinstance(name, str) and name.startswith("read ")):
        return None
    if times_s is None or not isinstance(num_bytes, int):
        return None
    return TracedRead(engine, name.removeprefix("read "), *times_s, num_bytes)
