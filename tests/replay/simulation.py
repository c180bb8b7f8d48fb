"""The simulated model and the mock KV connector of the recordings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twostroke.connector.base import KvRequest
from twostroke.core.request import Request
from twostroke.kv_messages import KvReport
from twostroke.messages import FinishReason
from twostroke.testing.fake_executor import fnv1a32, simulated_token

EOS, STOP = 2, 3
Json = dict[str, Any]


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

    def build_connector_meta(self) -> None:
        return None

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
