"""Nine answers about a deployment, from a file or from what running engines tell.

a ledger (JSON lines), a twin's run, an observation (JSON)  ┐
a running twostroke server                                  ├─▶ Observation ─▶ nine verdicts
prefill and decode engines of vLLM                          ┘
"""

import json
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from twostroke.advice.figures import carried_per_s, request_s
from twostroke.advice.observation import FIELDS, UNKNOWN, Observation, from_dict, words
from twostroke.advice.verdict import Verdict, evidence, figure
from twostroke.advice.verdicts import judge
from twostroke.config_values import parse_rate
from twostroke.cost import StepWork
from twostroke.cost_profile import Profile
from twostroke.errors import ConfigError
from twostroke.kv.sizing import KvLayout
from twostroke.plan import ledger_observation, own_metrics, scrape, vllm_metrics
from twostroke.plan.question import parse_seconds, parse_slo
from twostroke.twin.models import find_shape

MAX_FILE_BYTES = 2 << 30
WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was seen, and the verdicts on it."""

    seen: Observation
    verdicts: list[Verdict]

    @property
    def text(self) -> str:
        """The first line is what to act on first; then what was seen, and each verdict."""
        head = [_headline(self.seen, self.verdicts), "", *_what_was_seen(self.seen), ""]
        return "\n".join([*head, *map(_paragraph, self.verdicts), "JSON: {json}"])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "answer": _headline(self.seen, self.verdicts),
            "verdicts": [
                {"number": it.number, "question": it.question, **asdict(it)} for it in self.verdicts
            ],
            "observation": self.seen.as_dict(),
        }


def diagnose(seen: Observation) -> Diagnosis:
    """Judge an observation."""
    return Diagnosis(seen=seen, verdicts=judge(seen))


# The order in which verdicts explain each other: a slow link makes D wait, and a full D blocks P.
_FIRST = (
    *("link_limit", "decode_waits", "decode_bound", "prefill_blocked", "ratio", "layout"),
    *("message_size", "append_on_decode", "move_prefix"),
)
_SATURATED = ("link_limit", "decode_waits", "decode_bound", "prefill_blocked")
_BUSY = 0.85  # of what the slower side carries, from which it binds


def _headline(seen: Observation, verdicts: Sequence[Verdict]) -> str:
    by_name = {it.name: it for it in verdicts}
    urgent = [by_name[name] for name in _FIRST if by_name[name].calls_for_action]
    unknown = sum(it.calls_for_action is None for it in verdicts)
    carried = carried_per_s(seen)
    if seen.requests_per_s == 0:
        return "no request ended while it was watched: watch it longer, or while requests come"
    if unknown == len(verdicts):
        return "nothing can be told from what was given"
    if urgent and urgent[0].name in _SATURATED:
        return textwrap.fill(f"{urgent[0].summary}; {urgent[0].action}", WIDTH)
    waits = _waits(seen)
    if seen.requests_per_s >= _BUSY * carried:
        said = f"near its limit: {seen.requests_per_s:.3g} req/s, of {carried:.3g} that it carries"
    elif waits:
        said = waits
    elif seen.requests_per_s < _BUSY * carried:
        said = f"nothing binds at {seen.requests_per_s:.3g} req/s, of {carried:.3g} that it carries"
    else:
        said = f"nothing binds ({unknown} of {len(verdicts)} questions could not be answered)"
    if urgent:
        said += f"; {urgent[0].summary}; {urgent[0].action}"
    return textwrap.fill(said, WIDTH)


_LONG, _NAMED = 0.2, 0.05  # of a request's time: waits worth a line, and each that it names


def _waits(seen: Observation) -> str:
    """What takes a request long without being work, if anything does."""
    total_s = request_s(seen)
    waits = {
        "in P's queue": seen.prefill_queue_s,
        "for what P keeps": seen.prefill_pin_wait_s,
        "for room on D": seen.room_wait_s,
        "for its transfer": seen.transfer_s,
        "in D's queue": seen.decode_queue_s,
        "preempted": seen.preempted_s,
    }
    if sum(spent for spent in waits.values() if spent == spent) < _LONG * total_s:
        return ""
    long = {name: spent for name, spent in waits.items() if spent >= _NAMED * total_s}
    told = [f"{figure(s, 's')} {name}" for name, s in sorted(long.items(), key=lambda it: -it[1])]
    return f"a request waits {' and '.join(told)}, of {figure(total_s, 's')} in all" if told else ""


def _what_was_seen(seen: Observation) -> list[str]:
    """Three rows, of what is known: the deployment, its load, and where a request's time goes."""
    engines = []
    if seen.num_prefill == seen.num_prefill and seen.num_decode == seen.num_decode:
        engines = [f"{seen.num_prefill:.0f}P:{seen.num_decode:.0f}D"]
    if seen.window_s == seen.window_s:
        engines.append(f"over {figure(seen.window_s, 's')}")
    load = [
        f"{figure(value, unit)}{after}"
        for value, unit, after in (
            (seen.requests_per_s, "req/s", ""),
            (seen.prompt_tokens, "tokens", " in"),
            (seen.cached_tokens or UNKNOWN, "tokens", " of them cached"),
            (seen.output_tokens, "tokens", " out"),
            (seen.tpot_s, "s", " a token"),
        )
        if not math.isnan(value)
    ]
    spent = evidence(
        ("queue", seen.prefill_queue_s, "s"),
        ("for P's room", seen.prefill_pin_wait_s or UNKNOWN, "s"),
        ("prefill", seen.prefill_s, "s"),
        ("for D's room", seen.room_wait_s, "s"),
        ("transfer", seen.transfer_s, "s"),
        ("D's queue", seen.decode_queue_s, "s"),
        ("decode", seen.decode_s, "s"),
        ("preempted", seen.preempted_s or UNKNOWN, "s"),
    )
    rows = [("seen", [seen.source, *engines]), ("load", load), ("a request", spent)]
    return [_wrapped(f"{name:<10}{', '.join(parts)}", " " * 10) for name, parts in rows if parts]


def _paragraph(verdict: Verdict) -> str:
    mark = {True: "!", False: " ", None: "?"}[verdict.calls_for_action]
    sure = "" if verdict.confidence == "none" else f" ({verdict.confidence} confidence)"
    lines = [f"{mark} {verdict.number}. {verdict.question}"]
    lines.append(f"     {verdict.answer}: {verdict.summary}{sure}")
    lines += [f"       {line}" for line in verdict.evidence]
    if verdict.action:
        lines.append(f"     do: {verdict.action}")
    if verdict.missing:
        lines.append(f"     not known: {'; '.join(map(words, verdict.missing))}")
    return "\n".join(_wrapped(line) for line in lines) + "\n"


def _wrapped(line: str, hanging: str = "") -> str:
    text = line.lstrip()
    indent = " " * (len(line) - len(text))
    after = hanging or indent + "  "
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=after)


# ---------------------------------------------------------------- facts that a user adds


def facts(
    *,
    slo: str = "",
    link: str = "",
    model: str = "",
    tensor_parallel_size: int = 0,
    max_num_seqs: int = 0,
    turn_tokens: int = 0,
    prefix_tokens: int = 0,
) -> dict[str, float]:
    """Fields of an observation out of what was typed; what was not given is not there."""
    found: dict[str, float] = {}
    if slo and math.isfinite(bound := parse_slo(slo).tpot_s):
        found["tpot_slo_s"] = bound
    if link:
        found["link_bytes_per_s"] = parse_rate(link, "--link")
    if model:
        shape, size = find_shape(model), tensor_parallel_size or 1
        layout = KvLayout(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            tensor_parallel_size=size,
        )
        found["kv_token_bytes"] = float(layout.token_bytes * size)
        found["num_kv_heads"] = float(shape.num_kv_heads)
    numbers = {
        "decode_tp": tensor_parallel_size,
        "decode_max_num_seqs": max_num_seqs,
        "turn_tokens": turn_tokens,
        "prefix_tokens": prefix_tokens,
    }
    return found | {name: float(value) for name, value in numbers.items() if value}


def with_profile(seen: Observation, path: Path) -> Observation:
    """With what the profile that `twostroke profile` wrote says of links, and of D's steps at the
    batch that was seen; what was seen itself counts for more. ConfigError if it cannot be read."""
    profile = Profile.load(path)
    found: dict[str, float] = {}
    if profile.link is not None:
        found["link_bytes_per_s"] = profile.link.bytes_per_s
        found["link_message_s"] = profile.link.message_s
    rows, context = seen.decode_running, seen.prompt_tokens + seen.output_tokens / 2
    if rows >= 1 and context > 0:

        def step_s(rows: float) -> float:
            tokens = rows * context
            return profile.step.step_s(StepWork(rows, rows, rows, tokens, tokens + rows / 2))

        # Over a fifth of the batch, so that no single jump between kernels decides.
        grown_s = step_s(1.1 * rows) - step_s(0.9 * rows)
        found["decode_elasticity"] = grown_s / (0.2 * step_s(rows))
    return seen.with_facts(**{name: found[name] for name in seen.missing(*found)})


# ---------------------------------------------------------------- where figures come from


def observe(
    source: Path | None,
    url: str,
    prefill: Sequence[str],
    decode: Sequence[str],
    window: str,
    progress: Callable[[str, float], None],
) -> Observation:
    """From exactly one kind of source. ConfigError says what is wrong with it."""
    if (source is not None) + bool(url) + bool(prefill or decode) != 1:
        raise ConfigError(
            "give one thing to diagnose",
            hint="a file, or --url of a twostroke server, or --prefill and --decode of vLLM's",
        )
    if source is not None:
        return from_file(source)
    seconds = 0.0 if window in ("0", "0s") else parse_seconds(window, "--for")

    def show(share: float) -> None:
        progress("watching", share)

    if url:
        (series,) = scrape.read([url], seconds, progress=show)
        return own_metrics.observe(series)
    if not prefill or not decode:
        lacking = "--decode" if prefill else "--prefill"
        raise ConfigError(f"{lacking} is missing", hint="name engines of both kinds")
    found = scrape.read([*prefill, *decode], seconds, progress=show)
    return vllm_metrics.observe(found[: len(prefill)], found[len(prefill) :])


def from_file(path: Path) -> Observation:
    """An observation (or a report that holds one), or a ledger of requests."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES >> 30} GiB")
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    # Reports are one object, or end with one: what `--json` prints after the text.
    for candidate in (text, text.rstrip().rpartition("\n")[2]):
        try:
            whole = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(whole, dict) and "observation" in whole:
            whole = whole["observation"]
        if isinstance(whole, dict) and set(whole) <= set(FIELDS):
            return from_dict(whole)
    return ledger_observation.observe(path, text)
