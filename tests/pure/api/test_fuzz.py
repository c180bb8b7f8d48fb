"""Whatever a body holds, the answer is a result or an error in OpenAI's shape, never a 5xx."""

import asyncio
import json
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.pure.api.conftest import Api, make_state
from tests.pure.api.fake_core import FakeCore
from twostroke.api.parse import _REFUSED, HINTS
from twostroke.api.protocol import ChatMessage, ChatRequest, CompletionRequest

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["user", "assistant", "system", "tool", "text", "default", "1", "\ud800"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4) | st.just("65"), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = sorted(
    {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *_REFUSED, *HINTS}
)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(ChatMessage.__struct_fields__), VALUES, max_size=3).map(
        lambda fields: {"role": "user", "content": "hi", **fields}
    ),
    max_size=3,
)
BODIES = st.fixed_dictionaries(
    {"max_tokens": st.just(3)},
    optional={"prompt": st.just("hé") | VALUES, "messages": MESSAGES},
).flatmap(
    lambda sound: st.dictionaries(
        st.sampled_from(FIELDS) | st.text(max_size=8), VALUES, max_size=4
    ).map(lambda wild: {**sound, **wild})
)
PATHS = st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])


@pytest.fixture(scope="module")
def runner() -> Iterator[tuple[asyncio.Runner, Api]]:
    """One event loop and server for all examples."""
    with asyncio.Runner() as runner:

        async def start() -> Api:
            core = FakeCore()
            api = Api(core, make_state(core))
            core.become_ready()
            api.state.engine.start()
            await api.state.engine.wait_ready()
            return api

        api = runner.run(start())
        yield runner, api
        runner.run(api.http.aclose())
        runner.run(api.state.engine.close())


def check(runner: tuple[asyncio.Runner, Api], path: str, body: bytes) -> None:
    loop, api = runner
    response = loop.run(api.http.post(path, content=body))
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
    elif not response.headers["content-type"].startswith("text/event-stream"):
        assert response.json()
    else:
        assert response.text.endswith("data: [DONE]\n\n")
    assert api.core.num_open == 0


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(path=PATHS, body=BODIES)
def test_fields(runner, path, body):
    check(runner, path, json.dumps(body).encode())


@settings(max_examples=40, deadline=None)
@given(path=PATHS, body=st.binary(max_size=40) | VALUES.map(lambda v: json.dumps(v).encode()))
def test_bytes(runner, path, body):
    check(runner, path, body)
