"""The seam between decisions and devices.

`worker.executor` implements this protocol around a model, `twin.executor` around a cost model. The
core cannot tell which it is.
"""

from typing import Protocol

from twostroke.messages import StepPlan, StepResult


class Executor(Protocol):
    """Runs plans in the order they are submitted; up to two may be in flight."""

    def submit(self, plan: StepPlan) -> None:
        """Start a step; does not wait for it."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest submitted step. Raises EngineDeadError when the worker is gone."""
        ...

    def shutdown(self) -> None:
        """Stop the workers and free what they hold. Idempotent."""
        ...
