"""Engines made of a few lines, at the one seam where tests of the client need them."""

import asyncio
from collections.abc import Sequence

import numpy as np

from twostroke.errors import EngineDeadError
from twostroke.messages import (
    AbortRequests,
    AddRequest,
    EngineOutputs,
    EngineReady,
    Events,
    Finished,
    FinishReason,
    FromEngine,
    ToEngine,
    decoder_for,
    encode,
)

READY = EngineReady(engine=0, max_model_len=100, num_blocks=65, block_size=16)


def outputs(tokens: dict[int, Sequence[int]], finished=(), events=(), **fields) -> EngineOutputs:
    """A step's outputs: tokens by handle; `finished` and events as tuples."""
    columns = list(zip(*events, strict=True)) or [(), (), ()]
    return EngineOutputs(
        handles=np.array(list(tokens), np.int64),
        num_tokens=np.array([len(ids) for ids in tokens.values()], np.int32),
        token_ids=np.array([i for ids in tokens.values() for i in ids], np.int32),
        finished=[end if isinstance(end, Finished) else Finished(*end) for end in finished],
        events=Events(
            np.array(columns[0], np.int64),
            np.array(columns[1], np.uint8),
            np.array(columns[2], np.float64),
        ),
        **fields,
    )


class ScriptedChannel:
    """Says what the test puts in, and keeps what it was sent."""

    def __init__(self, ready: EngineReady | None = READY) -> None:
        self.sent: list[ToEngine] = []
        self._queue: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        self._decode = decoder_for(FromEngine).decode
        self._to_engine = decoder_for(ToEngine)
        if ready is not None:
            self.say(ready)

    def say(self, message: FromEngine | Exception) -> None:
        self._queue.put_nowait(message if isinstance(message, Exception) else encode(message))

    def send(self, message: ToEngine) -> None:
        self.sent.append(self._to_engine.decode(encode(message)))

    async def receive(self) -> FromEngine:
        message = await self._queue.get()
        if isinstance(message, Exception):
            raise message
        return self._decode(message)

    def close(self) -> None:
        self.say(EngineDeadError("closed"))

    @property
    def added(self) -> list[AddRequest]:
        return [message for message in self.sent if isinstance(message, AddRequest)]

    @property
    def aborted(self) -> list[int]:
        return [h for m in self.sent if isinstance(m, AbortRequests) for h in m.handles]


class EchoChannel(ScriptedChannel):
    """Answers every request with its own prompt, over and over, one token a step."""

    def send(self, message: ToEngine) -> None:
        super().send(message)
        if not isinstance(message, AddRequest):
            return
        prompt = message.prompt_token_ids.tolist()
        for i in range(message.max_tokens):
            last = i + 1 == message.max_tokens
            end = [Finished(message.handle, FinishReason.LENGTH)] if last else []
            self.say(outputs({message.handle: [prompt[i % len(prompt)]]}, end))
