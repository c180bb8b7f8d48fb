"""The core process's input: what cannot be read ends its request, and nothing else."""

import re
from pathlib import Path

import msgspec
import numpy as np
import zmq

from twostroke.config import EngineConfig
from twostroke.messages import (
    AddRequest,
    EngineOutputs,
    FinishReason,
    SamplingParams,
    UtilityCall,
    encode,
)
from twostroke.proc.core_main import CoreLaunch, CoreProcess, StartUp


def test_a_message_that_cannot_be_read_ends_its_request_alone(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
        sender.linger = 0
        sender.bind(f"ipc://{tmp_path}/engine0.in")
        launch = CoreLaunch(EngineConfig(), checkpoint="", directory=str(tmp_path), engine=0)
        process = CoreProcess(launch)
        process.input_thread.start()
        request = AddRequest(
            handle=7,
            request_id="r",
            prompt_token_ids=np.array([1], np.int32),
            params=SamplingParams(),
            max_tokens=1,
        )
        damaged = msgspec.msgpack.decode(encode(request))
        damaged["max_tokens"] = "many"
        for data in (b"\xc1", msgspec.msgpack.encode(damaged), encode(UtilityCall(3, "ping"))):
            sender.send(data)
        outputs = process.outbox.get(timeout=10)
        assert isinstance(outputs, EngineOutputs)
        (finished,) = outputs.finished
        assert (finished.handle, finished.reason) == (7, FinishReason.ERROR)
        assert finished.error is not None
        assert "max_tokens" in finished.error
        assert process.inbox.get(timeout=10) == UtilityCall(3, "ping")
        assert process.outbox.empty()
        process.sockets.close()
        process.input_thread.join(10)
        assert not process.input_thread.is_alive()


def test_the_account_of_a_start_has_each_part_once():
    start_up = StartUp()
    for part in ("torch", "code", "code"):
        start_up.end(part)
    name, total, parts = start_up.fact()
    assert name == "Start"
    assert re.fullmatch(r"\d+\.\d\d s", total)
    assert re.fullmatch(r"torch \d+\.\d\d s, code \d+\.\d\d s", parts)
