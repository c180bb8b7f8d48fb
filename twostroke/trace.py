"""Chrome traces: who worked when, on one time axis over all processes.

Each process appends complete events, one JSON object a line, to the same file (`O_APPEND` keeps
lines whole), so a crash loses at most what was not flushed. `finish` closes the JSON array; without
it Perfetto and chrome://tracing still read the file. Open it at ui.perfetto.dev.
"""

import json
import os
import threading
from pathlib import Path

FLUSH_EVENTS = 512


class Tracer:
    """Collects spans of one process, from any of its threads.

    A track is a thread, or a worker seen from outside.
    """

    def __init__(self, path: Path, process: str) -> None:
        self._path = path
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._tracks: dict[str, int] = {}
        self._events: list[str] = []
        self._add({"ph": "M", "name": "process_name", "args": {"name": process}})

    def span(self, track: str, name: str, start_s: float, end_s: float, **args: int | str) -> None:
        """One piece of work on `track`, in seconds of the monotonic clock."""
        event = {"ph": "X", "name": name, "tid": self._track(track), "args": args}
        event |= {"ts": round(start_s * 1e6, 1), "dur": round((end_s - start_s) * 1e6, 1)}
        self._add(event)
        if len(self._events) >= FLUSH_EVENTS:
            self.flush()

    def _track(self, name: str) -> int:
        if name not in self._tracks:
            self._tracks[name] = tid = len(self._tracks) + 1
            self._add({"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}})
        return self._tracks[name]

    def _add(self, event: dict[str, object]) -> None:
        line = json.dumps({"pid": self._pid} | event)
        with self._lock:
            self._events.append(line)

    def flush(self) -> None:
        """Append what was collected to the file."""
        with self._lock:
            events, self._events = self._events, []
        if events:
            with self._path.open("ab", buffering=0) as file:
                file.write((",\n".join(events) + ",\n").encode())


def begin(path: Path) -> None:
    """Start an empty trace file. Raises OSError when it cannot be written."""
    path.write_text("[\n")


def finish(path: Path) -> None:
    """Close the JSON array, once no process writes any more."""
    text = path.read_text().rstrip().rstrip(",")
    path.write_text(text + "\n]\n")
