"""Clients that go away, over real sockets; and what holds the pieces together."""

import asyncio
import json
import logging
import socket

import pytest

from tests.pure.api.conftest import Server
from twostroke.api.streaming import merge, while_connected
from twostroke.client.engine import RequestOutput

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "x"}]


def dial(server: Server, path: str, fields: dict, *, length: int | None = None) -> socket.socket:
    """A connection that has sent a request (`length`: what it announces) and reads nothing yet."""
    body = json.dumps(fields).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer secret\r\n"
        f"Content-Length: {length or len(body)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall(head.encode() + body)
    return connection


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        piece = connection.recv(65536)
        assert piece, data
        data += piece
    return data


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "fields", "num_open"),
    [
        (CHAT, {"messages": MESSAGES}, 1),
        (CHAT, {"messages": MESSAGES, "n": 3}, 3),
        ("/v1/completions", {"prompt": "abc"}, 1),
        ("/v1/completions", {"prompt": ["abc", "def"], "n": 2}, 4),
    ],
)
@pytest.mark.parametrize("hold_after", [0, 1])
def test_hanging_up_aborts(
    clean_server: Server, caplog, path, fields, num_open, stream, hold_after
):
    core = clean_server.core
    core.hold_after = hold_after
    connection = dial(clean_server, path, {"stream": stream, **fields})
    clean_server.call(core.until(lambda: len(core.added) == num_open))
    if stream and hold_after:
        read_until(connection, b"data: ")
    connection.close()
    clean_server.call(core.until(lambda: core.aborted == num_open))
    assert core.num_open == 0
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_a_reset_while_tokens_flow_aborts(clean_server: Server, caplog):
    """The client dies without reading: no end of stream, a reset."""
    core = clean_server.core
    core.reply = lambda prompt: b"a" * 400
    core.hold_after = 300
    connection = dial(clean_server, CHAT, {"messages": MESSAGES, "stream": True})
    read_until(connection, b"data: ")
    linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # on, 0 s
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    connection.close()
    clean_server.call(core.until(lambda: core.aborted == 1))
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_hanging_up_in_the_middle_of_a_body(clean_server: Server, caplog):
    connection = dial(clean_server, CHAT, {"messages": MESSAGES}, length=9999)
    connection.close()
    whole = dial(clean_server, CHAT, {"messages": MESSAGES})
    assert b"200 OK" in read_until(whole, b"\r\n")
    whole.close()
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


def test_a_connection_serves_one_request_after_another(clean_server: Server):
    connection = dial(clean_server, CHAT, {"messages": MESSAGES, "stream": True})
    read_until(connection, b"0\r\n\r\n")
    for _ in range(2):
        connection.sendall(
            b"GET /v1/models HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer secret\r\n\r\n"
        )
        assert b"200 OK" in read_until(connection, b'"list"')
    connection.close()


async def test_work_ends_before_the_hang_up_is_answered():
    cleaned = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    async def receive():
        return {"type": "http.disconnect"}

    await while_connected(receive, work())
    assert cleaned == [True]


async def test_an_error_of_the_work_is_raised():
    async def work():
        raise ZeroDivisionError

    async def receive():
        await asyncio.Event().wait()

    with pytest.raises(ZeroDivisionError):
        await while_connected(receive, work())


async def test_a_send_to_nobody_is_no_error():
    async def work():
        raise BrokenPipeError

    async def receive():
        await asyncio.Event().wait()

    await while_connected(receive, work())


async def test_merge_ends_all_at_the_first_failure():
    closed = []

    async def outputs(name, fails):
        try:
            yield RequestOutput(index=0, text=name)
            if fails:
                raise ZeroDivisionError
            await asyncio.Event().wait()
        finally:
            closed.append(name)

    seen = []

    async def read():
        async for index, output in merge([outputs("a", False), outputs("b", True)]):
            seen.append((index, output.text))

    with pytest.raises(ZeroDivisionError):
        await read()
    assert seen == [(0, "a"), (1, "b")]
    assert sorted(closed) == ["a", "b"]
