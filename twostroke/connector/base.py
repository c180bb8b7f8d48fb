"""What a KV connector is to the scheduler.

The scheduler asks it for tokens whose KV exists elsewhere, and hands finished requests to it. The
other half of a connector, which moves the bytes, lives with the worker; the two halves talk through
`StepPlan.kv` and `StepResult.kv`.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from twostroke.arrays import Int32s
from twostroke.kv_messages import KvCommands, KvEndpoint, KvReport


class KvRequest(Protocol):
    """What a connector may read of a request. `token_ids` are all tokens known so far."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def token_ids(self) -> Int32s: ...


class KvConnectorScheduler(Protocol):
    """The scheduler's half of a connector. No method may wait.

        on_new_request ─▶ get_num_new_matched_tokens (any number of times, while nothing of the
        request is computed) ─▶ update_state_after_alloc ─▶ ... ─▶ request_finished (once)

    with `build_connector_meta` and `update_connector_output` at every step, also empty ones.
    """

    def on_new_request(self, request: KvRequest) -> None:
        """The request has arrived."""
        ...

    def get_num_new_matched_tokens(
        self, request: KvRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens beyond the local prefix hit can be loaded, and whether asynchronously.

        None means "not known yet": the request is passed over and asked again at the next step. A
        synchronous load must leave one token to compute.
        """
        ...

    def update_state_after_alloc(
        self, request: KvRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """Blocks were allocated; `block_ids` is the whole table. 0 external tokens: none to load.

        An asynchronous load may start now; it must be reported once, by `KvReport`, in every case.
        """
        ...

    def build_connector_meta(self) -> KvCommands | None:
        """What the worker's half must do before this step. Called at every step."""
        ...

    def update_connector_output(self, report: KvReport) -> None:
        """The worker's half reported ended transfers."""
        ...

    def request_finished(
        self, request: KvRequest, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request ended, in whatever way. True: keep its blocks until the send is reported.

        The dictionary, if any, goes to the client of the request.
        """
        ...


class KvConnectorWorker(Protocol):
    """The worker's half: moves bytes in threads of its own. One for each rank; used by one thread.

    No method but `wait` and `shutdown` may wait for a transfer.
    """

    @property
    def endpoint(self) -> KvEndpoint:
        """Where this rank can be read: `addresses` has this rank's alone."""
        ...

    def apply(self, commands: KvCommands) -> None:
        """Do what the scheduler's half says; called before the step that the commands came with."""
        ...

    def report(self) -> KvReport | None:
        """What has ended since the last report."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Return once there is something to report, or nothing under way, or time is up."""
        ...

    def shutdown(self) -> None:
        """End the threads and let go of peers and memory. Idempotent."""
        ...
