"""The two ends of the line between API process and engine core."""

import threading
from pathlib import Path

import pytest

from twostroke.errors import EngineDeadError
from twostroke.messages import Shutdown
from twostroke.transport import CoreSockets, ZmqEngineChannel


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
