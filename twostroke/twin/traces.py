"""Workloads from files. The format is told by the file's name and its first line.

    *.jsonl      `hash_ids`       Mooncake: ids of 512-token blocks, equal where prefixes are equal
                 `prompt_tokens`  our own ledger of a recorded run (`Recorded`)
                 `input_toks`     requests of a vLLM run as LLMServingSim records them
    *.csv        `ContextTokens`  Azure: arrival, prompt and output tokens
    *.csv(.gz)   `session`        sessions of agents: turns, and how much of each prompt was seen
    *.tar.gz     chunk-*.json/csv ServeGen: rates and lengths of clients, by the time of day

A file name may be followed by options, as in `sessions.csv.gz,rate=0.1/s`: `rate` (sessions begin,
or for ServeGen requests come, at that rate), and for ServeGen `start` and `duration` in seconds.
Every complaint names the file, the line and the field.
"""

import csv
import datetime
import gzip
import io
import math
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec
import numpy as np

from twostroke.bench.workload import arrival_offsets_s
from twostroke.errors import ConfigError
from twostroke.ledger_file import BlockId, Outputs, Recorded, Time, Tokens
from twostroke.twin.servegen import Span, read_servegen
from twostroke.twin.workload import MAX_REQUESTS, Workload, concatenate_pieces, of_columns

MOONCAKE_BLOCK_TOKENS = 512

_Row = TypeVar("_Row")


class MooncakeRow(msgspec.Struct):
    """A line of Mooncake's traces: `timestamp` in ms, a block id for each 512 tokens begun."""

    timestamp: Time
    input_length: Tokens
    output_length: Outputs
    hash_ids: list[BlockId]


class VllmRow(msgspec.Struct):
    """A request of LLMServingSim's recorded vLLM runs; `arrival_time` in s, any origin."""

    input_toks: Tokens
    output_toks: Outputs
    arrival_time: Time


def read(text: Path, *, seed: int = 0, num_requests: int | None = None) -> Workload:
    """Read a workload. Raises ConfigError."""
    options = _options(text)
    path = options.path
    if not path.is_file():
        raise ConfigError(
            f"workload {str(text)!r} is no file, and no spec",
            hint="give a file, or a spec as poisson:65/s,in=8192,out=1024,n=325",
        )
    try:
        if path.name.endswith((".tar.gz", ".tgz")):
            return read_servegen(options, seed)
        with _open(path) as file:
            first = file.readline()
            file.seek(0)
            if first.lstrip().startswith("{"):
                return _json_lines(path, first, file, num_requests)
            names = [name.strip() for name in first.split(",")]
            if "ContextTokens" in names:
                return _azure(path, file, num_requests)
            if "session" in names:
                return _sessions(options, file, seed, num_requests)
    except (OSError, UnicodeDecodeError, EOFError, tarfile.TarError) as error:
        raise ConfigError(f"cannot read the workload {path}: {error}") from None
    raise ConfigError(
        f"{path}: line 1 is of no known format: {first[:60]!r}",
        hint="known: Mooncake, Azure, sessions, ServeGen, a ledger of ours, vLLM requests",
    )


def _options(text: Path) -> Span:
    name, *parts = str(text).split(",")
    values: dict[str, float] = {}
    for part in parts:
        key, _, value = part.strip().partition("=")
        try:
            number = float(value.removesuffix("/s").removesuffix("s"))
        except ValueError:
            number = math.nan
        if key not in ("rate", "start", "duration"):
            raise ConfigError(f"workload {str(text)!r}: {part!r}; options: rate, start, duration")
        if not 0 <= number < math.inf or (number == 0 and key != "start"):
            raise ConfigError(f"workload {str(text)!r}: {key} is {value!r}; it must be over 0")
        values[key] = number
    return Span(
        Path(name), values.get("rate"), values.get("start", 0.0), values.get("duration", 600.0)
    )


def _open(path: Path) -> IO[str]:
    if path.name.endswith(".gz"):
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _bad(path: Path, line: int, problem: object) -> ConfigError:
    return ConfigError(f"{path}, line {line}: {problem}")


# ---------------------------------------------------------------- JSON lines


def _json_lines(path: Path, first: str, file: IO[str], most: int | None) -> Workload:
    if '"hash_ids"' in first:
        return _mooncake(path, list(_rows(path, file, MooncakeRow, most)))
    if '"input_toks"' in first:
        return _vllm(path, list(_rows(path, file, VllmRow, most)))
    return _recorded(path, list(_rows(path, file, Recorded, most)))


def _rows(path: Path, file: IO[str], kind: type[_Row], most: int | None) -> Iterator[_Row]:
    decode = msgspec.json.Decoder(kind).decode
    most = MAX_REQUESTS if most is None else most
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        if most == 0:
            return
        most -= 1
        try:
            yield decode(line)
        except msgspec.DecodeError as error:  # it names the field
            raise _bad(path, number, error) from None


def _of_blocks(
    path: Path,
    arrivals: Sequence[float],
    prompts: Sequence[int],
    outputs: Sequence[int],
    blocks: Sequence[Sequence[int]],
    block_tokens: Sequence[int],
) -> Workload:
    """Requests whose prompts are given by the ids of their blocks (or by none: all their own)."""
    own = 1 + max((max(ids, default=0) for ids in blocks), default=0)
    pieces = []
    for line, (prompt, ids, size) in enumerate(zip(prompts, blocks, block_tokens, strict=True), 1):
        if not ids:
            pieces.append((np.array([own], np.int32), np.array([prompt], np.int32)))
            own += 1
            continue
        if len(ids) != -(-prompt // size):
            raise _bad(
                path, line, f"{len(ids)} block ids for {prompt} tokens; one for each {size} begun"
            )
        counts = np.full(len(ids), size, np.int32)
        counts[-1] = prompt - size * (len(ids) - 1)
        pieces.append((np.array(ids, np.int32), counts))
    order = np.argsort(np.array(arrivals), kind="stable")
    values, counts, starts = concatenate_pieces([pieces[i] for i in order.tolist()])
    n = len(order)
    at = np.array(arrivals, np.float64)[order]
    return Workload(
        path.name,
        at - at.min(initial=math.inf if n else 0.0),
        np.array(prompts, np.int32)[order],
        np.maximum(np.array(outputs, np.int32)[order], 1),
        values,
        counts,
        starts,
        np.full(n, -1, np.int32),
        np.zeros(n),
    )


def _mooncake(path: Path, rows: list[MooncakeRow]) -> Workload:
    return _of_blocks(
        path,
        [row.timestamp / 1000 for row in rows],
        [row.input_length for row in rows],
        [row.output_length for row in rows],
        [row.hash_ids for row in rows],
        [MOONCAKE_BLOCK_TOKENS] * len(rows),
    )


def _vllm(path: Path, rows: list[VllmRow]) -> Workload:
    arrivals = np.array([row.arrival_time for row in rows])
    return of_columns(
        path.name,
        arrivals - arrivals.min(),
        np.array([row.input_toks for row in rows], np.int32),
        np.maximum(np.array([row.output_toks for row in rows], np.int32), 1),
    )


def _recorded(path: Path, rows: list[Recorded]) -> Workload:
    rows.sort(key=lambda row: row.arrival_s)
    workload = _of_blocks(
        path,
        [row.arrival_s for row in rows],
        [row.prompt_tokens for row in rows],
        [row.output_tokens for row in rows],
        [row.block_ids for row in rows],
        [row.block_tokens for row in rows],
    )
    names = dict.fromkeys(name for row in rows for name in row.intervals)
    for name in names:
        workload.intervals[name] = np.array([row.intervals.get(name, 0.0) for row in rows])
    return workload


# ---------------------------------------------------------------- tables


class _Cells:
    """One line of a table; every complaint names its line and column."""

    def __init__(self, path: Path, line: int, row: dict[str, Any]) -> None:
        self._path, self._line, self._row = path, line, row

    def text(self, name: str) -> str:
        value = self._row.get(name)
        if value is None:
            raise _bad(self._path, self._line, f"{name} is missing")
        return str(value)

    def number(self, name: str) -> float:
        text = self.text(name)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value <= 1e12:
            raise _bad(self._path, self._line, f"{name} is {text[:40]!r}; it must be a number >= 0")
        return value

    def tokens(self, name: str, *, least: int = 1) -> int:
        value = self.number(name)
        if value != int(value) or not least <= value <= 1 << 24:
            raise _bad(
                self._path,
                self._line,
                f"{name} is {value:g}; it must be a whole number from {least} to {1 << 24:,}",
            )
        return int(value)


def _table(path: Path, file: IO[str], most: int | None) -> Iterator[_Cells]:
    for number, row in enumerate(csv.DictReader(file), 2):
        if most is not None and number - 2 >= most:
            return
        yield _Cells(path, number, row)


def _azure(path: Path, file: IO[str], most: int | None) -> Workload:
    arrivals, prompts, outputs = [], [], []
    for number, cells in enumerate(_table(path, file, most), 2):
        text = cells.text("TIMESTAMP")
        try:
            # Seven digits of fraction; Python reads six.
            arrivals.append(datetime.datetime.fromisoformat(text[:26]).timestamp())
        except ValueError:
            raise _bad(
                path, number, f"TIMESTAMP is {text[:40]!r}; as 2023-11-16 18:17:03"
            ) from None
        prompts.append(cells.tokens("ContextTokens"))
        outputs.append(cells.tokens("GeneratedTokens", least=0))
    at = np.array(arrivals)
    return of_columns(
        path.name,
        at - at.min(initial=math.inf if len(at) else 0.0),
        np.array(prompts, np.int32),
        np.maximum(np.array(outputs, np.int32), 1),
    )


@dataclass
class _Turn:
    """A turn of a session, with the whole context that it leaves: (value, count) pieces."""

    start_s: float
    prompt: list[tuple[int, int]]
    output_tokens: int
    context: list[tuple[int, int]]
    context_tokens: int


def _sessions(options: Span, file: IO[str], seed: int, most: int | None) -> Workload:
    """Sessions begin at `rate` (all at once without one); a turn waits for the one before it.

    Within a session the recorded times hold, unless the turn before has not ended by then. What a
    prompt has in common with the session so far (`reusable_prefix_tokens`) it shares with the
    latest context that is long enough, answers included.
    """
    path = options.path
    sessions: dict[str, list[_Turn]] = {}
    value = 0
    for number, cells in enumerate(_table(path, file, most), 2):
        turns = sessions.setdefault(cells.text("session"), [])
        prompt_tokens = cells.tokens("input_tokens")
        reused = cells.tokens("reusable_prefix_tokens", least=0)
        if reused >= prompt_tokens:
            raise _bad(path, number, f"reusable_prefix_tokens is {reused} of {prompt_tokens}")
        base = next((turn for turn in reversed(turns) if turn.context_tokens >= reused), None)
        if reused and base is None:
            raise _bad(path, number, f"reusable_prefix_tokens is {reused}; no context is that long")
        prompt = _first_tokens(base.context if base else [], reused)
        prompt.append((value, prompt_tokens - reused))
        output_tokens = max(cells.tokens("output_tokens", least=0), 1)
        context = [*prompt, (value + 1, output_tokens)]
        start_s = cells.number("t_s")
        if turns and start_s < turns[-1].start_s:
            raise _bad(path, number, f"t_s is {start_s:g}; the turn before was later")
        turns.append(_Turn(start_s, prompt, output_tokens, context, prompt_tokens + output_tokens))
        value += 2
    starts = [0.0] * len(sessions)
    if options.rate is not None:
        starts = list(
            arrival_offsets_s(len(sessions), request_rate=options.rate, burstiness=1.0, seed=seed)
        )
    return _of_sessions(path.name, list(sessions.values()), starts)


def _first_tokens(pieces: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    taken = []
    for value, size in pieces:
        if count <= 0:
            break
        taken.append((value, min(size, count)))
        count -= size
    return taken


def _of_sessions(name: str, sessions: list[list[_Turn]], starts: list[float]) -> Workload:
    turns: list[_Turn] = []
    after: list[int] = []
    arrivals: list[float] = []
    for session, start_s in zip(sessions, starts, strict=True):
        for nth, turn in enumerate(session):
            after.append(len(turns) - 1 if nth else -1)
            arrivals.append(start_s + turn.start_s)
            turns.append(turn)
    order = np.argsort(np.array(arrivals), kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    previous = np.array(after, np.int64)[order]
    pieces = []
    for i in order.tolist():
        ids, sizes = zip(*turns[i].prompt, strict=True)
        pieces.append((np.array(ids, np.int32), np.array(sizes, np.int32)))
    values, counts, piece_starts = concatenate_pieces(pieces)
    return Workload(
        name,
        np.array(arrivals)[order],
        np.array([sum(size for _, size in turns[i].prompt) for i in order.tolist()], np.int32),
        np.array([turns[i].output_tokens for i in order.tolist()], np.int32),
        values,
        counts,
        piece_starts,
        np.where(previous >= 0, place[previous], -1).astype(np.int32),
        np.zeros(len(order)),
        output_values=np.array([turns[i].context[-1][0] for i in order.tolist()], np.int32),
    )
