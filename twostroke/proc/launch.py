"""Starts the engine-core process and watches it: the one place that knows about child processes.

    `EngineProcess`   the child with its sockets: start, notice its death, stop it, leave nothing behind

A child gets its settings on standard input and treats the closing of that pipe as our death, so no
orphan survives whatever kills us; we notice the child's death by waiting for it.
"""

import logging
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec

from twostroke.checkpoint import Checkpoint
from twostroke.config import EngineConfig
from twostroke.messages import Shutdown
from twostroke.transport import ZmqEngineChannel

logger = logging.getLogger("twostroke")

EXIT_GRACE_S = 5.0  # from the end of draining to SIGKILL


class EngineProcess:
    """A running engine-core process and the channel to it."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, engine: int = 0) -> None:
        self.engine = engine
        self.directory = Path(tempfile.mkdtemp(prefix="twostroke-"))  # mode 0700
        self.channel = ZmqEngineChannel(self.directory, engine)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "twostroke.proc.core_main"], stdin=subprocess.PIPE
        )
        settings = {
            "config": config,
            "checkpoint": str(checkpoint.path),
            "directory": str(self.directory),
            "engine": engine,
        }
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(settings) + b"\n")
        self.process.stdin.flush()
        self._stopping = False
        self._watcher = threading.Thread(target=self._watch, name="watch-engine", daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        code = self.process.wait()
        if not self._stopping:
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            self.channel.report_death(f"the engine-core process {how}")

    def stop(self, drain_s: float = 0.0) -> int:
        """End the process: let requests finish for `drain_s` seconds, abort the rest, then exit.

        Returns its exit code; kills it when it does not end in time. Idempotent.
        """
        self._stopping = True
        if self.process.poll() is None:
            self.channel.send(Shutdown(drain_s))
            try:
                self.process.wait(drain_s + EXIT_GRACE_S)
            except subprocess.TimeoutExpired:
                logger.warning("the engine core did not stop in time; killing it")
                self.process.kill()
        code = self.process.wait()
        self._watcher.join()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.channel.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        return code


def start_engine(config: EngineConfig, checkpoint: Checkpoint) -> EngineProcess:
    """Start one engine; it loads in the background and reports through its channel."""
    return EngineProcess(config, checkpoint)
