"""The application over a fake engine core, in-process (`api`) and behind uvicorn (`server`)."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from tests.pure.api.fake_core import MAX_MODEL_LEN, FakeCore
from twostroke.api.app import ServerState, create_app
from twostroke.client.chat import ChatTemplate
from twostroke.client.engine import AsyncEngine
from twostroke.config import Explained
from twostroke.metrics import Metrics
from twostroke.testing.byte_tokenizer import ByteTokenizer
from twostroke.transport import EngineChannel

MODEL = "org/byte-model"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.x }}{% endfor %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if shout %}!{% endif %}"
)


def make_state(
    channel: EngineChannel,
    *,
    max_model_len: int = MAX_MODEL_LEN,
    max_num_queued_reqs: int = 64,
    **overrides: Any,
) -> ServerState:
    """Settings of a small server; `start` its engine inside the event loop."""
    tokenizer = ByteTokenizer()
    metrics = Metrics(model_name=MODEL)
    engine = AsyncEngine(
        channel,
        tokenizer,
        model_name=MODEL,
        max_model_len=max_model_len,
        eos_token_ids=(257,),
        max_num_queued_reqs=max_num_queued_reqs,
        metrics=metrics,
        status_interval_s=0,
    )
    settings: dict[str, Any] = {
        "engine": engine,
        "tokenizer": tokenizer,
        "chat_template": ChatTemplate(TEMPLATE),
        "model_name": MODEL,
        "metrics": metrics,
        "version": "1.2.3",
        "explained": [Explained("api_key", "***", "flag", "--api-key")],
        "max_num_queued_reqs": max_num_queued_reqs,
        "max_body_bytes": 1 << 16,
    }
    return ServerState(**(settings | overrides))


class Api:
    """A client of the application, and what is behind it."""

    def __init__(self, core: FakeCore, state: ServerState) -> None:
        self.core = core
        self.state = state
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(create_app(state)), base_url="http://test"
        )

    async def get(self, path: str, status: int = 200) -> Any:
        """The JSON answer of a GET that must have `status`."""
        response = await self.http.get(path)
        assert response.status_code == status, response.text
        return response.json()

    async def post(self, path: str, /, status: int = 200, **fields: Any) -> Any:
        """The JSON answer of a POST that must have `status`."""
        response = await self.http.post(path, json=fields)
        assert response.status_code == status, response.text
        return response.json()

    async def refuse(self, path: str, /, status: int = 400, **fields: Any) -> dict[str, Any]:
        """The error object of a POST that must be refused."""
        return (await self.post(path, status, **fields))["error"]

    async def events(self, path: str, /, **fields: Any) -> list[Any]:
        """The events of a stream; [DONE] stays text."""
        response = await self.http.post(path, json={"stream": True, **fields})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        blocks = response.text.split("\n\n")
        assert blocks.pop() == ""
        payloads = [block.removeprefix("data: ") for block in blocks]
        return [text if text == "[DONE]" else json.loads(text) for text in payloads]


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


@pytest.fixture
async def api(core: FakeCore) -> AsyncIterator[Api]:
    """A served model that answers with its prompt."""
    api = Api(core, make_state(core))
    core.become_ready()
    api.state.engine.start()
    await api.state.engine.wait_ready()
    yield api
    await api.http.aclose()
    await api.state.engine.close()


class Server:
    """The application behind uvicorn, in a thread with its own event loop."""

    def __init__(self) -> None:
        self.core = FakeCore()
        self.state = make_state(self.core, api_key="secret")
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._started = threading.Event()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main)
        self._thread.start()
        self._started.wait()

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self.core.become_ready()
        self.state.engine.start()
        await self.state.engine.wait_ready()
        uvicorn_server = uvicorn.Server(
            uvicorn.Config(create_app(self.state), log_config=None, access_log=False)
        )
        uvicorn_server.install_signal_handlers = lambda: None
        serving = asyncio.create_task(uvicorn_server.serve(sockets=[self._listener]))
        while not uvicorn_server.started:
            await asyncio.sleep(0.001)
        self._started.set()
        await self._stop.wait()
        uvicorn_server.should_exit = True
        await serving
        await self.state.engine.close()

    def call(self, coroutine: Any) -> Any:
        """Run a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def clean_server(server: Server) -> Iterator[Server]:
    """The server with a core as new; what a test leaves open fails it."""
    core = server.core
    core.__dict__.update({**FakeCore().__dict__, "_outbox": core._outbox, "_open": core._open})
    yield server
    assert core.num_open == 0
