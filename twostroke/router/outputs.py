"""One engine's outputs without what is not the client's, under the client's handles."""

from collections.abc import Mapping

import msgspec
import numpy as np

from twostroke.messages import (
    NO_TOKENS,
    EngineOutputs,
    Events,
    Finished,
    PrefillInfo,
    RequestLogprobs,
)
from twostroke.router.jobs import Leg, LegKind

NO_HANDLES = np.empty(0, np.int64)
Legs = Mapping[int, Leg]  # by the engine's handles


def nothing(time_s: float) -> EngineOutputs:
    """Outputs without anything in them."""
    return EngineOutputs(
        handles=NO_HANDLES, num_tokens=NO_TOKENS, token_ids=NO_TOKENS, time_s=time_s
    )


def translated(outputs: EngineOutputs, special: Legs) -> EngineOutputs:
    """Outputs whose `special` legs are dropped or renamed; the others pass as they are.

    Of a prefill leg only its events and what it found cached stay. Events of either leg get its
    numbers (`ledger.Boundary`). Ends are not looked at.
    """
    changed = {
        "prefills": _prefills(outputs.prefills, special),
        "logprobs": _logprobs(outputs.logprobs, special),
    }
    if outputs.events is not None:
        changed["events"] = _events(outputs.events, special)
    handles = outputs.handles
    rows = [i for i, handle in enumerate(handles.tolist()) if handle in special]
    if rows:
        handles = handles.copy()
        keep = np.ones(len(handles), np.bool_)
        for row in rows:
            leg = special[int(handles[row])]
            keep[row] = _is_clients(leg)
            handles[row] = leg.job.handle
        changed["handles"] = handles[keep]
        if np.count_nonzero(keep) < len(keep):
            changed["token_ids"] = outputs.token_ids[np.repeat(keep, outputs.num_tokens)]
            changed["num_tokens"] = outputs.num_tokens[keep]
    return msgspec.structs.replace(outputs, **changed)


def with_more(
    outputs: EngineOutputs, events: list[tuple[int, int, float]], ends: list[Finished]
) -> EngineOutputs:
    """Outputs and, behind what they have, the dispatcher's own events and ends."""
    if events:
        handles, kinds, times = zip(*events, strict=True)
        more = Events(np.array(handles, np.int64), np.array(kinds, np.uint8), np.array(times))
        if (of_step := outputs.events) is not None:
            more = Events(
                np.concatenate([of_step.handles, more.handles]),
                np.concatenate([of_step.kinds, more.kinds]),
                np.concatenate([of_step.times_s, more.times_s]),
            )
        outputs = msgspec.structs.replace(outputs, events=more)
    if ends:
        outputs = msgspec.structs.replace(outputs, finished=[*outputs.finished, *ends])
    return outputs


def _is_clients(leg: Leg) -> bool:
    return not leg.is_muted and leg.kind is not LegKind.PREFILL


def _prefills(prefills: list[PrefillInfo], special: Legs) -> list[PrefillInfo]:
    kept = []
    for info in prefills:
        leg = special.get(info.handle)
        if leg is None:
            kept.append(info)
        elif not leg.is_muted and leg.kind is not LegKind.DECODE:
            kept.append(PrefillInfo(leg.job.handle, info.cached_tokens))
    return kept


def _logprobs(entries: list[RequestLogprobs], special: Legs) -> list[RequestLogprobs]:
    kept = []
    for entry in entries:
        leg = special.get(entry.handle)
        if leg is None:
            kept.append(entry)
        elif _is_clients(leg):
            kept.append(msgspec.structs.replace(entry, handle=leg.job.handle))
    return kept


def _events(events: Events, special: Legs) -> Events:
    handles, kinds = events.handles.tolist(), events.kinds.tolist()
    keep = np.ones(len(handles), np.bool_)
    for i, handle in enumerate(handles):
        leg = special.get(handle)
        if leg is None:
            continue
        handles[i] = leg.job.handle
        kinds[i] += leg.kind
        keep[i] = not leg.is_muted
    return Events(
        np.array(handles, np.int64)[keep], np.array(kinds, np.uint8)[keep], events.times_s[keep]
    )
