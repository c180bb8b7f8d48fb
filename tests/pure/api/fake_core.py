"""An engine core behind an in-process channel, which says what a test wants it to say."""

import asyncio
from collections.abc import Callable

import numpy as np

from twostroke.errors import EngineDeadError
from twostroke.messages import (
    AbortRequests,
    AddRequest,
    EngineOutputs,
    EngineReady,
    Finished,
    FinishReason,
    FromEngine,
    PrefillInfo,
    RequestLogprobs,
    ToEngine,
    TokenLogprobs,
    UtilityCall,
    UtilityReply,
)

EOS = 257  # ByteTokenizer's
CACHED_TOKENS = 2
MAX_MODEL_LEN = 512


def logprobs_of(token_id: int, k: int) -> TokenLogprobs:
    """The chosen token second best, after "A"; then "B" and so on."""
    others = list(range(65, 65 + k))
    return TokenLogprobs(
        [token_id, *others], [-1.0, *[-0.5 - 2 * i for i in range(k)]], 2 if k else 1
    )


class FakeCore:
    """Answers every prompt with `reply(prompt bytes)`, `tokens_per_step` bytes a step, then EOS.

    `hold_after` is the number of tokens after which it falls silent until the request is aborted;
    `fail_after` the number after which it ends the request with an error. `late_turns` is how many
    turns of the loop the very first request starts late.
    """

    def __init__(self, reply: Callable[[bytes], bytes] = lambda prompt: prompt) -> None:
        self.reply = reply
        self.tokens_per_step = 1
        self.hold_after: int | None = None
        self.fail_after: int | None = None
        self.late_turns = 0
        self.added: list[AddRequest] = []
        self.aborted = 0
        self.calls_answered = True
        self._outbox: asyncio.Queue[FromEngine | Exception] = asyncio.Queue()
        self._open: dict[int, asyncio.Task[None]] = {}
        self._watchers: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a message or the end of a request makes `condition` true."""
        if not condition():
            watcher = asyncio.get_running_loop().create_future()
            self._watchers.append((condition, watcher))
            await watcher

    def _changed(self) -> None:
        for condition, watcher in self._watchers:
            if not watcher.done() and condition():
                watcher.set_result(None)

    def become_ready(self) -> None:
        self._outbox.put_nowait(EngineReady(0, MAX_MODEL_LEN, 1000, 16, [("fact", "1", "so")]))

    def die(self) -> None:
        self._outbox.put_nowait(EngineDeadError("the engine core exited with code 9"))

    def send(self, message: ToEngine) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(message, AddRequest):
            self.added.append(message)
            self._open[message.handle] = loop.create_task(self._run(message))
        elif isinstance(message, AbortRequests):
            for handle in message.handles:
                if (task := self._open.pop(handle, None)) is not None:
                    task.cancel()
                    self.aborted += 1
        elif isinstance(message, UtilityCall) and self.calls_answered:
            result = [{"request_id": add.request_id} for add in self.added]
            self._outbox.put_nowait(UtilityReply(message.call_id, result))
        self._changed()

    async def receive(self) -> FromEngine:
        message = await self._outbox.get()
        if isinstance(message, Exception):
            raise message
        return message

    def close(self) -> None:
        """Nothing to drop."""

    async def _run(self, add: AddRequest) -> None:
        prompt = bytes(int(i) for i in add.prompt_token_ids if i < 256)
        tokens = [*self.reply(prompt), EOS]
        ends = FinishReason.STOP
        if len(tokens) > add.max_tokens:
            tokens, ends = tokens[: add.max_tokens], FinishReason.LENGTH
        for _ in range(self.late_turns if add is self.added[0] else 0):
            await asyncio.sleep(0)
        at = 0
        while at < len(tokens):
            await asyncio.sleep(0)
            if self.hold_after is not None and at >= self.hold_after:
                await asyncio.Event().wait()
            if self.fail_after is not None and at >= self.fail_after:
                failed = Finished(add.handle, FinishReason.ERROR, error="logits are not finite")
                self._put(add, [], failed, at)
                break
            step = tokens[at : at + self.tokens_per_step]
            is_last = at + len(step) == len(tokens)
            self._put(add, step, Finished(add.handle, ends) if is_last else None, at)
            at += len(step)
        self._open.pop(add.handle, None)
        self._changed()

    def _put(self, add: AddRequest, step: list[int], end: Finished | None, at: int) -> None:
        logprobs = []
        if at == 0 and (k := add.params.prompt_logprobs) is not None:
            scored = [logprobs_of(int(i), k) for i in add.prompt_token_ids[1:]]
            logprobs.append(RequestLogprobs(add.handle, scored, prompt_start=1))
        if (k := add.params.logprobs) is not None and step:
            logprobs.append(RequestLogprobs(add.handle, [logprobs_of(i, k) for i in step]))
        self._outbox.put_nowait(
            EngineOutputs(
                handles=np.array([add.handle], np.int64),
                num_tokens=np.array([len(step)], np.int32),
                token_ids=np.array(step, np.int32),
                finished=[] if end is None else [end],
                logprobs=logprobs,
                prefills=[PrefillInfo(add.handle, CACHED_TOKENS)] if at == 0 else [],
            )
        )
