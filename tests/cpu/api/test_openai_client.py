"""openai-python against a served model: what the answers say about each other must agree."""

import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.cpu.proc.serving import Served, serving

MESSAGES = [{"role": "user", "content": "Where is the sea? 海 🌊"}]
FREE = {"ignore_eos": True}


@pytest.fixture(scope="module")
def served(tiny_dir: Path) -> Iterator[Served]:
    small = ("--max-num-seqs", "8", "--max-model-len", "512", "--num-gpu-blocks-override", "129")
    with serving(tiny_dir, *small, "--dtype", "float32") as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, **fields):
    fields = {"max_tokens": 24, "temperature": 0, "extra_body": FREE} | fields
    return client.chat.completions.create(model="default", messages=MESSAGES, **fields)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 7}])
def test_a_stream_says_what_the_whole_answer_says(client, sampling):
    whole = chat(client, n=2, **sampling)
    texts = ["", ""]
    for chunk in chat(client, n=2, stream=True, **sampling):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert whole.usage.completion_tokens == 48
    assert (texts[0] == texts[1]) == (sampling["temperature"] == 0)


def test_greedy_tokens_are_the_most_likely(client):
    content = chat(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert len(content) == 24
    for entry in content:
        best = [candidate.logprob for candidate in entry.top_logprobs]
        assert best == sorted(best, reverse=True)
        assert entry.logprob == pytest.approx(best[0], abs=1e-5)


def test_an_echoed_text_scores_as_it_was_sampled(client):
    first = client.completions.create(
        model="default",
        prompt="The old clock",
        max_tokens=12,
        temperature=0,
        logprobs=0,
        extra_body={**FREE, "return_token_ids": True},
    )
    choice = first.choices[0]
    ids = choice.prompt_token_ids + choice.token_ids
    scored = client.completions.create(
        model="default", prompt=ids, max_tokens=0, echo=True, logprobs=1
    )
    columns = scored.choices[0].logprobs
    assert len(columns.tokens) == len(ids)
    assert columns.token_logprobs[0] is None
    assert columns.token_logprobs[-12:] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-3)


def test_a_stop_string_ends_the_text_before_it(client):
    text = chat(client).choices[0].message.content
    stop = text[len(text) // 2 :][:3]
    cut = chat(client, stop=[stop, "never there"]).choices[0]
    assert cut.message.content == text[: text.index(stop)]
    assert cut.finish_reason == "stop"


def test_a_repeated_prompt_is_cached(client):
    prompt = [5, 6, 7, 8] * 20
    for _ in range(2):
        answer = client.completions.create(model="default", prompt=prompt, max_tokens=2)
    assert answer.usage.prompt_tokens_details.cached_tokens >= 64


def test_a_closed_stream_leaves_its_seat(client, served):
    with chat(client, max_tokens=400, stream=True) as stream:
        next(iter(stream))
    deadline_s = time.monotonic() + 20
    with served.client() as http:
        while http.get("/slots").json() and time.monotonic() < deadline_s:
            pass
        assert http.get("/slots").json() == []


def test_errors_come_before_the_stream(client):
    with pytest.raises(openai.BadRequestError) as too_long:
        chat(client, max_tokens=100_000, stream=True)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as unsupported:
        chat(client, tools=[{"type": "function", "function": {"name": "f"}}])
    assert unsupported.value.param == "tools"
