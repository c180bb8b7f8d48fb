"""A KV connector for tests: offers what it is told to, and ends transfers when it is told to."""

from collections.abc import Sequence
from typing import Any

from twostroke.connector.base import KvRequest
from twostroke.kv_messages import KvCommands, KvReport
from twostroke.messages import StepResult
from twostroke.testing.fake_executor import FakeExecutor


class Offers:
    """`offers` maps a request id to (tokens, asynchronous); None tokens: not known yet."""

    def __init__(self, **offers: tuple[int | None, bool]) -> None:
        self.offers = offers
        self.blocks: dict[str, list[int]] = {}
        self.reports: list[KvReport] = []
        self.keep: set[str] = set()
        self.finished: dict[str, int] = {}

    def on_new_request(self, request: KvRequest) -> None:
        assert request.num_tokens == len(request.token_ids) >= request.num_prompt_tokens

    def get_num_new_matched_tokens(
        self, request: KvRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens, is_async = self.offers.get(request.request_id, (0, False))
        if tokens is None:
            return None, False
        return max(0, tokens - num_computed_tokens), is_async

    def update_state_after_alloc(
        self, request: KvRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        self.blocks[request.request_id] = list(block_ids)
        if num_external_tokens:
            self.offers.pop(request.request_id)

    def build_connector_meta(self) -> KvCommands:
        return KvCommands(given_up=[7])

    def update_connector_output(self, report: KvReport) -> None:
        self.reports.append(report)

    def request_finished(
        self, request: KvRequest, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.finished[request.request_id] = len(block_ids)
        return request.request_id in self.keep, None


class Reporting(FakeExecutor):
    """A fake device that adds the reports a test has queued, by step."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**({"block_size": 4, "may_rewind": True} | fields))
        self.reports: dict[int, KvReport] = {}

    def collect(self) -> StepResult:
        result = super().collect()
        result.kv = self.reports.pop(result.step, None)
        return result
