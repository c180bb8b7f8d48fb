"""The two ends of the line between API process and engine core."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq

from twostroke.errors import EngineDeadError
from twostroke.messages import Shutdown, UtilityReply, encode
from twostroke.transport import CoreSockets, ZmqEngineChannel

LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
Run = Callable[[Any], Any]
TIMEOUT_S = 20  # of what would hang


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[ZmqEngineChannel]:
    it = ZmqEngineChannel(tmp_path, 0)
    yield it
    it.close()


class Sender:
    """A plain socket in the engine's place."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.set_hwm(0)
        self._socket.connect(f"ipc://{directory}/engine0.out")
        self._next = 0

    def send(self, count: int = 1) -> None:
        for _ in range(count):
            self._socket.send(encode(UtilityReply(self._next)))
            self._next += 1

    def close(self) -> None:
        """Returns once everything was handed over to the kernel."""
        self._context.destroy()


@pytest.fixture
def sender(tmp_path: Path, channel: ZmqEngineChannel) -> Iterator[Sender]:
    it = Sender(tmp_path)
    yield it
    it.close()


async def receive_ids(channel: ZmqEngineChannel, count: int) -> list[int]:
    ids = []
    async with asyncio.timeout(TIMEOUT_S):
        for _ in range(count):
            message = await channel.receive()
            assert isinstance(message, UtilityReply)
            ids.append(message.call_id)
    return ids


@LOOPS
def test_a_burst_before_anybody_reads_is_received_in_order(
    run: Run, channel: ZmqEngineChannel, sender: Sender
) -> None:
    sender.send(3000)
    sender.close()
    assert run(receive_ids(channel, 3000)) == list(range(3000))


@LOOPS
def test_no_wake_up_is_lost_while_the_peer_sends(
    run: Run, channel: ZmqEngineChannel, sender: Sender
) -> None:
    thread = threading.Thread(target=sender.send, args=(5000,))
    thread.start()
    assert run(receive_ids(channel, 5000)) == list(range(5000))
    thread.join()


@LOOPS
def test_what_is_sent_while_a_message_is_handled_wakes_the_reader(
    run: Run, channel: ZmqEngineChannel, sender: Sender
) -> None:
    async def echo() -> None:
        sender.send()
        for i in range(200):
            assert await receive_ids(channel, 1) == [i]
            sender.send(1 + i % 2)  # so that now it waits, and now there is one already
            if i % 3 == 0:
                await asyncio.sleep(0)

    run(echo())


@LOOPS
def test_a_message_that_nobody_waits_for_does_not_keep_the_loop_busy(
    run: Run, channel: ZmqEngineChannel, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = 0
    come = asyncio.Event()
    on_event = channel._on_event

    def count() -> None:
        nonlocal events
        events += 1
        on_event()
        come.set()

    monkeypatch.setattr(channel, "_on_event", count)

    async def idle() -> None:
        with pytest.raises(TimeoutError):  # there was a reader, but it went away
            await asyncio.wait_for(channel.receive(), 0.01)
        sender.send()
        async with asyncio.timeout(TIMEOUT_S):
            await come.wait()
        for _ in range(100):  # turns of the loop
            await asyncio.sleep(0)
        assert events < 10
        assert await receive_ids(channel, 1) == [0]

    run(idle())


@LOOPS
def test_a_cancelled_reader_loses_nothing(
    run: Run, channel: ZmqEngineChannel, sender: Sender
) -> None:
    async def cancel() -> None:
        for i in range(50):
            reader = asyncio.create_task(channel.receive())
            await asyncio.sleep(0)  # it waits
            sender.send()
            if i % 2:  # cancelled when it has been woken
                waiter = channel._waiter
                async with asyncio.timeout(TIMEOUT_S):
                    while waiter is not None and not waiter.done():
                        await asyncio.sleep(0)
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader
            assert reader.cancelled() or i % 2
            if reader.cancelled():
                assert await receive_ids(channel, 1) == [i]

    run(cancel())


@LOOPS
def test_closing_ends_a_wait(run: Run, channel: ZmqEngineChannel) -> None:
    async def close() -> None:
        reader = asyncio.create_task(channel.receive())
        await asyncio.sleep(0)
        channel.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await asyncio.wait_for(reader, TIMEOUT_S)
        with pytest.raises(EngineDeadError, match="closed"):
            await channel.receive()

    run(close())


@LOOPS
def test_the_loop_may_end_first_and_another_read_on(
    run: Run, channel: ZmqEngineChannel, sender: Sender
) -> None:
    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(channel.receive(), 0.01)

    run(give_up())
    sender.send(2)
    assert run(receive_ids(channel, 2)) == [0, 1]
    run(give_up())
    channel.close()


@LOOPS
def test_a_reported_death_comes_after_what_was_sent(
    run: Run, channel: ZmqEngineChannel, sender: Sender
) -> None:
    async def die() -> None:
        sender.send(3)
        assert await receive_ids(channel, 3) == [0, 1, 2]
        reader = asyncio.create_task(channel.receive())
        await asyncio.sleep(0)
        thread = threading.Thread(target=channel.report_death, args=("it was killed",))
        thread.start()
        with pytest.raises(EngineDeadError, match="killed"):
            await asyncio.wait_for(reader, TIMEOUT_S)
        thread.join()

    run(die())


def test_nothing_is_sent_before_the_engine_has_connected(tmp_path: Path) -> None:
    channel = ZmqEngineChannel(tmp_path, 0)
    with pytest.raises(EngineDeadError, match="not connected"):
        channel.send(Shutdown())
    core = CoreSockets(tmp_path, 0)
    while True:  # it connects in the background
        try:
            channel.send(Shutdown(1.5))
            break
        except EngineDeadError:
            continue
    data = core.receive_bytes()
    assert data is not None
    assert core.decode(data) == Shutdown(1.5)
    closing = threading.Thread(target=core.close)
    closing.start()
    assert core.receive_bytes() is None
    closing.join(10)
    assert not closing.is_alive()
    channel.close()
    channel.send(Shutdown())  # after the end: ignored
