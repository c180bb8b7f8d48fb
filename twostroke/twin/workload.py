"""What requests come when: columns of arrivals, lengths and contents, from a spec or a file.

    poisson:65/s,in=8192,out=1024,n=325          one request after another, at random
    gamma:10/s,cv=3,in=lognormal(2000,1.5),...   bursty; lengths from a distribution
    burst:10/s,size=20,...                       20 at once, every 2 s on average
    constant:2/s,turns=5,gap=10,...              sessions of 5 turns, 10 s between answer and turn

A prompt is a list of (value, count) pairs: `count` tokens of the id `value`. That says all that a
prefix cache can see, since blocks are equal exactly where the values are, and takes next to no
memory. Everything follows from the seed.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from twostroke.arrays import Float64s, Int32s, Int64s
from twostroke.bench.workload import arrival_offsets_s
from twostroke.errors import ConfigError
from twostroke.twin.prompt import Prompt, prompt_of

MAX_REQUESTS = 10_000_000
MAX_TOKENS = 1 << 24  # of one prompt or answer
_KINDS = ("poisson", "constant", "gamma", "burst")


@dataclass(frozen=True, eq=False)
class Workload:
    """n requests in columns, in order of arrival.

    The prompt of request i is pieces piece_starts[i] to piece_starts[i + 1] of `values` and
    `counts`. A request with after[i] >= 0 is the next turn of that one: it arrives `gap_s[i]` after
    that has ended, but not before arrival_s[i]. `intervals` are those of a recorded run, by name.
    """

    name: str
    arrival_s: Float64s
    prompt_tokens: Int32s
    output_tokens: Int32s
    values: Int32s
    counts: Int32s
    piece_starts: Int64s
    after: Int32s
    gap_s: Float64s
    intervals: dict[str, Float64s] = field(default_factory=dict)
    output_values: Int32s | None = None  # [n] the id that an answer repeats; default: unique ones

    def __len__(self) -> int:
        return len(self.arrival_s)

    def prompt(self, index: int) -> Prompt:
        """Token ids of one prompt."""
        start, end = self.piece_starts[index], self.piece_starts[index + 1]
        return prompt_of(self.values[start:end], self.counts[start:end])

    def output_value(self, index: int) -> int:
        """The token id that the answer consists of."""
        if self.output_values is not None:
            return int(self.output_values[index])
        return self.first_output_value + index

    @cached_property
    def first_output_value(self) -> int:
        return int(self.values.max(initial=0)) + 1

    def head(self, count: int) -> "Workload":
        """The first `count` requests."""
        if count >= len(self):
            return self
        end = int(self.piece_starts[count])
        own = self.output_values
        if own is None:
            own = np.arange(count, dtype=np.int32) + np.int32(self.first_output_value)
        return Workload(
            self.name,
            self.arrival_s[:count],
            self.prompt_tokens[:count],
            self.output_tokens[:count],
            self.values[:end],
            self.counts[:end],
            self.piece_starts[: count + 1],
            self.after[:count],
            self.gap_s[:count],
            {name: column[:count] for name, column in self.intervals.items()},
            own[:count],
        )

    def scaled(self, factor: float) -> "Workload":
        """The same requests, `factor` times as fast."""
        return Workload(
            self.name,
            self.arrival_s / factor,
            self.prompt_tokens,
            self.output_tokens,
            self.values,
            self.counts,
            self.piece_starts,
            self.after,
            self.gap_s / factor,
            self.intervals,
            self.output_values,
        )


def of_columns(
    name: str,
    arrival_s: Float64s,
    prompt_tokens: Int32s,
    output_tokens: Int32s,
    *,
    shared_tokens: Int32s | None = None,
    shared_values: Int32s | None = None,
) -> Workload:
    """Requests whose prompts share nothing but the first shared_tokens[i], the same for each
    value of shared_values[i] (those prompts are at least one token longer)."""
    order = np.argsort(arrival_s, kind="stable")
    n = len(order)
    prompt_tokens, output_tokens = prompt_tokens[order], output_tokens[order]
    if shared_tokens is None or shared_values is None:
        values, counts = np.arange(n, dtype=np.int32), prompt_tokens
        starts = np.arange(n + 1, dtype=np.int64)
    else:
        shared = np.minimum(shared_tokens[order], prompt_tokens - 1)
        own = np.arange(n, dtype=np.int32) + np.int32(shared_values.max(initial=0) + 1)
        values = np.stack((shared_values[order], own), axis=1).reshape(-1)
        counts = np.stack((shared, prompt_tokens - shared), axis=1).reshape(-1)
        starts = 2 * np.arange(n + 1, dtype=np.int64)
    return Workload(
        name,
        arrival_s[order],
        prompt_tokens,
        output_tokens,
        values.astype(np.int32),
        counts.astype(np.int32),
        starts,
        np.full(n, -1, np.int32),
        np.zeros(n),
    )


# ---------------------------------------------------------------- specs


Draw = Callable[[np.random.Generator, int], Float64s]


def _uniform(low: float, high: float) -> Draw:
    return lambda rng, n: rng.uniform(low, high, n)


def _lognormal(mean: float, cv: float) -> Draw:
    """By mean and coefficient of variation, which people know, not by those of the logarithm."""
    variance = math.log1p(cv * cv)
    return lambda rng, n: rng.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), n)


def _exponential(mean: float) -> Draw:
    return lambda rng, n: rng.exponential(mean, n)


def _normal(mean: float, deviation: float) -> Draw:
    return lambda rng, n: rng.normal(mean, deviation, n)


def _fixed(value: float) -> Draw:
    return lambda rng, n: np.full(n, value)


_DISTRIBUTIONS: dict[str, tuple[Callable[..., Draw], str]] = {
    "fixed": (_fixed, "fixed(value)"),
    "uniform": (_uniform, "uniform(low,high)"),
    "lognormal": (_lognormal, "lognormal(mean,cv)"),
    "exponential": (_exponential, "exponential(mean)"),
    "normal": (_normal, "normal(mean,deviation)"),
}


@dataclass(frozen=True)
class _Spec:
    """A spec's text, taken apart; every complaint names the field."""

    text: str
    kind: str
    rate: float
    fields: dict[str, str]

    def error(self, name: str, problem: str, hint: str = "") -> ConfigError:
        return ConfigError(f"workload {self.text!r}: {name} {problem}", hint=hint)

    def number(self, name: str, default: float | None = None, *, least: float = 0.0) -> float:
        text = self.fields.get(name)
        if text is None:
            if default is None:
                raise self.error(name, "is missing", f"write {name}=...")
            return default
        value = _number(text.removesuffix("s"))
        if value is None or not least <= value < math.inf:
            raise self.error(name, f"is {text!r}; it must be a number of at least {least:g}")
        return value

    def whole(self, name: str, default: int | None = None, *, most: int = MAX_REQUESTS) -> int:
        value = self.number(name, default, least=1)
        if value != int(value) or value > most:
            raise self.error(name, f"is {value:g}; it must be a whole number up to {most:,}")
        return int(value)

    def lengths(self, name: str, rng: np.random.Generator, count: int) -> Int32s:
        """Token counts: a number, or a distribution with its parameters."""
        text = self.fields.get(name)
        if text is None:
            raise self.error(name, "is missing", f"write {name}=1024 or {name}=lognormal(1024,1)")
        drawn = np.clip(np.rint(self._draw(name, text)(rng, count)), 1, MAX_TOKENS)
        return drawn.astype(np.int32)

    def _draw(self, name: str, text: str) -> Draw:
        if (value := _number(text)) is not None:
            if not 1 <= value <= MAX_TOKENS:
                raise self.error(name, f"is {text}; it must be from 1 to {MAX_TOKENS:,} tokens")
            return _fixed(value)
        match = re.fullmatch(r"(\w+)\(([^()]*)\)", text)
        make, usage = _DISTRIBUTIONS.get(match[1] if match else "", (None, ""))
        if match is None or make is None:
            choices = ", ".join(usage for _, usage in _DISTRIBUTIONS.values())
            raise self.error(name, f"is {text!r}; it must be a number or one of {choices}")
        numbers = [_number(part) for part in match[2].split(",")]
        known = [value for value in numbers if value is not None and 0 <= value < math.inf]
        if len(known) != len(numbers) or len(known) != usage.count(",") + 1:
            raise self.error(name, f"is {text!r}; it must be {usage}, with numbers from 0 on")
        if match[1] == "lognormal" and known[0] <= 0:
            raise self.error(name, f"is {text!r}; the mean must be over 0")
        if match[1] == "uniform" and known[0] > known[1]:
            raise self.error(name, f"is {text!r}; low must not be over high")
        return make(*known)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _split(text: str) -> list[str]:
    """At commas outside parentheses."""
    return [part.strip() for part in re.split(r",(?![^(]*\))", text)]


_FIELDS = ("in", "out", "n", "duration", "cv", "size", "prefix", "prefixes", "turns", "gap")


def _parse(text: str) -> _Spec:
    kind, _, rest = text.partition(":")
    head, *others = _split(rest)
    fields: dict[str, str] = {}
    for part in others:
        name, equals, value = part.partition("=")
        if name not in _FIELDS or not equals:
            raise ConfigError(
                f"workload {text!r}: {part!r} is unknown; fields: {', '.join(_FIELDS)}",
                hint="as in poisson:65/s,in=8192,out=1024,n=325",
            )
        if name in fields:
            raise ConfigError(f"workload {text!r}: {name} is given twice")
        fields[name] = value
    rate = _number(head.removesuffix("/s"))
    if rate is None or not rate > 0:
        raise ConfigError(
            f"workload {text!r}: the rate is {head!r}; it must be a number over 0, or inf",
            hint="as in poisson:65/s,in=8192,out=1024,n=325",
        )
    for name, only in (("cv", "gamma"), ("size", "burst")):
        if name in fields and kind != only:
            raise ConfigError(f"workload {text!r}: {name} is for {only}, not for {kind}")
    return _Spec(text, kind, rate, fields)


def from_spec(text: str, *, seed: int = 0) -> Workload:
    """The workload of a spec. ConfigError names the field that is wrong."""
    spec = _parse(text)
    if ("n" in spec.fields) == ("duration" in spec.fields):
        raise spec.error("n", "or duration must be given, and not both", "as n=325")
    if "n" in spec.fields:
        sessions = spec.whole("n")
    elif math.isinf(spec.rate):
        raise spec.error("duration", "needs a finite rate", "give n= instead")
    else:
        sessions = max(1, round(spec.rate * spec.number("duration", least=1e-9)))
    if sessions > MAX_REQUESTS:
        raise spec.error("n", f"is {sessions:,}; limit: {MAX_REQUESTS:,} requests")
    turns = spec.whole("turns", 1)
    if sessions * turns > MAX_REQUESTS:
        raise spec.error("turns", f"make {sessions * turns:,} requests; limit: {MAX_REQUESTS:,}")
    rng = np.random.Generator(np.random.PCG64(seed))
    arrivals = _arrivals(spec, sessions, seed)
    prompts = spec.lengths("in", rng, sessions * turns)
    outputs = spec.lengths("out", rng, sessions * turns)
    if turns > 1:
        return _sessions(spec, arrivals, prompts.reshape(-1, turns), outputs.reshape(-1, turns))
    if "gap" in spec.fields:
        raise spec.error("gap", "is the time between turns", "give turns= too")
    if "prefix" not in spec.fields:
        if "prefixes" in spec.fields:
            raise spec.error("prefixes", "is the number of shared prefixes", "give prefix= too")
        return of_columns(text, arrivals, prompts, outputs)
    # As in vLLM's random data set, the shared prefix comes on top.
    shared = spec.lengths("prefix", rng, sessions)
    families = rng.integers(0, spec.whole("prefixes", 1), sessions).astype(np.int32)
    return of_columns(
        text, arrivals, prompts + shared, outputs, shared_tokens=shared, shared_values=families
    )


def _arrivals(spec: _Spec, count: int, seed: int) -> Float64s:
    """Seconds from the start; the last is at count / rate, as `bench serve` sends them."""
    if spec.kind == "burst":
        size = spec.whole("size")
        groups = -(-count // size)
        starts = arrival_offsets_s(groups, request_rate=spec.rate / size, burstiness=1.0, seed=seed)
        return np.repeat(np.array(starts), size)[:count]
    burstiness = {"poisson": 1.0, "constant": math.inf}.get(spec.kind)
    if burstiness is None:
        burstiness = 1 / spec.number("cv", least=1e-3) ** 2
    offsets = arrival_offsets_s(count, request_rate=spec.rate, burstiness=burstiness, seed=seed)
    return np.array(offsets)


def _sessions(spec: _Spec, arrivals: Float64s, new: Int32s, outputs: Int32s) -> Workload:
    """Turn t's prompt: all before it (prompts and answers), then new[., t] tokens.

    Until they begin, later turns are known only by what they come after: they are sorted by their
    session's start and turn.
    """
    sessions, turns = new.shape
    if "prefix" in spec.fields or "prefixes" in spec.fields:
        raise spec.error("prefix", "and turns cannot be combined")
    n = sessions * turns
    gap_s = spec.number("gap", 0.0)
    index = np.arange(n).reshape(sessions, turns)
    questions, answers = index.astype(np.int32), (n + index).astype(np.int32)
    lengths = np.cumsum(new + outputs, axis=1) - outputs
    if int(lengths.max()) > MAX_TOKENS:
        raise spec.error("turns", f"make a prompt of {int(lengths.max()):,} tokens")
    values, counts = [], []
    for turn in range(turns):
        # question 0, answer 0, ... answer turn - 1, question turn
        both = np.stack((questions, answers), axis=2).reshape(sessions, 2 * turns)
        sizes = np.stack((new, outputs), axis=2).reshape(sessions, 2 * turns)
        values.append(both[:, : 2 * turn + 1])
        counts.append(sizes[:, : 2 * turn + 1])
    pieces = np.concatenate(values, axis=1), np.concatenate(counts, axis=1)
    per_request = np.tile(2 * np.arange(turns) + 1, sessions)
    first = np.arange(turns) == 0
    return Workload(
        spec.text,
        np.repeat(arrivals, turns),
        lengths.reshape(-1).astype(np.int32),
        outputs.reshape(-1),
        pieces[0].reshape(-1),
        pieces[1].reshape(-1),
        np.concatenate(([0], np.cumsum(per_request))).astype(np.int64),
        np.where(first, -1, index - 1).reshape(-1).astype(np.int32),
        np.where(first, 0.0, np.full(index.shape, gap_s)).reshape(-1),
        output_values=answers.reshape(-1),
    )


def load(
    text: str, *, seed: int = 0, num_requests: int | None = None, speed: float = 1.0
) -> Workload:
    """A workload from a spec or from a file of one of the formats of `traces`.

    At most `num_requests`, `speed` times as fast. Raises ConfigError.
    """
    if not 0 < speed < math.inf:
        raise ConfigError(f"the speed of a workload is {speed}; it must be over 0")
    if num_requests is not None and num_requests < 1:
        raise ConfigError(f"{num_requests} requests of a workload are asked for; at least 1")
    if text.partition(":")[0] in _KINDS:
        workload = from_spec(text, seed=seed)
    else:
        from twostroke.twin.traces import read

        workload = read(Path(text), seed=seed, num_requests=num_requests)
    if num_requests is not None:
        workload = workload.head(num_requests)
    return workload if speed == 1.0 else workload.scaled(speed)


def concatenate_pieces(pieces: Sequence[tuple[Int32s, Int32s]]) -> tuple[Int32s, Int32s, Int64s]:
    """`values`, `counts` and `piece_starts` of prompts given one by one."""
    sizes = [len(values) for values, _ in pieces]
    starts = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    if not pieces:
        return np.empty(0, np.int32), np.empty(0, np.int32), starts
    values = np.concatenate([values for values, _ in pieces]).astype(np.int32)
    counts = np.concatenate([counts for _, counts in pieces]).astype(np.int32)
    return values, counts, starts
