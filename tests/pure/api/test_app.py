"""The gateway, the errors and the routes beside generation."""

import asyncio
import logging

import httpx
import pytest

from tests.pure.api.conftest import MODEL, Api, make_state
from twostroke.api.app import create_app

CHAT = {"messages": [{"role": "user", "content": "x"}]}
PATH = "/v1/chat/completions"


# ---------------------------------------------------------------- gateway


@pytest.fixture
async def locked(api: Api):
    """The same server behind a key."""
    api.http = httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app(make_state(api.core, api_key="sécret"))),
        base_url="http://test",
    )
    return api.http


WRONG_KEYS = [
    "",
    "Bearer",
    "Bearer wrong",
    "sécret",
    "Basic sécret",
    "Bearer sécret2",
    "Bearer \xff",
]


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/nowhere", "/health?deep=1"])
async def test_no_key_no_answer(locked, path):
    for headers in [{}, *({"authorization": key.encode()} for key in WRONG_KEYS)]:
        response = await locked.get(path, headers=headers)
        assert response.status_code == 401
        assert response.headers["x-should-retry"] == "false"
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"


async def test_the_key_opens_and_health_needs_none(locked):
    key = {"authorization": "bearer sécret".encode()}
    assert (await locked.get("/v1/models", headers=key)).status_code == 200
    assert (await locked.get("/health")).status_code == 200


async def test_request_id_is_echoed_and_names_the_answer(api: Api):
    answer = await api.http.post(PATH, json=CHAT, headers={"x-request-id": "abc/1"})
    assert answer.headers["x-request-id"] == "abc/1"
    assert answer.json()["id"].startswith("chatcmpl-abc/1-")
    again = await api.http.post(PATH, json=CHAT, headers={"x-request-id": "abc/1"})
    assert again.json()["id"] != answer.json()["id"]


@pytest.mark.parametrize("hostile", ["a b", "x" * 129, "é", 'a"', ""])
async def test_a_harmful_request_id_is_replaced(api: Api, hostile):
    response = await api.http.get("/version", headers={"x-request-id": hostile.encode()})
    assert len(response.headers["x-request-id"]) == 32


async def test_a_bug_of_ours_is_told_and_logged(api: Api, caplog, monkeypatch):
    async def broken(*_, **__):
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(api.state.tokenizer, "encode_async", broken)
    response = await api.http.post(PATH, json=CHAT, headers={"x-request-id": "r1"})
    error = response.json()["error"]
    assert response.status_code == 500
    assert error["type"] == "server_error"
    assert "r1" in error["message"]
    assert "secret detail" not in error["message"]
    assert response.headers["x-request-id"] == "r1"
    assert "secret detail" in caplog.text


# ---------------------------------------------------------------- bodies and routes


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "JSON object"),
        (b'"text"', "JSON object"),
        (b'{"messages": NaN}', "not valid JSON"),
        (b'{"messages": [], "temperature": Infinity}', "not valid JSON"),
        (b'{"temperature": 1e999}', "temperature"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "seed"),
        (b'{"messages": ' + b"[" * 30_000 + b"]" * 30_000 + b"}", "nested too deeply"),
        (b'{"chat_template_kwargs": {"a": ' + b"[" * 900 + b"]" * 900 + b"}}", "messages"),
        (b'{"messages": "\\ud800"}', "not valid JSON"),
        (b'{"model": "\xff"}', "UTF-8"),
        (b"\xff\xfe{\x00}\x00", "not valid JSON"),
    ],
)
async def test_malformed_bodies(api: Api, body, says):
    response = await api.http.post(PATH, content=body)
    assert response.status_code == 400, response.text
    assert says in response.json()["error"]["message"]
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("chunked", [False, True])
async def test_too_large_a_body(api: Api, chunked):
    async def pieces():
        for _ in range(70):
            yield b"x" * 1024

    response = await api.http.post(PATH, content=pieces() if chunked else b"x" * 70_000)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


async def test_unknown_routes_and_methods(api: Api):
    lost = await api.get("/v1/chat/completion", 404)
    assert "did you mean /v1/chat/completions?" in lost["error"]["message"]
    assert lost["error"]["code"] == "route_not_found"
    wrong = await api.http.get("/v1/completions")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert "use POST" in wrong.json()["error"]["message"]
    assert (await api.http.get("/v1/completions/")).status_code == 404


async def test_models(api: Api):
    listed = await api.get("/v1/models")
    assert [model["id"] for model in listed["data"]] == [MODEL]
    assert listed["data"][0]["max_model_len"] == 512
    assert await api.get("/v1/models/") == listed
    assert await api.get(f"/v1/models/{MODEL}") == listed["data"][0]
    assert (await api.get("/v1/models/default"))["id"] == MODEL
    error = (await api.get("/v1/models/gpt-4", 404))["error"]
    assert error["code"] == "model_not_found"
    error = await api.refuse(PATH, 404, model="gpt-4", **CHAT)
    assert MODEL in error["message"]
    assert error["param"] == "model"


async def test_tokenize_and_detokenize(api: Api):
    whole = await api.post("/tokenize", prompt="hé", return_token_strs=True)
    assert whole == {
        "count": 3,
        "max_model_len": 512,
        "tokens": [104, 195, 169],
        "token_strs": ["h", "�", "�"],
    }
    chat = await api.post("/tokenize", **CHAT)
    assert bytes(chat["tokens"]) == b"<user>x\n<assistant>"
    assert chat["token_strs"] is None
    text = await api.post("/detokenize", tokens=[104, 195, 169, 257])
    assert text == {"prompt": "hé</s>"}
    assert (await api.refuse("/detokenize", tokens=[258]))["param"] == "tokens"
    assert (await api.refuse("/tokenize"))["param"] == "prompt"
    assert (await api.refuse("/tokenize", prompt="a", promt="b"))["param"] == "promt"


async def test_props_slots_version_metrics(api: Api):
    await api.post("/v1/completions", prompt="hi")
    props = await api.get("/props")
    assert props["model"] == MODEL
    assert props["status"] == "ok"
    assert props["limits"]["max_model_len"] == 512
    assert "{% for m in messages %}" in props["chat_template"]
    assert props["config"] == [
        {"name": "api_key", "value": "***", "source": "flag", "reason": "--api-key"}
    ]
    assert props["facts"] == [{"name": "fact", "value": "1", "reason": "so"}]
    assert [slot["request_id"] for slot in await api.get("/slots")] == [
        api.core.added[0].request_id
    ]
    assert await api.get("/version") == {"version": "1.2.3"}
    metrics = await api.http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "twostroke:num_requests_running" in metrics.text


# ---------------------------------------------------------------- health


async def test_healthy(api: Api):
    assert await api.get("/health") == {"status": "ok"}
    assert await api.get("/ready") == {"status": "ready"}
    assert await api.get("/health?deep=1") == {"status": "ok", "deep": True}
    assert api.core.added[0].max_tokens == 1


async def test_a_deep_check_fails_when_no_token_comes(api: Api):
    api.core.fail_after = 0
    error = (await api.get("/health?deep=1", 503))["error"]
    assert "logits are not finite" in error["message"]


async def test_while_loading(core):
    api = Api(core, make_state(core))
    response = await api.http.post(PATH, json=CHAT)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
    assert "x-should-retry" not in response.headers
    assert response.json()["error"]["code"] == "engine_loading"
    assert await api.get("/health") == {"status": "loading"}
    assert (await api.get("/v1/models"))["data"][0]["max_model_len"] is None
    for path in ("/ready", "/slots", "/health?deep=1"):
        assert (await api.get(path, 503))["error"]["code"] == "engine_loading"
    assert (await api.get("/props"))["status"] == "loading"
    assert (await api.post("/tokenize", prompt="a"))["tokens"] == [97]


async def test_a_dead_engine(api: Api):
    api.core.hold_after = 1
    tasks = [
        asyncio.create_task(api.http.post(PATH, json={**CHAT, "stream": stream}))
        for stream in (True, False)
    ]
    await api.core.until(lambda: len(api.core.added) == 2)
    api.core.die()
    streamed, whole = await asyncio.gather(*tasks)
    assert whole.status_code == 503
    assert whole.json()["error"]["code"] == "engine_dead"
    assert streamed.status_code in (200, 503)
    assert '"code":"engine_dead"' in streamed.text
    assert "[DONE]" not in streamed.text
    for path in ("/health", "/ready", "/slots", "/health?deep=1"):
        assert (await api.get(path, 503))["error"]["code"] == "engine_dead"
    assert (await api.get("/props"))["status"] == "dead"


async def test_a_core_that_does_not_answer(api: Api):
    api.core.calls_answered = False
    api.state.call_timeout_s = 0.0
    for path in ("/ready", "/slots"):
        assert "did not answer" in (await api.get(path, 503))["error"]["message"]


async def test_a_full_queue_says_when_to_come_back(api: Api):
    api.core.hold_after = 0
    waiting = asyncio.create_task(api.http.post(PATH, json={**CHAT, "n": 64}))
    await api.core.until(lambda: len(api.core.added) == 64)
    response = await api.http.post(PATH, json={**CHAT, "stream": True})
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert "x-should-retry" not in response.headers
    assert response.json()["error"]["type"] == "rate_limit_error"
    waiting.cancel()


@pytest.mark.parametrize("fail_after", [0, 2])
async def test_a_request_that_the_engine_gives_up(api: Api, fail_after, caplog):
    api.core.fail_after = fail_after
    response = await api.http.post(PATH, json=CHAT)
    assert response.status_code == 500
    assert response.headers["x-should-retry"] == "false"
    assert response.json()["error"]["code"] == "generation_failed"
    streamed = await api.http.post(PATH, json={**CHAT, "stream": True})
    assert streamed.status_code == (200 if fail_after else 500)
    assert streamed.text.count('"error"') == 1
    assert "logits are not finite" in streamed.text
    assert "[DONE]" not in streamed.text
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []
