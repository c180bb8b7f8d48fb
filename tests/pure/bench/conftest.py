"""A small OpenAI server on a real socket: answers in pieces, refuses and breaks off when told."""

import asyncio
import json
import threading
from collections.abc import Iterator

import pytest
import uvicorn


class FakeServer:
    """Streams `max_tokens` pieces for each prompt. Its attributes say how it misbehaves."""

    url = ""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.answer = self.stream_pieces
        self.bodies: list[dict] = []
        self.live = self.most_live = 0
        self.error: tuple[int, str] | None = None  # instead of an answer
        self.error_midway = ""
        self.cut_off = False
        self.silent = False

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            return
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        if scope["path"] == "/v1/models":
            await reply(send, 200, {"data": [{"id": "fake"}]})
        elif scope["path"] == "/props":
            await reply(send, 200, {"limits": {"vocab_size": 64}})
        elif self.error is not None:
            status, text = self.error
            await reply(send, status, {"error": {"message": text}})
        else:
            self.bodies.append(json.loads(body))
            self.live += 1
            self.most_live = max(self.most_live, self.live)
            await self.answer(self.bodies[-1], send)
            self.live -= 1

    async def stream_pieces(self, ask: dict, send) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for i in range(0 if self.silent else ask["max_tokens"]):
            await event(send, {"choices": [{"text": f"t{i} ", "finish_reason": None}]})
            await asyncio.sleep(0)
            if self.error_midway:
                await event(send, {"error": {"message": self.error_midway}})
                break
        if self.cut_off:
            await send({"type": "http.response.body", "body": b""})
            return
        if not self.silent:
            await event(send, {"choices": [{"text": "", "finish_reason": "length"}]})
        usage = {"prompt_tokens": len(ask["prompt"]), "completion_tokens": ask["max_tokens"]}
        await event(send, {"choices": [], "usage": usage})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def reply(send, status: int, content: dict) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


async def event(send, content: dict) -> None:
    data = b"data: " + json.dumps(content).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": data, "more_body": True})


@pytest.fixture(scope="session")
def running_server() -> Iterator[FakeServer]:
    fake = FakeServer()
    config = uvicorn.Config(
        fake, port=0, lifespan="off", ws="none", log_config=None, loop="asyncio"
    )
    running = uvicorn.Server(config)
    socket = config.bind_socket()
    fake.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
    thread = threading.Thread(target=running.run, args=([socket],))
    thread.start()
    yield fake
    running.should_exit = True
    thread.join()
    socket.close()


@pytest.fixture
def server(running_server: FakeServer) -> FakeServer:
    running_server.reset()
    return running_server
