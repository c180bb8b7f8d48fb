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
import json
import math
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

import msgspec
import numpy as np

from twostroke.arrays import Float64s, Int32s
from twostroke.bench.workload import arrival_offsets_s
from twostroke.errors import ConfigError
from twostroke.twin.workload import MAX_REQUESTS, Workload, concatenate_pieces, of_columns

MOONCAKE_BLOCK_TOKENS = 512

_Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
_Outputs = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 30)]
_Time = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_Row = TypeVar("_Row")


class MooncakeRow(msgspec.Struct):
    """A line of Mooncake's traces: `timestamp` in ms, a block id for each 512 tokens begun."""

    timestamp: _Time
    input_length: _Tokens
    output_length: _Outputs
    hash_ids: list[_Id]


class Recorded(msgspec.Struct, omit_defaults=True):
    """One request of a run of ours, measured or simulated.

    `block_ids`, if any, name each begun block of `block_tokens` prompt tokens, equal where prefixes
    are. `intervals` are the seconds of the ledger by interval, in lower case.
    """

    arrival_s: _Time
    prompt_tokens: _Tokens
    output_tokens: _Outputs
    block_tokens: _Tokens = 16
    block_ids: list[_Id] = []
    ttft_s: float | None = None
    e2e_s: float | None = None
    cached_tokens: int = 0
    num_preemptions: int = 0
    intervals: dict[str, float] = {}


class VllmRow(msgspec.Struct):
    """A request of LLMServingSim's recorded vLLM runs; `arrival_time` in s, any origin."""

    input_toks: _Tokens
    output_toks: _Outputs
    arrival_time: _Time


@dataclass(frozen=True)
class _Options:
    """What follows the file name."""

    path: Path
    rate: float | None = None
    start_s: float = 0.0
    duration_s: float = 600.0


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
            return _servegen(options, seed)
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


def _options(text: Path) -> _Options:
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
    return _Options(
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


def _sessions(options: _Options, file: IO[str], seed: int, most: int | None) -> Workload:
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


# ---------------------------------------------------------------- ServeGen


def _servegen(options: _Options, seed: int) -> Workload:
    """Clients of a ServeGen archive from `start` on for `duration`, at `rate` in sum.

    Each client is its own renewal process: in each window its rate, and gaps of the recorded
    distribution (Gamma or Weibull). Lengths come from the client's histograms of the hour.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    arrivals: list[Float64s] = []
    prompts: list[Int32s] = []
    outputs: list[Int32s] = []
    clients = list(_clients(options))
    recorded = sum(client.mean_rate for client in clients)
    if recorded <= 0:
        raise ConfigError(
            f"{options.path}: no client sends anything from {options.start_s:g} s on, "
            f"for {options.duration_s:g} s",
            hint="choose another start=",
        )
    scale = 1.0 if options.rate is None else options.rate / recorded
    for client in clients:
        at = client.arrivals(rng, scale)
        if not len(at):
            continue
        arrivals.append(at - options.start_s)
        prompts.append(client.lengths("input_tokens", rng, at))
        outputs.append(client.lengths("output_tokens", rng, at))
    if not arrivals:
        raise ConfigError(f"{options.path}: no request in {options.duration_s:g} s")
    return of_columns(
        options.path.name,
        np.concatenate(arrivals),
        np.concatenate(prompts),
        np.concatenate(outputs),
    )


@dataclass
class _Client:
    """A client in the chosen span: (begin, end, rate, gap maker) windows, and its histograms."""

    name: str
    windows: list[tuple[float, float, float, str, float]]
    histograms: dict[int, dict[str, Any]]
    span_s: float

    @property
    def mean_rate(self) -> float:
        return sum((end - begin) * rate for begin, end, rate, _, _ in self.windows) / self.span_s

    def arrivals(self, rng: np.random.Generator, scale: float) -> Float64s:
        times: list[Float64s] = []
        for begin, end, rate, kind, shape in self.windows:
            mean_s = 1 / (rate * scale)
            # Enough gaps to pass the end almost always; the rest of the window then stays empty.
            count = int((end - begin) / mean_s * 1.5) + 20
            if kind == "Weibull":
                gaps = rng.weibull(shape, count) * (mean_s / math.gamma(1 + 1 / shape))
            else:
                gaps = rng.gamma(shape, mean_s / shape, count)
            # A random part of a gap has passed when the window begins.
            gaps[0] *= rng.random()
            at = begin + np.cumsum(gaps)
            times.append(at[at < end])
        return np.concatenate(times) if times else np.empty(0)

    def lengths(self, name: str, rng: np.random.Generator, at: Float64s) -> Int32s:
        drawn = np.empty(len(at), np.int32)
        hours = np.array(sorted(self.histograms))
        chosen = hours[np.maximum(np.searchsorted(hours, at, side="right") - 1, 0)]
        for hour in np.unique(chosen).tolist():
            sizes, shares = _histogram(self.name, self.histograms[hour], name)
            rows = chosen == hour
            drawn[rows] = rng.choice(sizes, int(rows.sum()), p=shares)
        return np.clip(drawn, 1, 1 << 24)


def _clients(options: _Options) -> Iterator[_Client]:
    """Clients that send something in the span, in order of their numbers."""
    start_s, end_s = options.start_s, options.start_s + options.duration_s
    with tarfile.open(options.path) as archive:
        members = {m.name: m for m in archive.getmembers() if m.isfile()}
        numbered = sorted(
            (int(match[1]), name)
            for name in members
            if (match := re.search(r"chunk-(\d+)-trace\.csv$", name))
        )
        if not numbered:
            raise ConfigError(f"{options.path} has no chunk-*-trace.csv: it is none of ServeGen's")
        for _, name in numbered:
            windows = list(_windows(name, _read(archive, members[name]), start_s, end_s))
            if not windows:
                continue
            data_name = name.replace("-trace.csv", "-dataset.json")
            if data_name not in members:
                raise ConfigError(f"{options.path} has {name} but no {data_name}")
            try:
                hours = json.loads(_read(archive, members[data_name]))
                histograms = {int(hour): entry for hour, entry in hours.items()}
            except (ValueError, AttributeError):
                raise ConfigError(f"{data_name} of {options.path} is damaged") from None
            filled = {
                h: e for h, e in histograms.items() if e.get("input_tokens") not in (None, "{}")
            }
            if filled:
                yield _Client(data_name, windows, filled, options.duration_s)


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    file = archive.extractfile(member)
    assert file is not None, "directories were left out"
    return file.read().decode()


def _windows(
    name: str, text: str, start_s: float, end_s: float
) -> Iterator[tuple[float, float, float, str, float]]:
    """(begin, end, rate, distribution, shape) of the windows in a span in which anything comes."""
    rows = [row for row in csv.reader(io.StringIO(text)) if row]
    try:
        begins = [float(row[0]) for row in rows]
        for row, begin, following in zip(rows, begins, [*begins[1:], math.inf], strict=True):
            end = min(following, begin + 600.0)
            rate, kind = float(row[1]), row[3]
            if rate > 0 and kind and begin < end_s and end > start_s:
                shape = float(row[4])
                if shape > 0:
                    yield max(begin, start_s), min(end, end_s), rate, kind, shape
    except (ValueError, IndexError) as error:
        raise ConfigError(f"{name}: a line is no time, rate and distribution: {error}") from None


def _histogram(client: str, entry: dict[str, Any], name: str) -> tuple[Int32s, Float64s]:
    """Lengths and their shares, from text as {45: 0.009, 46: 0.011}."""
    pairs = re.findall(r"(\d+): ([0-9.eE+-]+)", str(entry.get(name, "")))
    try:
        sizes = np.array([int(size) for size, _ in pairs], np.int32)
        shares = np.array([float(share) for _, share in pairs])
    except ValueError:
        shares = np.empty(0)
    if not len(shares) or not shares.sum() > 0:
        raise ConfigError(f"{client}: {name} has no shares")
    return sizes, shares / shares.sum()
