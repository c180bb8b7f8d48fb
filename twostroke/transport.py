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
import zmq.asyncio

from twostroke.messages import FromEngine, ToEngine, decoder_for, encode


class EngineChannel(Protocol):
    """The API process's end of the line to one engine."""

    def send(self, message: ToEngine) -> None:
        """Queue a message; never blocks."""
        ...

    async def receive(self) -> FromEngine:
        """The next message. Raises EngineDeadError once the engine is gone."""
        ...

    def close(self) -> None:
        """Drop both sockets. Further sends are ignored."""
        ...


def _address(directory: Path, engine: int, direction: str) -> str:
    return f"ipc://{directory}/engine{engine}.{direction}"


class ZmqEngineChannel:
    """The API process's end over ZMQ. Make it before the engine process starts (it binds)."""

    def __init__(self, directory: Path, engine: int) -> None:
        self._context = zmq.asyncio.Context()
        self._to_engine = zmq.Context.shadow(self._context.underlying).socket(zmq.PUSH)
        self._from_engine = self._context.socket(zmq.PULL)
        for socket in (self._to_engine, self._from_engine):
            socket.set_hwm(0)
            socket.linger = 0
        self._to_engine.bind(_address(directory, engine, "in"))
        self._from_engine.bind(_address(directory, engine, "out"))
        self._decoder = decoder_for(FromEngine)
        self._dead: asyncio.Future[None] | None = None
        self._death: Exception | None = None

    def send(self, message: ToEngine) -> None:
        if not self._to_engine.closed:
            self._to_engine.send(encode(message), zmq.DONTWAIT)

    def mark_dead(self, error: Exception) -> None:
        """Make `receive` raise `error` once what has already arrived is read."""
        self._death = error
        if self._dead is not None and not self._dead.done():
            self._dead.set_result(None)

    async def receive(self) -> FromEngine:
        if self._dead is None:
            self._dead = asyncio.get_running_loop().create_future()
            if self._death is not None:
                self._dead.set_result(None)
        while True:
            if self._death is None:
                data = asyncio.ensure_future(self._from_engine.recv())
                try:
                    await asyncio.wait({data, self._dead}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not data.done():
                        data.cancel()
                if data.done() and not data.cancelled():
                    return self._decoder.decode(data.result())  # type: ignore[no-any-return]
            elif await self._from_engine.poll(0):
                return self._decoder.decode(await self._from_engine.recv())  # type: ignore[no-any-return]
            else:
                raise self._death

    def close(self) -> None:
        self._to_engine.close()
        self._from_engine.close()
        self._context.term()


class CoreSockets:
    """The engine core's end: `receive` for its input thread, `send` for its output thread."""

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
        except (zmq.ContextTerminated, zmq.ZMQError):
            return None

    def decode(self, data: bytes) -> ToEngine:
        """Raises msgspec.DecodeError on anything that is not a message."""
        return self._decoder.decode(data)  # type: ignore[no-any-return]

    def send(self, message: msgspec.Struct) -> None:
        self._output.send(encode(message))

    def close_output(self) -> None:
        """Call from the output thread; what was sent is still delivered."""
        self._output.close()
