import msgspec
import pytest

from tests.pure.api.conftest import MODEL, Api
from tests.pure.api.fake_core import CACHED_TOKENS
from twostroke.api.completions import fold
from twostroke.api.protocol import Completion

PATH = "/v1/completions"


async def test_answer(api: Api):
    answer = await api.post(PATH, prompt="hé", model="default")
    assert answer["object"] == "text_completion"
    assert answer["model"] == MODEL
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "hé",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 4
    sixteen = await api.post(PATH, prompt="x" * 40)
    assert sixteen["choices"][0]["finish_reason"] == "length"
    assert sixteen["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "prompt", [["ab", "cd", "ef"], [[97, 98], [99, 100], [101, 102]]], ids=["texts", "ids"]
)
async def test_several_prompts_with_samples(api: Api, prompt, stream):
    fields = {"prompt": prompt, "n": 2}
    texts = [""] * 6
    if stream:
        options = {"include_usage": True}
        *events, last, done = await api.events(PATH, stream_options=options, **fields)
        assert done == "[DONE]"
        usage = last["usage"]
        for choice in (choice for event in events for choice in event["choices"]):
            texts[choice["index"]] += choice["text"]
    else:
        answer = await api.post(PATH, **fields)
        usage = answer["usage"]
        texts = [choice["text"] for choice in answer["choices"]]
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert texts == ["ab", "ab", "cd", "cd", "ef", "ef"]
    assert usage["prompt_tokens"] == 6
    assert usage["completion_tokens"] == 18
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3 * CACHED_TOKENS


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs(api: Api, stream, n):
    fields = {"prompt": "hé", "echo": True, "logprobs": 1, "max_tokens": 2, "n": n}
    if stream:
        *events, _ = await api.events(PATH, **fields)
        names = ("tokens", "text_offset", "token_logprobs")
        columns = [{"text": "", **{name: [] for name in names}} for _ in range(n)]
        for choice in (choice for event in events for choice in event["choices"]):
            mine = columns[choice["index"]]
            mine["text"] += choice["text"]
            for name in names:
                mine[name] += (choice["logprobs"] or {}).get(name, [])
    else:
        choices = (await api.post(PATH, **fields))["choices"]
        columns = [{"text": choice["text"], **choice["logprobs"]} for choice in choices]
        assert columns[0]["top_logprobs"][0] is None
        assert columns[0]["top_logprobs"][3] == {"h": -1.0, "A": -0.5}
    assert len(columns) == n
    for mine in columns:
        assert mine["text"].startswith("héh")
        assert mine["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "h", "bytes:\\xc3"]
        assert mine["text_offset"] == [0, 1, 1, 2, 3]
        assert mine["token_logprobs"] == [None, -1.0, -1.0, -1.0, -1.0]


async def test_the_answer_is_the_fold_of_the_stream(api: Api):
    fields = {
        "prompt": ["hé", "👍"],
        "n": 2,
        "echo": True,
        "logprobs": 1,
        "return_token_ids": True,
        "stop": "é",
    }
    answer = await api.post(PATH, **fields)
    *events, _ = await api.events(PATH, stream_options={"include_usage": True}, **fields)

    async def chunks():
        for event in events:
            yield msgspec.convert(event, Completion)

    folded = msgspec.to_builtins(await fold(chunks()))
    for whole in (answer, folded):
        del whole["id"], whole["created"]
    assert folded == answer


async def test_samples_wait_for_the_prompts_logprobs(api: Api):
    api.core.late_turns = 20
    *events, _ = await api.events(PATH, prompt="hi", n=2, echo=True, logprobs=0, max_tokens=4)
    for index in (0, 1):
        choices = [c for event in events for c in event["choices"] if c["index"] == index]
        assert "".join(choice["text"] for choice in choices) == "hihi"
        assert choices[0]["logprobs"]["token_logprobs"][:2] == [None, -1.0]


async def test_scoring_a_prompt_makes_no_text(api: Api):
    answer = await api.post(PATH, prompt=[104, 105], echo=True, logprobs=0, max_tokens=0)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hi", "length")
    assert choice["logprobs"]["tokens"] == ["h", "i"]
    assert choice["logprobs"]["top_logprobs"] == [None, {"i": -1.0}]
    assert answer["usage"]["completion_tokens"] == 0


async def test_prompt_logprobs_and_token_ids(api: Api):
    answer = await api.post(PATH, prompt="hi", prompt_logprobs=0, return_token_ids=True)
    choice = answer["choices"][0]
    assert choice["prompt_token_ids"] == [104, 105]
    assert choice["token_ids"] == [104, 105, 257]
    assert choice["prompt_logprobs"] == [
        None,
        {"105": {"logprob": -1.0, "rank": 1, "decoded_token": "i"}},
    ]
    assert choice["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_one_bad_prompt_refuses_all_before_the_first_token(api: Api, stream):
    error = await api.refuse(PATH, prompt=["ok", "x" * 600, "ok"], stream=stream)
    assert error["code"] == "context_length_exceeded"
    assert api.core.num_open == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [258]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a"] * 33, "n": 2}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "messages": []}, "messages"),
    ],
)
async def test_refused_by_name(api: Api, fields, param):
    assert (await api.refuse(PATH, **fields))["param"] == param
    assert api.core.added == []


async def test_best_of_n_is_n(api: Api):
    answer = await api.post(PATH, prompt="a", n=2, best_of=2)
    assert len(answer["choices"]) == 2


async def test_an_echo_is_not_lost_when_the_first_token_has_no_text_yet(api: Api):
    *events, _ = await api.events(PATH, prompt="👍", echo=True, max_tokens=8)
    texts = [choice["text"] for event in events for choice in event["choices"]]
    assert "".join(texts) == "👍👍"
    *events, _ = await api.events(PATH, prompt="👍", max_tokens=8)
    assert [choice["text"] for event in events for choice in event["choices"]] == ["👍", ""]


async def test_a_text_far_beyond_the_context_is_refused_at_once(api: Api):
    error = await api.refuse(PATH, prompt="x" * 60_000)
    assert error["code"] == "context_length_exceeded"
    assert "no token has more than 4" in error["message"]
