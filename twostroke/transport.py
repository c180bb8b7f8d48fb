"""Messages between the API process and an engine core: ZMQ sockets, msgpack, no pickle.

Each engine has two one-way sockets in a directory that only this user can enter:

    API process  PUSH ──engine0.in──▶ PULL  input thread    of engine 0
    API process  PULL ◀─engine0.out── PUSH  output thread   of engine 0

One writer and one reader each, so order is kept and nobody polls. The API side is `EngineChannel`;
tests put an in-process one in its place. Whether the peer process lives is not a socket's business:
`proc.launch` watches processes.
"""

import asyncio
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from twostroke.errors import EngineDeadError
from twostroke.messages import EngineDead, FromEngine, ToEngine, decoder_for, encode


class EngineChannel(Protocol):
    """The API process's end of the line to one engine."""

    def send(self, message: ToEngine) -> None:
        """Queue a message; never blocks. EngineDeadError before the engine has connected."""
        ...

    async def receive(self) -> FromEngine:
        """The next message, for one reader. Raises EngineDeadError once the engine is gone."""
        ...

    def close(self) -> None:
        """Drop both sockets. Further sends are ignored."""
        ...


def _address(directory: Path, engine: int, direction: str) -> str:
    return f"ipc://{directory}/engine{engine}.{direction}"


_POLLIN = int(zmq.POLLIN)  # zmq's own is an enum.IntFlag, whose `&` takes a microsecond


class ZmqEngineChannel:
    """The API process's end over ZMQ. Make it before the engine process starts (it binds).

    Messages stay in ZMQ's queue until they are asked for, so a reader that is cancelled loses none.
    `zmq.asyncio` would do as much, at twice the CPU time a message: a future of its own for each
    receive, and another turn of the event loop to look for more.
    """

    def __init__(self, directory: Path, engine: int) -> None:
        self._context = zmq.Context()
        self._from_engine = self._context.socket(zmq.PULL)
        self._to_engine = self._context.socket(zmq.PUSH)
        for socket in (self._to_engine, self._from_engine):
            socket.set_hwm(0)
            socket.linger = 0
        self._to_engine.bind(_address(directory, engine, "in"))
        self._outputs_address = _address(directory, engine, "out")
        self._from_engine.bind(self._outputs_address)
        self._decoder = decoder_for(FromEngine)
        self._fd: int = self._from_engine.FD
        self._loop: asyncio.AbstractEventLoop | None = None  # which watches `_fd`
        self._waiter: asyncio.Future[None] | None = None

    def send(self, message: ToEngine) -> None:
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        """Like `send`, with an encoded message."""
        if self._to_engine.closed:
            return
        try:
            self._to_engine.send(data, zmq.DONTWAIT)
        except zmq.Again:  # the queue has no bound, so this means that nobody is there
            raise EngineDeadError("the engine is not connected") from None

    async def receive_bytes(self) -> bytes:
        """The next message, undecoded: EngineDead too. EngineDeadError once this is closed."""
        while not self._from_engine.closed:
            if self._is_readable():
                return self._from_engine.recv(zmq.DONTWAIT)
            await self._wait_readable()
        raise EngineDeadError("the channel to the engine was closed")

    def _is_readable(self) -> bool:
        """Whether a message is there; if not, `_fd` will become readable when one comes.

        ZMQ_FD does not say that messages are there, but that something has happened since this was
        last asked (zmq_getsockopt(3)). So only ask-then-wait misses nothing, and a descriptor that
        became readable while nobody waits stays so, and would wake the loop at once for ever,
        unless this is asked.
        """
        return bool(int(self._from_engine.get(zmq.EVENTS)) & _POLLIN)

    async def _wait_readable(self) -> None:
        """Wait for a message that was not there just now. Another may be the first to take it."""
        assert self._waiter is None, "the channel has one reader"
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._unwatch()
            self._loop = loop
            loop.add_reader(self._fd, self._on_event)  # and left there: two system calls a message
        self._waiter = loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _on_event(self) -> None:
        if self._is_readable() and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _unwatch(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._loop = None

    async def receive(self) -> FromEngine:
        message: FromEngine = self._decoder.decode(await self.receive_bytes())
        if isinstance(message, EngineDead):
            raise EngineDeadError(message.error, hint="the server must be restarted")
        return message

    def report_death(self, error: str) -> None:
        """Say, from any thread, that the engine process is gone: `receive` will raise.

        It goes through the engine's own socket, so what the engine sent before is read first.
        """
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.linger = 1000  # ms
            socket.connect(self._outputs_address)
            socket.send(encode(EngineDead(error)))

    def close(self) -> None:
        """A reader that waits is told so, if its loop lives."""
        waiter, loop = self._waiter, self._loop
        self._unwatch()  # before the descriptor becomes another file's
        self._to_engine.close()
        self._from_engine.close()
        if waiter is not None and not waiter.done() and loop is not None and not loop.is_closed():
            waiter.set_result(None)
        self._context.term()


class CoreSockets:
    """The engine core's end: `receive_bytes` for its input thread, `send` for its output thread."""

    def __init__(self, directory: Path, engine: int) -> None:
        self._context = zmq.Context()
        self._input = self._context.socket(zmq.PULL)
        self._output = self._context.socket(zmq.PUSH)
        for socket in (self._input, self._output):
            socket.set_hwm(0)
        self._input.linger = 0
        self._output.linger = 2000  # ms: the last outputs still leave at shutdown
        self._input.connect(_address(directory, engine, "in"))
        self._output.connect(_address(directory, engine, "out"))
        self._decoder = decoder_for(ToEngine)

    def receive_bytes(self) -> bytes | None:
        """Block for the next message, undecoded; None once the sockets are closing."""
        try:
            return self._input.recv()
        except zmq.ContextTerminated:
            self._input.close()
            return None

    def decode(self, data: bytes) -> ToEngine:
        """Raises msgspec.DecodeError on anything that is not a message."""
        return self._decoder.decode(data)  # type: ignore[no-any-return]

    def send(self, message: msgspec.Struct) -> None:
        self._output.send(encode(message))

    def close(self) -> None:
        """Call from the output thread: delivers what was sent, and ends `receive_bytes`."""
        self._output.close()
        self._context.term()
