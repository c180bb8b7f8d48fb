"""Workloads from ServeGen's archives: clients with rates and lengths, by the time of day."""

import csv
import io
import json
import math
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from twostroke.arrays import Float64s, Int32s
from twostroke.errors import ConfigError
from twostroke.twin.workload import Workload, of_columns


@dataclass(frozen=True)
class Span:
    """What is taken of an archive: requests from `start_s` on, at `rate` a second in sum."""

    path: Path
    rate: float | None = None
    start_s: float = 0.0
    duration_s: float = 600.0


def read_servegen(span: Span, seed: int) -> Workload:
    """Clients of a ServeGen archive from `start` on for `duration`, at `rate` in sum.

    Each client is its own renewal process: in each window its rate, and gaps of the recorded
    distribution (Gamma or Weibull). Lengths come from the client's histograms of the hour.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    arrivals: list[Float64s] = []
    prompts: list[Int32s] = []
    outputs: list[Int32s] = []
    clients = list(_clients(span))
    recorded = sum(client.mean_rate for client in clients)
    if recorded <= 0:
        raise ConfigError(
            f"{span.path}: no client sends anything from {span.start_s:g} s on, "
            f"for {span.duration_s:g} s",
            hint="choose another start=",
        )
    scale = 1.0 if span.rate is None else span.rate / recorded
    for client in clients:
        at = client.arrivals(rng, scale)
        if not len(at):
            continue
        arrivals.append(at - span.start_s)
        prompts.append(client.lengths("input_tokens", rng, at))
        outputs.append(client.lengths("output_tokens", rng, at))
    if not arrivals:
        raise ConfigError(f"{span.path}: no request in {span.duration_s:g} s")
    return of_columns(
        span.path.name,
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


def _clients(span: Span) -> Iterator[_Client]:
    """Clients that send something in the span, in order of their numbers."""
    start_s, end_s = span.start_s, span.start_s + span.duration_s
    with tarfile.open(span.path) as archive:
        members = {m.name: m for m in archive.getmembers() if m.isfile()}
        numbered = sorted(
            (int(match[1]), name)
            for name in members
            if (match := re.search(r"chunk-(\d+)-trace\.csv$", name))
        )
        if not numbered:
            raise ConfigError(f"{span.path} has no chunk-*-trace.csv: it is none of ServeGen's")
        for _, name in numbered:
            windows = list(_windows(name, _read(archive, members[name]), start_s, end_s))
            if not windows:
                continue
            data_name = name.replace("-trace.csv", "-dataset.json")
            if data_name not in members:
                raise ConfigError(f"{span.path} has {name} but no {data_name}")
            try:
                hours = json.loads(_read(archive, members[data_name]))
                histograms = {int(hour): entry for hour, entry in hours.items()}
            except (ValueError, AttributeError):
                raise ConfigError(f"{data_name} of {span.path} is damaged") from None
            filled = {
                h: e for h, e in histograms.items() if e.get("input_tokens") not in (None, "{}")
            }
            if filled:
                yield _Client(data_name, windows, filled, span.duration_s)


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
