"""Progress bars on standard error for the long work before a server answers.

On a terminal they vanish when done; elsewhere (a log file) each stage is one line when it begins.
"""

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)


class StageBars:
    """One bar for each stage that is reported. Stages count bytes where `total` is large."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            DownloadColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not self._terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def show(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` units of `stage` are through; a `total` of 0 is not known."""
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total or None)
            if not self._terminal:
                print(f"{stage} ...", file=sys.stderr, flush=True)
        self._bars.update(self._tasks[stage], completed=done, total=total or None)

    def __enter__(self) -> "StageBars":
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()
