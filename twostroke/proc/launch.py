"""Starts engine-core processes and watches them: the one place that knows about child processes.

    `EngineProcess`   a child with its sockets: start, notice its death, stop it, leave nothing
    `EngineGroup`     the children of one server, started and stopped together
    `serve`           bind the port, find the model, start the engines, run the HTTP side

A child gets its settings on standard input and treats the closing of that pipe as our death, so no
orphan survives whatever kills us; we notice the child's death by waiting for it.
"""

import contextlib
import errno
import itertools
import logging
import resource
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from twostroke import checkpoint as checkpoints
from twostroke import log, trace
from twostroke.checkpoint import Checkpoint
from twostroke.config import EngineConfig, Explained
from twostroke.errors import ConfigError, EngineDeadError
from twostroke.keys import read_key
from twostroke.messages import Shutdown
from twostroke.proc.bars import StageBars
from twostroke.proc.ray_engines import RayEngines
from twostroke.proc.start import start_core
from twostroke.transport import ZmqEngineChannel

logger = logging.getLogger("twostroke")

MAX_OPEN_FILES = 65_536
EXIT_GRACE_S = 5.0  # from the end of draining to SIGKILL


class EngineProcess:
    """A running engine-core process and the channel to it."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        engine: int = 0,
        process: "subprocess.Popen[bytes] | None" = None,
    ) -> None:
        """`process` is one that `start_core` has begun for these settings."""
        self.engine = engine
        self.directory = Path(tempfile.mkdtemp(prefix="twostroke-"))  # mode 0700
        self.channel = ZmqEngineChannel(self.directory, engine)
        self.process = process or start_core(config, engine)
        settings = {
            "config": config,
            "checkpoint": str(checkpoint.path),
            "directory": str(self.directory),
            "engine": engine,
        }
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already, which `_watch` will tell
            self.process.stdin.write(msgspec.json.encode(settings) + b"\n")
        self.died = threading.Event()
        self._on_death: list[Callable[[], object]] = []
        self._stop_by_s: float | None = None  # set once it was told to stop
        self._watcher = threading.Thread(target=self._watch, name="watch-engine", daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        code = self.process.wait()
        if self._stop_by_s is None:
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            self.channel.report_death(f"the engine-core process {how}")
            self.died.set()
            for callback in self._on_death:
                callback()

    def on_death(self, callback: Callable[[], object]) -> None:
        """Call back, from a thread, if the process ends without being told to."""
        self._on_death.append(callback)
        if self.died.is_set():
            callback()

    def begin_stop(self, drain_s: float = 0.0) -> None:
        """Tell it to let requests finish for `drain_s` seconds, abort the rest, then exit."""
        if self._stop_by_s is None:
            self._stop_by_s = time.monotonic() + drain_s + EXIT_GRACE_S
            try:
                self.channel.send(Shutdown(drain_s))
            except EngineDeadError:  # it has not come up far enough to be told
                self.process.kill()

    def stop(self, drain_s: float = 0.0) -> int:
        """End the process (see `begin_stop`) and clean up.

        Returns its exit code; kills it when it does not end in time. Idempotent.
        """
        self.begin_stop(drain_s)
        assert self._stop_by_s is not None
        try:
            self.process.wait(max(0.0, self._stop_by_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            logger.warning("engine core %d did not stop in time; killing it", self.engine)
            self.process.kill()
        code = self.process.wait()
        self._watcher.join()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.channel.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        return code


class EngineGroup:
    """The engine processes of one server, one for each of `EngineConfig.local_roles`."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        begun: "Iterable[subprocess.Popen[bytes] | None]" = (),
    ) -> None:
        """`begun` are processes that `start_core` has begun for these settings, in order."""
        self.processes: list[EngineProcess] = []
        try:
            engines = range(len(config.local_roles))
            for engine, process in itertools.zip_longest(engines, begun):
                self.processes.append(EngineProcess(config, checkpoint, engine, process))
        except BaseException:
            self.stop()
            raise

    @property
    def channels(self) -> list[ZmqEngineChannel]:
        return [process.channel for process in self.processes]

    def on_death(self, callback: Callable[[], object]) -> None:
        """Call back, from a thread, for each process that ends without being told to."""
        for process in self.processes:
            process.on_death(callback)

    def stop(self, drain_s: float = 0.0) -> int:
        """End all processes at once. Idempotent.

        Returns the exit code of the first that failed by itself, which says why it refused to start
        (2: settings, 3: model); 0 when there is none.
        """
        for process in self.processes:
            process.begin_stop(drain_s)
        codes = [process.stop() for process in self.processes]
        return next((code for code in codes if code > 0), 0)


def start_engines(
    config: EngineConfig,
    checkpoint: Checkpoint,
    begun: "Iterable[subprocess.Popen[bytes]]" = (),
) -> EngineGroup:
    """Start the engines; they load in the background and report through their channels."""
    return EngineGroup(checkpoints.with_local_draft(config), checkpoint, begun)


def serve(
    config: EngineConfig,
    explained: Sequence[Explained],
    begun: "Iterable[subprocess.Popen[bytes]]" = (),
) -> int:
    """Serve a model over HTTP until told to stop; returns the exit code of `twostroke serve`.

    What can fail early does: the port is bound and the model found before anything is loaded. Then
    each engine loads in its own process while this one imports its HTTP side. `begun`: see
    `EngineGroup`; they are the caller's when this raises.
    """
    log.setup(config.log_level)
    if config.join:
        raise ConfigError(
            f"--join is {config.join}, but a server joins nobody", hint="run twostroke engine"
        )
    _allow_many_connections()
    key = read_key(Path(config.key)) if config.engines_listen else None
    listener = _bind(config.host, config.port)
    try:
        checkpoint = _resolve(config)
        if config.trace:
            _begin_trace(config.trace)
        cluster = RayEngines(config) if config.ray else None
        engines = start_engines(config, checkpoint, begun)
    except BaseException:
        listener.close()
        raise
    try:
        from twostroke.proc.api_main import run

        failed = run(config, explained, checkpoint, engines, listener, key, cluster) != 0
    finally:
        engine_code = engines.stop()
        listener.close()
        if config.trace:
            _finish_trace(config.trace)
    return (engine_code or 1) if failed else 0


def _allow_many_connections() -> None:
    """Raise our limit of open files, which is 1,024 in many places: strangers can connect, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use",
                hint="stop what listens there, or choose another with --port (0: any free one)",
            ) from None
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener


def _begin_trace(path: str) -> None:
    try:
        trace.begin(Path(path))
    except OSError as error:
        raise ConfigError(f"cannot write the trace to {path}: {error.strerror}") from None


def _finish_trace(path: str) -> None:
    try:
        trace.finish(Path(path))
    except OSError as error:  # it was removed meanwhile, or the disk is full
        logger.error("cannot finish the trace in %s: %s", path, error.strerror)
    else:
        logger.info("trace written to %s (open it at ui.perfetto.dev)", path)


def _resolve(config: EngineConfig) -> Checkpoint:
    """Find the model, with a progress bar if it must be downloaded."""
    with StageBars() as bars:
        return checkpoints.resolve(config, bars.show)


def startup_block(rows: Sequence[tuple[str, str, str]]) -> str:
    """What a user wants to know once: each fact, its value and the reason for it."""
    width = max(len(name) for name, _, _ in rows)
    return "\n".join(
        f"  {name:<{width}}  {value}" + (f"  ({reason})" if reason else "")
        for name, value, reason in rows
    )
