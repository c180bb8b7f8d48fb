"""The exchange by which readers get to know a memory: who is told, and who is not."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from twostroke.connector import nixl_handshake
from twostroke.connector.base import TransferError
from twostroke.connector.nixl import NixlTransport
from twostroke.connector.nixl_handshake import Offer, ask, listen, serve
from twostroke.errors import ConfigError

OFFER = Offer(
    agent=b"metadata", address=1, num_bytes=2, device="cpu", lease_address=3, num_leases=4
)


@contextlib.contextmanager
def serving(host: str, key: bytes) -> Iterator[str]:
    listener, address = listen(host, "one")
    is_over = threading.Event()
    thread = threading.Thread(target=serve, args=(listener, "one", key, OFFER, is_over.is_set))
    thread.start()
    yield address
    is_over.set()
    thread.join()
    listener.close()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_handshake, "TIMEOUT_S", 2.0)
    monkeypatch.setattr(nixl_handshake, "_LOOK_S", 0.01)


@pytest.mark.parametrize(("host", "key"), [("", b""), ("127.0.0.1", b"key"), ("::1", b"key")])
def test_who_has_the_key_is_told(host: str, key: bytes):
    with serving(host, key) as address:
        assert address.startswith("@" if not host else "[::1]:" if ":" in host else "127.0.0.1:")
        assert ask(address, "one", key) == OFFER


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_who_has_another_key_is_told_nothing(host: str):
    with serving(host, b"key") as address:
        for key in (b"", b"kez"):
            with pytest.raises(TransferError, match="hung up, as it does when it lacks the key"):
                ask(address, "one", key)
        assert ask(address, "one", b"key") == OFFER


def test_another_engine_at_the_address():
    with (
        serving("", b"") as address,
        pytest.raises(TransferError, match="this is engine one, not two"),
    ):
        ask(address, "two", b"")


def test_other_users_are_told_nothing(monkeypatch: pytest.MonkeyPatch):
    user = os.geteuid()
    with serving("", b"") as address:
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        with pytest.raises(TransferError, match="no handshake"):
            ask(address, "one", b"")


def impostor(*answers: msgspec.Struct) -> tuple[str, threading.Thread]:
    """The address of somebody who says these things, whatever it is told."""
    listener, address = listen("", "one")

    def answer() -> None:
        with listener, listener.accept()[0] as stream:
            for it in answers:
                stream.recv(4096)
                body = msgspec.msgpack.encode(it)
                stream.sendall(len(body).to_bytes(4, "big") + body)
            stream.recv(4096)

    thread = threading.Thread(target=answer)
    thread.start()
    return address, thread


def test_a_server_without_the_key_is_not_believed():
    body = msgspec.msgpack.encode(nixl_handshake.Outcome(offer=OFFER))
    address, thread = impostor(
        nixl_handshake.Challenge(b"nonce"), nixl_handshake.Answer(body, b"mac")
    )
    with pytest.raises(TransferError, match="does not have the key of this deployment"):
        ask(address, "one", b"key")
    thread.join()


def test_a_server_that_speaks_otherwise_is_an_error():
    address, thread = impostor(nixl_handshake.Proof(b"mac"))
    with pytest.raises(TransferError, match="missing required field `nonce`"):
        ask(address, "one", b"key")
    thread.join()


def test_a_server_that_is_silent_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nixl_handshake, "TIMEOUT_S", 0.1)
    with listen("", "one")[0] as listener:
        address = "@" + listener.getsockname()[1:].decode()
        with pytest.raises(TransferError, match=r"no handshake at @.*(timed out|within 0.1 s)"):
            ask(address, "one", b"key")


@pytest.mark.parametrize(
    "address", ["@twostroke-kv-nobody", "127.0.0.1:1", "127.0.0.1", "", "host:port", "[::1"]
)
def test_nobody_at_the_address(address: str):
    with pytest.raises(TransferError, match="no handshake at"):
        ask(address, "one", b"")


def test_strangers_delay_nobody_and_break_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nixl_handshake, "MAX_CONNECTIONS", 8)
    with serving("127.0.0.1", b"key") as address, contextlib.ExitStack() as strangers:
        host, _, port = address.rpartition(":")
        where = (host, int(port))
        for sent in (b"", b"\x00", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 100, b"\x00\x00\x00\x01x"):
            stream = strangers.enter_context(socket.create_connection(where))
            stream.sendall(sent)
            assert ask(address, "one", b"key") == OFFER
        # More than it has threads for: the rest is refused, until the silent ones were hung up on.
        for _ in range(8):
            strangers.enter_context(socket.create_connection(where))
        with pytest.raises(TransferError, match="no handshake"):
            ask(address, "one", b"key")
        strangers.close()
        for _ in range(100):
            with contextlib.suppress(TransferError):
                assert ask(address, "one", b"key") == OFFER
                break
        else:
            pytest.fail("it does not recover")


def test_a_host_needs_a_key_and_must_be_ours():
    with pytest.raises(ConfigError, match="there is no key to know its readers by"):
        NixlTransport(host="127.0.0.1")
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.1 for readers of KV"):
        listen("192.0.2.1", "one")
