"""Engines on other hosts: the same messages over TCP, encrypted, with both sides known by key.

    server    ROUTER ◀──CURVE over TCP──▶ DEALER    engine
              EngineListener, a JoinedChannel each    ServerLine

Both keep to the pairs derived from one key file (`keys.py`): ZMQ's CURVE handshake fails for
anybody else before a byte of theirs is looked at. A message is two frames, kind and body:

    engine ▶ JOIN(JoinRequest)     server ▶ JOINED(silence_s) | REFUSED(why)
    both   ▶ MESSAGE(as in `messages.py`), BEAT while there is nothing to say
    engine ▶ LEAVE: send me nothing new          server ▶ BYE: nobody needs you any more
    server ▶ STRANGER: you are not (or no longer) one of my engines

Each connection has to join: one that broke and came back is a stranger, for nobody knows what was
lost with it, and the engine begins anew. Either side takes the other for dead once it has been
silent for `silence_s`, which the server decides.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import NoReturn

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from twostroke.clock import Clock, WallClock
from twostroke.config import Role
from twostroke.errors import ConfigError, EngineDeadError
from twostroke.keys import SharedKey
from twostroke.messages import EngineDead, EngineReady, FromEngine, ToEngine, decoder_for, encode

logger = logging.getLogger("twostroke")

JOIN, JOINED, REFUSED = b"join", b"joined", b"refused"
MESSAGE, BEAT, LEAVE, BYE, STRANGER = b"message", b"beat", b"leave", b"bye", b"stranger"

# Far above any message of ours (a prompt of a million tokens is 4 MB).
MAX_MESSAGE_BYTES = 64 << 20
BEATS = 5  # in `silence_s`: so many would have to be lost
HANDSHAKE_MS = 5_000  # a connection that says nothing is dropped after this
ASK_AGAIN_S = 2.0  # for an answer that was lost with its connection
FAILED_HANDSHAKES = 3  # after which the key is wrong; one may fail because the server ends


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Who wants to join. `engine_id` is random for each start, `model` as of `checkpoint`."""

    version: str
    engine_id: str
    role: Role
    model: str
    model_name: str
    kv_transport: str
    host: str  # these two are for people
    pid: int


class _Version(msgspec.Struct):
    """What can be read of a request to join from any version."""

    version: str = "unknown"


def _set_options(socket: zmq.asyncio.Socket) -> None:
    socket.set_hwm(0)
    socket.linger = 0
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.IPV6, 1)


def _send_now(socket: zmq.asyncio.Socket, frames: list[bytes]) -> None:
    """Queue a message without waiting. Raises ZMQError when that cannot be."""
    sent = socket.send_multipart(frames, zmq.DONTWAIT)
    assert isinstance(sent, asyncio.Future)
    sent.result()  # with DONTWAIT it is there already


def endpoint(host: str, port: int) -> str:
    """The address in ZMQ's words."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


# ---------------------------------------------------------------- the server's end


class JoinedChannel:
    """The API process's end of the line to an engine that has joined: an `EngineChannel`.

    `number` is the engine's in this server; whoever adds it there sets it. `leaving` is set once
    the engine has asked to be sent nothing new.
    """

    def __init__(self, listener: "EngineListener", identity: bytes, request: JoinRequest) -> None:
        self.request = request
        self.number = 0
        self.leaving = asyncio.Event()
        self.heard_s = 0.0
        self._listener = listener
        self.identity = identity
        self._queue: asyncio.Queue[FromEngine] = asyncio.Queue()
        self._dead = ""

    def __str__(self) -> str:
        it = self.request
        return f"engine {it.engine_id[:8]} ({it.role}, process {it.pid} on {it.host})"

    def send(self, message: ToEngine) -> None:
        """Queue a message; never blocks. EngineDeadError when it is gone."""
        if self._dead:
            raise EngineDeadError(self._dead)
        if not self._listener.send(self.identity, MESSAGE, encode(message)):
            self.die("its connection is gone")
            raise EngineDeadError(self._dead)

    async def receive(self) -> FromEngine:
        """The next message. Raises EngineDeadError once the engine is gone."""
        if self._dead and self._queue.empty():
            raise EngineDeadError(self._dead)
        message = await self._queue.get()
        if isinstance(message, EngineDead):
            raise EngineDeadError(message.error)
        if isinstance(message, EngineReady):
            message.engine = self.number
        return message

    def close(self) -> None:
        """Nobody needs the engine any more: let it know, and forget it."""
        self._end("it has left", BYE)

    def put(self, message: FromEngine) -> None:
        """For the listener: a message has come."""
        if isinstance(message, EngineDead):
            self.die(message.error)
        else:
            self._queue.put_nowait(message)

    def die(self, why: str) -> None:
        """`receive` raises this after what has come before. What the engine still says is void."""
        self._end(why, STRANGER)

    def _end(self, why: str, farewell: bytes) -> None:
        if not self._dead:
            self._dead = f"{self}: {why}"
            self._queue.put_nowait(EngineDead(self._dead))
            self._listener.forget(self.identity, farewell)


class EngineListener:
    """Where engines join. Belongs to one event loop; `start` on it, `close` at the end.

    `check` says why an engine is not wanted (empty: it is), `check_ready` the same once it has
    loaded; `on_join` gets the channel of each that is taken. Raises ConfigError when the address
    cannot be had. `port` is the one bound (0: any free one).
    """

    def __init__(
        self,
        host: str,
        port: int,
        key: SharedKey,
        *,
        check: Callable[[JoinRequest], str],
        check_ready: Callable[[JoinedChannel, EngineReady], str],
        on_join: Callable[[JoinedChannel], None],
        silence_s: float,
        clock: Clock | None = None,
    ) -> None:
        self._check, self._check_ready, self._on_join = check, check_ready, on_join
        self._silence_s, self._terms = silence_s, msgspec.msgpack.encode(silence_s)
        self._clock = clock or WallClock()
        self._decoder = decoder_for(FromEngine)
        self._channels: dict[bytes, JoinedChannel] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._context = zmq.asyncio.Context()
        self._authenticator = ThreadAuthenticator(zmq.Context(self._context))
        self._router = self._context.socket(zmq.ROUTER)
        try:
            self._authenticator.start()
            # The callback gets the key in Z85; domain "*" is every socket of this context.
            self._authenticator.configure_curve_callback("*", _OnlyThisKey(key.engine.public))
            _set_options(self._router)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._router.curve_secretkey = key.server.secret
            self._router.curve_publickey = key.server.public
            self._router.curve_server = True
            self._router.bind(endpoint("*" if host == "0.0.0.0" else host, port))
        except zmq.ZMQError as error:
            self._close_sockets()
            raise ConfigError(
                f"engines cannot join at {host}:{port}: {error.strerror}",
                hint="choose another address with --engines-listen",
            ) from None
        bound = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(bound.rstrip("\0").rpartition(":")[2])

    def start(self) -> None:
        """Begin to take engines."""
        self._tasks = [
            asyncio.create_task(self._receive_all(), name="engines over TCP"),
            asyncio.create_task(self._beat(), name="heart-beats"),
        ]

    async def close(self) -> None:
        """Take no more, and let those that have joined know that the server ends."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._router.linger = 500  # ms, for the farewells
        for channel in list(self._channels.values()):
            channel.close()
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._router.close()
        self._authenticator.stop()
        self._context.term()

    def send(self, identity: bytes, kind: bytes, body: bytes = b"") -> bool:
        """Queue a message; False when there is no such connection (any more)."""
        if self._router.closed:
            return False
        try:
            _send_now(self._router, [identity, kind, body])
        except zmq.ZMQError:  # no such peer
            return False
        return True

    def forget(self, identity: bytes, farewell: bytes) -> None:
        """The channel is closed or dead. What it still says is answered with STRANGER."""
        if self._channels.pop(identity, None) is not None:
            self.send(identity, farewell)

    async def _receive_all(self) -> None:
        while True:
            identity, *frames = await self._router.recv_multipart()
            if len(frames) != 2:
                self._drop(identity, f"it sent {len(frames)} frames where 2 are due")
                continue
            try:
                self._on_frame(identity, frames[0], frames[1])
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self._drop(identity, f"it sent something that is not a message: {error}")

    def _drop(self, identity: bytes, why: str) -> None:
        if (channel := self._channels.get(identity)) is not None:
            channel.die(why)
        else:
            self.send(identity, STRANGER)

    def _on_frame(self, identity: bytes, kind: bytes, body: bytes) -> None:
        channel = self._channels.get(identity)
        if kind == JOIN:
            self._on_join_request(identity, body)
        elif channel is None:
            self.send(identity, STRANGER)
        else:
            channel.heard_s = self._clock.now()
            if kind == MESSAGE:
                self._on_message(channel, self._decoder.decode(body))
            elif kind == LEAVE:
                channel.leaving.set()
            elif kind != BEAT:
                channel.die(f"it sent a message of kind {kind[:16]!r}")

    def _on_message(self, channel: JoinedChannel, message: FromEngine) -> None:
        if isinstance(message, EngineReady) and (why := self._check_ready(channel, message)):
            logger.error("%s is refused: %s", channel, why)
            self.send(channel.identity, REFUSED, why.encode())
            channel.die(why)
        else:
            channel.put(message)

    def _on_join_request(self, identity: bytes, body: bytes) -> None:
        from twostroke import __version__

        if identity in self._channels:  # asked twice, because our answer took its time
            self.send(identity, JOINED, self._terms)
            return
        version = msgspec.msgpack.decode(body, type=_Version).version
        if version != __version__:
            why = f"the engine is version {version[:32]} and this server {__version__}"
        else:
            request = msgspec.msgpack.decode(body, type=JoinRequest)
            why = self._check(request)
        if why:
            logger.error("an engine is refused: %s", why)
            self.send(identity, REFUSED, why.encode())
            return
        for other in list(self._channels.values()):
            if other.request.engine_id == request.engine_id:
                other.die("it has joined again over a new connection")
        channel = JoinedChannel(self, identity, request)
        channel.heard_s = self._clock.now()
        if self.send(identity, JOINED, self._terms):
            self._channels[identity] = channel
            self._on_join(channel)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._silence_s / BEATS)
            now_s = self._clock.now()
            for identity, channel in list(self._channels.items()):
                if now_s - channel.heard_s > self._silence_s:
                    channel.die(f"it was silent for {self._silence_s:g} s")
                elif not self.send(identity, BEAT):
                    channel.die("its connection is gone")


class _OnlyThisKey:
    """What ZMQ's authenticator asks about a client's key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


# ---------------------------------------------------------------- the engine's end


class ServerLostError(Exception):
    """The line to the server is of no use any more; a new one may be."""


class ServerLine:
    """The engine's end: `join`, then `send` and `receive`. Sending never waits.

    `silence_s` is the server's word once joined: `beat` BEATS times as often.
    """

    def __init__(self, host: str, port: int, key: SharedKey) -> None:
        self.address = f"{host}:{port}"
        self.silence_s = 0.0
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _set_options(self._socket)
        self._socket.curve_serverkey = key.server.public
        self._socket.curve_secretkey = key.engine.secret
        self._socket.curve_publickey = key.engine.public
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        try:
            self._socket.connect(endpoint(host, port))
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot join {self.address}: {error.strerror}") from None

    async def join(self, request: JoinRequest) -> None:
        """Return once the server has taken us; waits for a server that is not there.

        Raises ConfigError when it refuses, with its reason, or when the handshake fails.
        """
        body = msgspec.msgpack.encode(request)
        refusal = asyncio.create_task(self._failed_handshakes())
        try:
            while True:
                _send_now(self._socket, [JOIN, body])
                answer = asyncio.ensure_future(self._socket.recv_multipart())
                done, _ = await asyncio.wait(
                    [answer, refusal],
                    timeout=ASK_AGAIN_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if refusal in done:
                    answer.cancel()
                    raise ConfigError(
                        f"{self.address} does not accept our key, or is no twostroke server",
                        hint="server and engine need the same --key file",
                    )
                if answer in done:
                    kind, text = answer.result()[:2]
                    if kind == JOINED:
                        self.silence_s = msgspec.msgpack.decode(text, type=float)
                        return
                    if kind == REFUSED:
                        self._refused(text)
                answer.cancel()
        finally:
            refusal.cancel()

    async def _failed_handshakes(self) -> None:
        for _ in range(FAILED_HANDSHAKES):
            event = await recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # ZMQ does not try again
                return

    def _refused(self, why: bytes) -> NoReturn:
        raise ConfigError(f"{self.address} refuses this engine: {why.decode(errors='replace')}")

    def send(self, body: bytes) -> None:
        """Queue an encoded message of the engine's."""
        _send_now(self._socket, [MESSAGE, body])

    def beat(self) -> None:
        """Say that the engine lives."""
        _send_now(self._socket, [BEAT, b""])

    def leave(self) -> None:
        """Ask to be sent nothing new; `receive` ends once the server can do without us."""
        _send_now(self._socket, [LEAVE, b""])

    async def receive(self) -> bytes | None:
        """The next encoded message for the engine; None when the server says farewell.

        Raises ServerLostError, and ConfigError when it refuses the engine after all.
        """
        while True:
            try:
                async with asyncio.timeout(self.silence_s):
                    kind, body = (await self._socket.recv_multipart())[:2]
            except TimeoutError:
                raise ServerLostError(f"it was silent for {self.silence_s:g} s") from None
            if kind == MESSAGE:
                return body
            if kind == BYE:
                return None
            if kind == REFUSED:
                self._refused(body)
            if kind == STRANGER:
                raise ServerLostError("it does not know this engine (any more)")

    def close(self, *, linger_s: float = 0.0) -> None:
        """Drop the line; what is not sent yet has `linger_s` to leave. Idempotent."""
        if not self._socket.closed:
            self._socket.linger = round(linger_s * 1000)
            with contextlib.suppress(zmq.ZMQError):
                self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()
            self._context.term()
