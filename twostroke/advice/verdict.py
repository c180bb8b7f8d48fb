"""The form of an answer: what it says, the figures it rests on, and what it could not know."""

import math
from dataclasses import dataclass

QUESTIONS = {
    "decode_bound": "Is D bound by KV capacity or by decode compute?",
    "message_size": "What bandwidth do scattered blocks of this size get, against theory?",
    "layout": "Which ratio and layout, with the bandwidth as it fluctuates?",
    "link_limit": "Is the KV volume near the limit of the link?",
    "prefill_blocked": "Is P's batch blocked by KV transfer?",
    "decode_waits": "Does D wait for KV, or is decode itself the bottleneck?",
    "move_prefix": "Is a prefix hit worth moving?",
    "append_on_decode": "Should the next turn prefill on D?",
    "ratio": "Does the P:D ratio fit the lengths of inputs and outputs?",
}
NAMES = tuple(QUESTIONS)
FLAGS = {  # of `twostroke diagnose`, by the figure that they tell
    "link_bytes_per_s": "--link",
    "turn_tokens": "--turn-tokens",
    "kv_token_bytes": "--model",
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One answer.

    `calls_for_action` is what a gauge shows; None when it cannot be told (then `answer` is
    "unknown" and `confidence` none; else that is high, medium or low). `missing` names the fields
    of the observation that would tell more.
    """

    name: str
    answer: str
    calls_for_action: bool | None
    summary: str
    evidence: tuple[str, ...] = ()
    confidence: str = "high"
    action: str = ""
    missing: tuple[str, ...] = ()

    @property
    def number(self) -> int:
        """1 to 9."""
        return NAMES.index(self.name) + 1

    @property
    def question(self) -> str:
        return QUESTIONS[self.name]


@dataclass(frozen=True)
class Case:
    """What a rule has gathered before it decides."""

    name: str
    evidence: tuple[str, ...]
    confidence: str
    missing: tuple[str, ...] = ()

    def act(self, answer: str, summary: str, action: str) -> Verdict:
        """The answer that calls for a change."""
        return self._verdict(answer, True, summary, action)

    def leave(self, answer: str, summary: str, action: str = "") -> Verdict:
        """The answer that does not."""
        return self._verdict(answer, False, summary, action)

    def _verdict(self, answer: str, acts: bool, summary: str, action: str) -> Verdict:
        return Verdict(
            name=self.name,
            answer=answer,
            calls_for_action=acts,
            summary=summary,
            evidence=self.evidence,
            confidence=self.confidence,
            action=action,
            missing=self.missing,
        )


def unknown(name: str, missing: tuple[str, ...], evidence: tuple[str, ...] = ()) -> Verdict:
    """No answer, for want of `missing`; `evidence` is what is known all the same."""
    flags = [FLAGS[field] for field in missing if field in FLAGS]
    others = [field for field in missing if field not in FLAGS]
    action = f"give {' and '.join(flags)}" if flags else ""
    if others or not missing:
        action += f"{', and ' if flags else ''}watch it while it serves"
    return Verdict(
        name=name,
        answer="unknown",
        calls_for_action=None,
        summary="cannot be told from what was given",
        evidence=evidence,
        confidence="none",
        action=action,
        missing=missing,
    )


def evidence(*lines: tuple[str, float, str] | str) -> tuple[str, ...]:
    """`label: figure` for each (label, value, unit) that is known; sentences stay as they are."""
    return tuple(
        line if isinstance(line, str) else f"{line[0]}: {figure(line[1], line[2])}"
        for line in lines
        if isinstance(line, str) or math.isfinite(line[1])
    )


def figure(value: float, unit: str) -> str:
    """A value for people; `unit` is %, s, B, B/s or anything to print behind it."""
    match unit:
        case "%":
            return f"{value:.0%}" if value >= 0.01 or not value else f"{value:.1%}"
        case "s":
            return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
        case "B" | "B/s":
            return _bytes(value) + unit[1:]
        case "tokens":
            return f"{value:,.0f} tokens"
    return f"{value:.3g} {unit}".rstrip()


def _bytes(value: float) -> str:
    for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:.3g} B"
