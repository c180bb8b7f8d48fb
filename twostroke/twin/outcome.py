"""From what was recorded in a run to its `Result`."""

from typing import Any

import numpy as np

from twostroke.twin.engine import TwinEngine
from twostroke.twin.link import Network
from twostroke.twin.record import Requests, Timeline
from twostroke.twin.scenario import (
    EngineGroup,
    EngineResult,
    Result,
    Scenario,
    engine_name,
    link_name,
)
from twostroke.twin.transfers import EngineTransfers

UNENDED = "it had not ended when the simulation did"


def result_of(
    scenario: Scenario,
    requests: Requests,
    engines: list[EngineResult],
    network: Network,
    groups: list[EngineGroup],
    *,
    counters: dict[str, Any],
    ended_s: float,
    wall_s: float,
) -> Result:
    """The columns of all requests, with NaN for what did not happen, and totals.

    `ended_s` is when the last of them ended, on the virtual clock.
    """
    done = requests.end_s >= 0
    for index in requests.errors:
        done[index] = False
    for index in np.flatnonzero(requests.end_s < 0).tolist():
        requests.errors[index] = UNENDED
    arrival_s = np.where(requests.arrival_s >= 0, requests.arrival_s, np.nan)
    gaps = np.maximum(requests.num_tokens - 1, 1)
    itl_s, itl_counts = requests.gaps.columns()
    names = {key: link_name(key, groups) for key in network.links}
    return Result(
        scenario=scenario,
        duration_s=ended_s - float(np.nanmin(arrival_s, initial=ended_s)),
        arrival_s=arrival_s,
        ttft_s=np.where(requests.first_s >= 0, requests.first_s - arrival_s, np.nan),
        tpot_s=np.where(done, (requests.last_s - requests.first_s) / gaps, np.nan),
        e2e_s=np.where(done, requests.last_s - arrival_s, np.nan),
        prompt_tokens=scenario.workload.prompt_tokens,
        output_tokens=requests.num_tokens,
        cached_tokens=requests.cached_tokens,
        num_preemptions=requests.num_preemptions(),
        intervals_s=requests.intervals_s(),
        itl_s=itl_s,
        itl_counts=itl_counts,
        peak_tokens_per_s=requests.peak_tokens_per_s,
        errors=requests.errors,
        changes=requests.log.columns(),
        engines=engines,
        link_bytes={names[key]: moved for key, moved in network.bytes_moved.items()},
        link_busy_s={names[key]: busy_s for key, busy_s in network.busy_s.items()},
        links={names[key]: use for key, use in network.use.items()},
        counters=counters,
        wall_s=wall_s,
    )


def engine_result(
    engine: TwinEngine,
    groups: list[EngineGroup],
    timeline: Timeline,
    transfers: EngineTransfers | None,
) -> EngineResult:
    """What one engine did."""
    group, stats = groups[engine.index], engine.core.stats()
    return EngineResult(
        name=engine_name(engine.index, groups),
        role=group.role,
        timeline=timeline.columns(),
        busy_s=engine.executor.busy_s,
        prefill_s=engine.executor.prefill_s,
        num_steps=stats.num_steps,
        num_skipped=engine.num_skipped,
        num_preemptions=stats.num_preemptions,
        num_blocks=group.config.num_blocks,
        loaded_bytes=transfers.num_bytes if transfers else 0,
        loaded_messages=transfers.num_messages if transfers else 0,
    )
