"""One way to run a generation, streamed or not, that ends when the client goes.

    chunks ──▶ each as a server-sent event, [DONE] last          stream
           └─▶ folded into one answer                            no stream

The first chunk is awaited before a byte is sent, so that what fails before it is a plain JSON error
and not an event stream. Meanwhile another task waits for the client to hang up; whichever ends
first cancels the other, and closing the chunks aborts the request in the engine.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from twostroke.api.errors import error_body, internal_error, json_response
from twostroke.client.engine import RequestOutput
from twostroke.errors import BodyTooLargeError, TwostrokeError

logger = logging.getLogger("twostroke.api")

Chunk = TypeVar("Chunk", bound=msgspec.Struct)
Fold = Callable[[AsyncGenerator[Chunk, None]], Awaitable[msgspec.Struct]]

_encode = msgspec.json.Encoder().encode
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the events back
]


class GenerationResponse(Response, Generic[Chunk]):
    """Answers with the chunks as events (`fold` is None) or with what `fold` makes of them."""

    def __init__(
        self, chunks: AsyncGenerator[Chunk, None], fold: Fold[Chunk] | None, request_id: str
    ) -> None:
        self._chunks = chunks
        self._fold = fold
        self._request_id = request_id
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._fold is None:
            await while_connected(receive, self._stream(send))
        else:
            await while_connected(receive, self._answer(self._fold, scope, receive, send))

    async def _answer(self, fold: Fold[Chunk], scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            answer = await fold(chunks)
        await json_response(answer)(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        async def event(data: bytes, more: bool = True) -> None:
            await send(
                {
                    "type": "http.response.body",
                    "body": b"data: " + data + b"\n\n",
                    "more_body": more,
                }
            )

        async with aclosing(self._chunks) as chunks:
            first = await anext(chunks)
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            await event(_encode(first))
            try:
                async for chunk in chunks:
                    await event(_encode(chunk))
            except TwostrokeError as error:
                last = _encode(error_body(error))
            except OSError:
                raise  # of `send`: nobody is there to read about it
            except Exception:
                logger.exception("request %s failed in its stream", self._request_id)
                last = _encode(error_body(internal_error(self._request_id)))
            else:
                last = b"[DONE]"
            await event(last, more=False)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; cancel it, and wait for its end, as soon as the client hangs up."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        was_done = working.done()
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)
    if was_done:
        with contextlib.suppress(OSError):  # of `send`, in servers that tell of a hang-up there
            working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The request's body. Raises BodyTooLargeError before more than `limit_bytes` are held."""
    pieces, size = [], 0
    announced = request.headers.get("content-length", "0")
    if not announced.isascii() or not announced.isdigit() or int(announced[:20]) <= limit_bytes:
        async for piece in request.stream():
            size += len(piece)
            if size > limit_bytes:
                break
            pieces.append(piece)
        else:
            return b"".join(pieces)
    raise BodyTooLargeError(
        f"the body has more than {limit_bytes:,} bytes", hint="send a shorter prompt"
    )


async def merge(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The outputs of several generations as they come, each with the index of its stream.

    The first failure ends all. Closing this generator closes the streams.
    """
    if len(streams) == 1:  # the common case needs no queue
        async with aclosing(streams[0]) as outputs:
            async for output in outputs:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        ended: BaseException | None = None
        try:
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    queue.put_nowait((index, output))
        except Exception as error:
            ended = error
        queue.put_nowait((index, ended))

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(pumps)
        while running:
            index, item = await queue.get()
            if isinstance(item, RequestOutput):
                yield index, item
            elif item is None:
                running -= 1
            else:
                raise item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
