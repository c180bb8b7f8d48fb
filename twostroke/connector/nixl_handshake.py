"""How a reader gets to know another engine's memory: a short exchange over a stream socket.

    reader  Hello(whom it wants, nonce) ──────────▶ server
    reader ◀─────────────────── Challenge(nonce)     server
    reader  Proof(MAC of both nonces) ────────────▶ server   else it hangs up
    reader ◀── Answer(Offer or error, MAC of both nonces and it) server

An address is `@name`, an abstract unix socket for processes of the same user on the same host, or
`host:port`. The latter needs a key that both ends share; neither end tells anything to one that
does not have it. Nothing is encrypted here, nor is the data that UCX moves: that is for a private
network.
"""

import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from twostroke.config_values import parse_address
from twostroke.connector.base import TransferError
from twostroke.errors import ConfigError

TIMEOUT_S = 10.0
MAX_MESSAGE_BYTES = 1 << 20
MAX_CONNECTIONS = 64
_LOOK_S = 0.2
_NONCE_BYTES = 32


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What can be read: a pool at `address`, and lease words."""

    agent: bytes  # NIXL's metadata
    address: int
    num_bytes: int
    device: str
    lease_address: int
    num_leases: int


class Hello(msgspec.Struct, frozen=True):
    engine_id: str
    nonce: bytes


class Challenge(msgspec.Struct, frozen=True):
    nonce: bytes


class Proof(msgspec.Struct, frozen=True):
    mac: bytes


class Answer(msgspec.Struct, frozen=True):
    body: bytes  # an Outcome, as the MAC is of these bytes
    mac: bytes


class Outcome(msgspec.Struct, frozen=True):
    offer: Offer | None = None
    error: str = ""


def listen(host: str, engine_id: str) -> tuple[socket.socket, str]:
    """A listening socket and its address; an empty host: this host and user alone.

    Raises ConfigError.
    """
    if not host:
        name = f"twostroke-kv-{engine_id}-{secrets.token_hex(4)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0" + name)
        listener.listen()
        return listener, "@" + name
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {host} for readers of KV: {error.strerror or error}",
            hint="--kv-host is an address of this host",
        ) from None
    port = listener.getsockname()[1]
    return listener, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def ask(address: str, engine_id: str, key: bytes) -> Offer:
    """Shake hands with the engine at an address. Raises TransferError."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    try:
        with _Stream(_dial(address)) as stream:
            stream.send(Hello(engine_id, nonce))
            theirs = stream.receive(Challenge).nonce
            stream.send(Proof(_mac(key, b"reader", nonce, theirs)))
            answer = stream.receive(Answer)
        if not hmac.compare_digest(answer.mac, _mac(key, b"server", nonce, theirs, answer.body)):
            raise OSError("who answers does not have the key of this deployment")
        outcome = msgspec.msgpack.decode(answer.body, type=Outcome)
    except (OSError, msgspec.DecodeError, ConfigError) as error:
        raise TransferError(f"no handshake at {address}: {error}") from None
    if outcome.offer is None:
        raise TransferError(f"refused at {address}: {outcome.error}")
    return outcome.offer


def serve(
    listener: socket.socket, engine_id: str, key: bytes, offer: Offer, is_over: Callable[[], bool]
) -> None:
    """Answer readers until `is_over`, each in a thread, so that a slow one delays nobody.

    Whatever a stranger sends or does not send costs one of a few threads for a few seconds.
    """
    slots = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def answer(connection: socket.socket) -> None:
        try:
            with _Stream(connection) as stream:
                _answer(stream, engine_id, key, offer)
        except (OSError, msgspec.DecodeError):
            return
        finally:
            slots.release()

    listener.settimeout(_LOOK_S)
    while not is_over():
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        except OSError:  # closed, or out of descriptors: which are there again in a moment
            time.sleep(_LOOK_S)
            continue
        if slots.acquire(blocking=False):
            threading.Thread(target=answer, args=(connection,), daemon=True).start()
        else:
            connection.close()


def _answer(stream: "_Stream", engine_id: str, key: bytes, offer: Offer) -> None:
    if not stream.is_ours():
        return
    hello = stream.receive(Hello)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    stream.send(Challenge(nonce))
    proof = stream.receive(Proof)
    if not hmac.compare_digest(proof.mac, _mac(key, b"reader", hello.nonce, nonce)):
        return
    if hello.engine_id == engine_id:
        outcome = Outcome(offer=offer)
    else:
        outcome = Outcome(error=f"this is engine {engine_id}, not {hello.engine_id}")
    body = msgspec.msgpack.encode(outcome)
    stream.send(Answer(body, _mac(key, b"server", hello.nonce, nonce, body)))


def _dial(address: str) -> socket.socket:
    if not address.startswith("@"):
        return socket.create_connection(parse_address(address, "address"), TIMEOUT_S)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(TIMEOUT_S)
    try:
        connection.connect("\0" + address[1:])
    except OSError:
        connection.close()
        raise
    return connection


def _mac(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over parts that cannot run into each other."""
    framed = b"".join(len(part).to_bytes(8, "big") + part for part in (b"twostroke-kv", *parts))
    return hmac.digest(key, framed, "sha256")


_Message = TypeVar("_Message", bound=msgspec.Struct)


class _Stream:
    """Messages over a socket, all of them within TIMEOUT_S. Raises OSError."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline_s = time.monotonic() + TIMEOUT_S

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *exception: object) -> None:
        self._connection.close()

    def is_ours(self) -> bool:
        """False: it comes from another user of this host."""
        if self._connection.family != socket.AF_UNIX:
            return True
        size = struct.calcsize("3i")
        credentials = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return int(struct.unpack("3i", credentials)[1]) == os.geteuid()

    def send(self, message: msgspec.Struct) -> None:
        body = msgspec.msgpack.encode(message)
        self._set_timeout()
        self._connection.sendall(len(body).to_bytes(4, "big") + body)

    def receive(self, kind: type[_Message]) -> _Message:
        size = int.from_bytes(self._exactly(4), "big")
        if size > MAX_MESSAGE_BYTES:
            raise OSError(f"a message of {size:,} bytes; at most {MAX_MESSAGE_BYTES:,}")
        return msgspec.msgpack.decode(self._exactly(size), type=kind)

    def _exactly(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            self._set_timeout()
            part = self._connection.recv(size - len(received))
            if not part:
                raise OSError("the other end hung up, as it does when it lacks the key")
            received += part
        return bytes(received)

    def _set_timeout(self) -> None:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"no answer within {TIMEOUT_S:g} s")
        self._connection.settimeout(left_s)
