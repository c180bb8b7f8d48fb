"""openai-python against the server, over HTTP."""

import openai
import pytest

from tests.pure.api.conftest import MODEL, Server

MESSAGES = [{"role": "user", "content": "héllo 👋"}]
RENDERED = "<user>héllo 👋\n<assistant>"


@pytest.fixture
def client(clean_server: Server):
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{clean_server.port}/v1", api_key="secret", max_retries=0
    ) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat(client):
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        n=2,
        logprobs=True,
        top_logprobs=1,
        extra_body={"top_k": 5, "ignore_eos": False, "chat_template_kwargs": {"shout": True}},
    )
    assert [choice.message.content for choice in answer.choices] == [RENDERED + "!"] * 2
    assert answer.choices[0].logprobs.content[0].top_logprobs[0].token == "A"
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    turn = [*MESSAGES, answer.choices[0].message, *MESSAGES]
    again = client.chat.completions.create(model="default", messages=turn)
    assert again.choices[0].finish_reason == "stop"


def test_chat_stream(client, clean_server):
    clean_server.core.tokens_per_step = 3
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            stream=True,
            stop="assist",
            stream_options={"include_usage": True},
        )
    )
    text = "".join(choice.delta.content for chunk in chunks for choice in chunk.choices)
    assert text == "<user>héllo 👋\n<"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens > 0


def test_completions(client):
    answer = client.completions.create(
        model=MODEL, prompt=["ab", "cd"], echo=True, logprobs=1, max_tokens=2, seed=1
    )
    assert [choice.text for choice in answer.choices] == ["abab", "cdcd"]
    assert answer.choices[0].logprobs.text_offset == [0, 1, 2, 3]
    chunks = list(client.completions.create(model=MODEL, prompt=[97, 98], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "ab"


def test_errors_have_openai_types(client, clean_server):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, response_format={"type": "json_object"}
        )
    assert unsupported.value.param == "response_format"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    clean_server.core.fail_after = 2
    with pytest.raises(openai.APIError, match="not finite"):
        list(client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))
    with pytest.raises(openai.InternalServerError) as failed:
        client.with_options(max_retries=2).completions.create(model=MODEL, prompt="abc")
    assert failed.value.code == "generation_failed"
    assert len(clean_server.core.added) == 2  # one each: told not to retry


def test_a_closed_stream_is_aborted(client, clean_server):
    clean_server.core.hold_after = 2
    with client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True) as stream:
        next(iter(stream))
    clean_server.call(clean_server.core.until(lambda: clean_server.core.aborted == 1))
