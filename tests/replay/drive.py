"""The driver: one workload, step by step, through an EngineCore, recorded as vLLM's was."""

import zlib
from collections import deque
from typing import Any

import numpy as np

from tests.replay.simulation import EOS, STOP, Json, MockConnector, SimulatedModel
from twostroke.clock import VirtualClock
from twostroke.config import SchedulerConfig
from twostroke.core.loop import EngineCore
from twostroke.core.step import Admission, Step
from twostroke.messages import AddRequest, EngineOutputs, SamplingParams, StepResult

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
        self._names = [str(block) for block in range(self.config["num_gpu_blocks"])]
        self._with_grammar = [
            (handle, spec["grammar_ready_step"])
            for handle, spec in enumerate(self._specs.values())
            if "grammar_ready_step" in spec
        ]
        self._aborts: dict[tuple[int, bool], list[int]] = {}
        for handle, spec in enumerate(self._specs.values()):
            key = (spec.get("abort_step"), bool(spec.get("abort_mid")))
            self._aborts.setdefault(key, []).append(handle)
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
        for handle, ready_step in self._with_grammar:
            if ready_step <= step:
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
        due = self._aborts.get((step, mid), ())
        handles = [handle for handle in due if handle in self._state.by_handle]
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
            free = map(self._names.__getitem__, pool.free_blocks())
            record["free_crc"] = zlib.crc32(",".join(free).encode())
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
                self._state.request_at(slot).request_id: self._ids_or_count(blocks.tolist())
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
