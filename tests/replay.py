"""Replay recorded workloads through our scheduler and compare every decision with vLLM's.

    python -m tests.replay WORKLOADS TRACES

WORKLOADS and TRACES are two directories of .json or .json.xz files with equal names, or two .tar.xz
archives of such. Each workload is driven step by step, with a simulated model and a mock connector,
and each step's record is compared with the recorded one. Prints `N of M equal` and the first
difference of every other; exits 1 if any differs.
"""

import json
import lzma
import sys
import tarfile
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from twostroke.clock import VirtualClock
from twostroke.config import SchedulerConfig
from twostroke.connector.base import KvRequest
from twostroke.core.loop import EngineCore
from twostroke.core.request import Request
from twostroke.core.step import Admission, Step
from twostroke.messages import (
    AddRequest,
    EngineOutputs,
    FinishReason,
    KvReport,
    SamplingParams,
    StepResult,
)
from twostroke.testing.fake_executor import fnv1a32, simulated_token

EOS, STOP = 2, 3
Json = dict[str, Any]

_DEFAULTS = {
    "block_size": 16,
    "num_gpu_blocks": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 2048,
    "max_num_scheduled_tokens": None,
    "max_model_len": 8192,
    "long_prefill_token_threshold": 0,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "policy": "fcfs",
    "num_spec_tokens": 0,
    "spec_method": "ngram",
    "async_scheduling": False,
    "reserve_full_isl": True,
    "sliding_window": None,
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "max_steps": 20000,
    "trace_block_ids": False,
    "trace_free_crc": None,
}
_NOT_OURS = ("num_gpu_blocks", "kv_role", "max_steps", "trace_block_ids", "trace_free_crc")


def splitmix64(x: int) -> int:
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def seeded_tokens(seed: int, start: int, length: int) -> list[int]:
    """Tokens `start` to `start + length` of the endless text with this seed."""
    x = np.arange(start, start + length, dtype=np.uint64) + np.uint64(splitmix64(seed))
    x += np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (np.uint64(100) + x % np.uint64(31900)).astype(np.int64).tolist()


class SimulatedModel:
    """What each request emits at each position, and how many drafts it accepts."""

    def __init__(self, specs: dict[str, Json]) -> None:
        self._specs = specs
        self._prompts: dict[str, list[int]] = {}
        self._verifications: dict[str, int] = {}
        self._proposals: dict[str, int] = {}

    def prompt(self, request_id: str) -> list[int]:
        if request_id not in self._prompts:
            spec = self._specs[request_id]
            tokens = list(spec.get("prompt_token_ids", ()))
            for segment in spec.get("prompt", ()):
                tokens += self._segment(segment)
            self._prompts[request_id] = tokens
        return self._prompts[request_id]

    def _segment(self, segment: Json) -> list[int]:
        if "tokens" in segment:
            return list(segment["tokens"])
        if "out_of" in segment:
            first = segment["start_pos"]
            return [self.token(segment["out_of"], first + i) for i in range(segment["len"])]
        return seeded_tokens(segment["seed"], segment.get("start", 0), segment["len"])

    def token(self, request_id: str, position: int) -> int:
        spec = self._specs[request_id]
        output = position - len(self.prompt(request_id))
        if spec.get("eos_at") == output:
            return EOS
        if spec.get("stop_token_at") == output:
            return STOP
        return simulated_token(request_id, position)

    def accepted(self, request_id: str, drafts: int) -> int:
        index = self._verifications.get(request_id, 0)
        self._verifications[request_id] = index + 1
        pattern = self._specs[request_id].get("spec", {}).get("accept")
        if pattern:
            return min(pattern[index % len(pattern)], drafts)
        return fnv1a32(f"{request_id}:acc:{index}") % (drafts + 1)

    def proposed(self, request_id: str, default: int) -> int:
        index = self._proposals.get(request_id, 0)
        self._proposals[request_id] = index + 1
        pattern = self._specs[request_id].get("spec", {}).get("draft_len")
        return pattern[index % len(pattern)] if pattern else default


@dataclass
class _Transfer:
    request_id: str
    due: int
    is_send: bool = False
    is_sync: bool = False
    invalid: tuple[int, ...] = ()


class MockConnector:
    """Offers remote tokens, and reports loads and sends as each workload says."""

    def __init__(self, specs: dict[str, Json], block_size: int) -> None:
        self._specs = specs
        self._block_size = block_size
        self._unknown = {
            request_id: spec["external"].get("lookup_none_calls", 0)
            for request_id, spec in specs.items()
            if "external" in spec
        }
        self._loaded: set[str] = set()
        self._transfers: list[_Transfer] = []
        self.step = 0
        self.kv_params: Json = {}

    def on_new_request(self, request: KvRequest) -> None:
        pass

    def get_num_new_matched_tokens(
        self, request: KvRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        spec = self._specs[request.request_id].get("external")
        if spec is None or (request.request_id in self._loaded and not spec.get("reload")):
            return 0, False
        if self._unknown[request.request_id] > 0:
            self._unknown[request.request_id] -= 1
            return None, False
        is_async = spec.get("async_load", True)
        most = min(spec["matched_tokens"], request.num_tokens - (0 if is_async else 1))
        offered = max(0, most - num_computed_tokens)
        return offered, is_async and offered > 0

    def update_state_after_alloc(
        self, request: KvRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        if num_external_tokens == 0:
            return
        request_id = request.request_id
        spec = self._specs[request_id]["external"]
        self._loaded.add(request_id)
        first = spec.get("fail_from_block")
        invalid = () if first is None else tuple(block_ids[first:])
        is_sync = not spec.get("async_load", True)
        if invalid or not is_sync:
            due = self.step + (0 if is_sync else spec.get("ready_after_steps", 0))
            self._transfers.append(_Transfer(request_id, due, is_sync=is_sync, invalid=invalid))

    def build_connector_meta(self) -> bytes:
        return b""

    def update_connector_output(self, report: KvReport) -> None:
        pass

    def request_finished(
        self, request: KvRequest, block_ids: Sequence[int]
    ) -> tuple[bool, Json | None]:
        send = self._specs[request.request_id].get("send")
        assert isinstance(request, Request)
        if send is None or request.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return False, None
        due = self.step + send["delay_free_steps"]
        self._transfers.append(_Transfer(request.request_id, due, is_send=True))
        params = {"do_remote_prefill": True, "num_blocks": len(block_ids)}
        self.kv_params[request.request_id] = params
        return True, params

    def report(self, step: int) -> tuple[KvReport, list[str]]:
        """What ended by the given schedule step; also the requests whose load failed."""
        ended = [transfer for transfer in self._transfers if transfer.due <= step]
        self._transfers = [transfer for transfer in self._transfers if transfer.due > step]
        failed = [transfer for transfer in ended if transfer.invalid]
        report = KvReport(
            finished_sending=[t.request_id for t in ended if t.is_send],
            finished_recving=[t.request_id for t in ended if not (t.is_send or t.is_sync)],
            invalid_block_ids=[block for t in failed for block in t.invalid],
        )
        return report, [t.request_id for t in failed]


class Replay:
    """One workload through one EngineCore; `run` returns a trace in the recorded format.

    `faithful` keeps vLLM's hangs; `options` are further settings of the scheduler.
    """

    def __init__(
        self, workload: Json, *, check: bool = False, faithful: bool = True, **options: Any
    ) -> None:
        self.config = _DEFAULTS | workload["config"]
        self._workload = workload
        self._specs = {spec["id"]: spec for spec in workload["requests"]}
        self._ids = list(self._specs)
        self._model = SimulatedModel(self._specs)
        uses_kv = any("external" in s or "send" in s for s in self._specs.values())
        self._connector = MockConnector(self._specs, self.config["block_size"]) if uses_kv else None
        ours = {key: value for key, value in self.config.items() if key not in _NOT_OURS}
        blocks = self.config["num_gpu_blocks"]
        scheduler_config = SchedulerConfig(num_blocks=blocks, **ours, **options)
        self.core = EngineCore(
            scheduler_config,
            VirtualClock(),
            connector=self._connector,
            check=check,
            faithful=faithful,
        )
        self._state = self.core.state
        self._batches: deque[tuple[int, Step]] = deque()
        self._arrivals = sorted(self._specs.values(), key=lambda spec: spec.get("arrival_step", 0))
        self._resets = {entry["step"]: entry for entry in workload.get("reset_prefix_cache", ())}
        self.tokens: dict[str, list[int]] = {request_id: [] for request_id in self._ids}
        self._reasons: dict[str, str] = {}
        self._preemptions = dict.fromkeys(self._ids, 0)
        self._summary = dict.fromkeys(
            ("scheduled_tokens", "preemptions", "prefix_hit_tokens", "external_tokens"), 0
        )

    def run(self) -> Json:
        steps: list[Json] = []
        step, stuck = 0, False
        while True:
            if step >= self.config["max_steps"]:
                stuck = True
                break
            record: Json = {"step": step}
            self._before_step(step, record)
            if not self.core.has_work() and not self._batches:
                if not self._arrivals:
                    break
                if len(record) > 1:
                    steps.append(record | {"idle": True} | self._free("free"))
                step += 1
                continue
            self._one_step(step, record)
            steps.append(record)
            step += 1
        return {
            "config": self.config,
            "stuck": stuck,
            "num_steps": step,
            "summary": self._summary,
            "finish_order": list(self._reasons),
            "outputs": {request_id: self._output(request_id) for request_id in self._ids},
            "steps": steps,
        }

    def _output(self, request_id: str) -> Json:
        tokens = self.tokens[request_id]
        return {
            "n": len(tokens),
            "crc": zlib.crc32(",".join(map(str, tokens)).encode()),
            "reason": self._reasons.get(request_id),
            "preemptions": self._preemptions[request_id],
        }

    # ------------------------------------------------------------ one step

    def _before_step(self, step: int, record: Json) -> None:
        if self._connector is not None:
            self._connector.step = step
        added = []
        while self._arrivals and self._arrivals[0].get("arrival_step", 0) <= step:
            added.append(self._add(self._arrivals.pop(0)))
        if added:
            record["added"] = added
        self._abort(step, record, mid=False)
        for handle, spec in enumerate(self._specs.values()):
            if spec.get("grammar_ready_step", step + 1) <= step:
                self.core.grammar_ready(handle)
        if (reset := self._resets.get(step)) is not None:
            self._reset(reset, record)

    def _add(self, spec: Json) -> str:
        request_id = spec["id"]
        handle = self._ids.index(request_id)
        request = AddRequest(
            handle=handle,
            request_id=request_id,
            prompt_token_ids=np.array(self._model.prompt(request_id), np.int32),
            params=SamplingParams(
                min_tokens=spec.get("min_tokens", 0),
                stop_token_ids=(STOP,) if "stop_token_at" in spec else (),
                prompt_logprobs=0 if spec.get("skip_prefix_cache") else None,
            ),
            max_tokens=spec["max_tokens"],
            eos_token_ids=(EOS,),
            arrival_s=spec.get("arrival_time", handle),
            priority=spec.get("priority", 0),
            cache_salt=spec.get("cache_salt") or "",
        )
        self.core.add(request, waits_for_grammar="grammar_ready_step" in spec)
        self._note_finished(self.core.take_outputs(), {})
        return str(request_id)

    def _abort(self, step: int, record: Json, *, mid: bool) -> None:
        handles = [
            handle
            for handle, spec in enumerate(self._specs.values())
            if spec.get("abort_step") == step
            and bool(spec.get("abort_mid")) == mid
            and handle in self._state.by_handle
        ]
        if handles:
            record["aborted"] = record.get("aborted", []) + [self._ids[h] for h in handles]
            self.core.abort(handles)
            self._note_finished(self.core.take_outputs(), {})

    def _reset(self, reset: Json, record: Json) -> None:
        running = [self._state.request_at(s).request_id for s in self._state.running.tolist()]
        preempting = bool(reset.get("reset_running"))
        done = self.core.reset_prefix_cache(preempt_running=preempting)
        record["reset_prefix_cache"] = "error" if preempting and not done else done
        if preempting and running:
            record["reset_preempted"] = running[::-1]
            self._count_preemptions(running)

    def _count_preemptions(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._preemptions[request_id] += 1
        self._summary["preemptions"] += len(request_ids)

    def _one_step(self, step: int, record: Json) -> None:
        scheduled = None
        if self.core.has_work():
            flushed = sorted(self._state.finished_ids)
            plan = self.core.begin()
            assert plan is not None
            scheduled = self.core.last_step
            self._batches.append((step, scheduled))
            self._note_schedule(scheduled, flushed, record)
        one_in_flight = len(self._batches) == 1 and scheduled is not None
        if self.config["async_scheduling"] and one_in_flight and len(self._batches[0][1].slots):
            record.update(self._free("free"))
            return
        self._abort(step, record, mid=True)
        number, oldest = self._batches.popleft()
        record["upd"] = number
        self._process(number, oldest, record)
        record.update(self._free("free"))

    def _process(self, number: int, step: Step, record: Json) -> None:
        result, failed = self._result(number, step)
        if result.kv is not None:
            for key, value in (
                ("recv_done", result.kv.finished_recving),
                ("send_done", result.kv.finished_sending),
                ("load_failed", failed),
            ):
                if value:
                    record[key] = value
        if self._connector is not None:
            self._connector.kv_params = {}
        outputs = self.core.finish(result)
        emitted, start = {}, 0
        for handle, count in zip(
            outputs.handles.tolist(), outputs.num_tokens.tolist(), strict=True
        ):
            request_id = self._ids[handle]
            emitted[request_id] = count
            self.tokens[request_id] += outputs.token_ids[start : start + count].tolist()
            start += count
        if emitted:
            record["emitted"] = emitted
        self._note_finished(outputs, record)
        if self._connector is not None and self._connector.kv_params:
            record["kv_params"] = self._connector.kv_params

    def _note_finished(self, outputs: EngineOutputs | None, record: Json) -> None:
        ended = {
            self._ids[finished.handle]: finished.reason.name.lower()
            for finished in (outputs.finished if outputs else ())
        }
        if ended:
            record["finished"] = ended
            self._reasons.update(ended)

    # ------------------------------------------------------------ the model's side

    def _result(self, number: int, step: Step) -> tuple[StepResult, list[str]]:
        num_sampled = np.zeros(len(step.slots), np.int32)
        num_drafts = np.zeros(len(step.slots), np.int32)
        tokens: list[int] = []
        for row in np.flatnonzero(step.samples).tolist():
            request = self._state.requests.get(int(step.uids[row]))
            if request is None:
                continue
            if request.slot >= 0:
                self._state.seats.read(request)
            drafts = int(step.num_drafts[row])
            accepted = self._model.accepted(request.request_id, drafts) if drafts else 0
            first = request.num_known
            tokens += [
                self._model.token(request.request_id, position)
                for position in range(first, first + accepted + 1)
            ]
            num_sampled[row] = accepted + 1
            if not self.config["async_scheduling"]:
                default = self.config["num_spec_tokens"]
                num_drafts[row] = self._model.proposed(request.request_id, default)
        result = StepResult(
            step=step.number, num_sampled=num_sampled, token_ids=np.array(tokens, np.int32)
        )
        if num_drafts.any():
            result.num_drafts = num_drafts
            result.draft_token_ids = np.zeros(int(num_drafts.sum()), np.int32)
        failed: list[str] = []
        if self._connector is not None:
            result.kv, failed = self._connector.report(number)
        return result, failed

    # ------------------------------------------------------------ records

    def _free(self, key: str) -> Json:
        pool = self._state.kv.pool
        record: Json = {key: pool.num_free}
        wanted = self.config["trace_free_crc"]
        if wanted or (wanted is None and pool.num_blocks <= 4096):
            record["free_crc"] = zlib.crc32(",".join(map(str, pool.free_blocks())).encode())
        return record

    def _note_schedule(self, step: Step, flushed: list[str], record: Json) -> None:
        ids = [self._ids[handle] for handle in step.handles.tolist()]
        record["sched"] = dict(zip(ids, step.num_scheduled.tolist(), strict=True))
        self._summary["scheduled_tokens"] += int(step.num_scheduled.sum())
        if step.num_drafts.any():
            drafts = zip(ids, step.num_drafts.tolist(), strict=True)
            record["spec"] = {request_id: count for request_id, count in drafts if count}
        if step.grown:
            record["grow"] = {
                self._state.request_at(slot).request_id: self._ids_or_count(blocks)
                for slot, blocks in step.grown.items()
            }
        self._note_admissions(step, record)
        if step.preempted:
            record["preempted"] = [request.request_id for request in step.preempted]
            self._count_preemptions(record["preempted"])
        record["free_sched"] = self._state.kv.num_free
        record["running"] = [
            self._state.request_at(slot).request_id for slot in self._state.running.tolist()
        ]
        record["waiting"] = [request.request_id for request in self._state.queues.waiting()]
        skipped = [request.request_id for request in self._state.queues.skipped()]
        if skipped:
            record["skipped"] = skipped
        if flushed and self.config["trace_block_ids"]:
            record["flushed"] = flushed

    def _ids_or_count(self, blocks: list[int]) -> list[int] | int:
        return blocks if self.config["trace_block_ids"] else len(blocks)

    def _note_admissions(self, step: Step, record: Json) -> None:
        for admission in step.admitted:
            key = "resumed" if admission.resumed else "new"
            record.setdefault(key, {})[admission.request.request_id] = self._admission(admission)
        for admission in step.loading:
            entry = self._admission(admission)
            record.setdefault("async_load", {})[admission.request.request_id] = entry

    def _admission(self, admission: Admission) -> Json:
        blocks = admission.request.table.blocks
        entry: Json = {"computed": admission.num_computed, "blocks": len(blocks)}
        if admission.num_local is not None:
            entry["hit"] = admission.num_local
            self._summary["prefix_hit_tokens"] += admission.num_local
        if admission.num_external:
            entry["ext"] = admission.num_external
            self._summary["external_tokens"] += admission.num_external
        if self.config["trace_block_ids"]:
            entry["block_ids"] = list(blocks)
        return entry


# ---------------------------------------------------------------- comparing


def first_difference(ours: Json, recorded: Json) -> str | None:
    """Where two traces differ first, in words, or None."""
    for mine, theirs in zip(ours["steps"], recorded["steps"], strict=False):
        for key in sorted(mine.keys() | theirs.keys()):
            if not _same(key, mine.get(key), theirs.get(key)):
                return (
                    f"step {theirs['step']}, {key}: ours {mine.get(key)}, "
                    f"recorded {theirs.get(key)}"
                )
    for key in ("num_steps", "stuck", "finish_order", "outputs", "summary", "config"):
        if ours[key] != recorded[key]:
            return f"{key}: ours {ours[key]}, recorded {recorded[key]}"
    if len(ours["steps"]) != len(recorded["steps"]):
        return f"{len(ours['steps'])} steps, recorded {len(recorded['steps'])}"
    return None


def _same(key: str, mine: Any, theirs: Any) -> bool:
    if key == "sched" and mine and theirs and list(mine) != list(theirs):
        return False  # order matters
    return bool(mine == theirs)


def load_directory(path: Path) -> Iterator[tuple[str, Json]]:
    """Name and content of every .json or .json.xz file, or of those in a .tar.xz archive."""
    if path.is_file():
        with tarfile.open(path) as archive:
            for member in sorted(archive.getnames()):
                file = archive.extractfile(member)
                if file is not None and member.endswith(".json"):
                    yield Path(member).stem, json.load(file)
        return
    for file_path in sorted(path.glob("*.json*")):
        data = file_path.read_bytes()
        name = file_path.name.removesuffix(".xz").removesuffix(".json")
        yield name, json.loads(lzma.decompress(data) if file_path.suffix == ".xz" else data)


def main(workloads: Path, traces: Path) -> int:
    recorded = dict(load_directory(traces))
    equal, different = 0, []
    for name, workload in load_directory(workloads):
        if name not in recorded:
            different.append(f"{name}: no trace")
            continue
        difference = first_difference(Replay(workload).run(), recorded[name])
        if difference is None:
            equal += 1
        else:
            different.append(f"{name}: {difference}")
    print(f"{equal} of {equal + len(different)} equal")
    for line in different:
        print(line)
    return 1 if different else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
