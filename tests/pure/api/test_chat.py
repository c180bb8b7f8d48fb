import msgspec
import pytest

from tests.pure.api.conftest import MODEL, Api
from tests.pure.api.fake_core import CACHED_TOKENS
from twostroke.api.chat import fold
from twostroke.api.protocol import ChatChunk

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "héllo 👋"}]
RENDERED = "<user>héllo 👋\n<assistant>"


async def test_answer(api: Api):
    answer = await api.post(PATH, messages=USER)
    size = len(RENDERED.encode())
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == MODEL
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": RENDERED, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": size,
        "completion_tokens": size + 1,
        "total_tokens": 2 * size + 1,
        "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
    }


async def test_stream(api: Api):
    events = await api.events(PATH, messages=USER, n=2)
    assert events.pop() == "[DONE]"
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert not any("usage" in event for event in events)
    for index in (0, 1):
        choices = [c for event in events for c in event["choices"] if c["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert not any("role" in choice["delta"] for choice in choices[1:])
        assert "".join(c["delta"]["content"] for c in choices) == RENDERED
        ends = [choice["finish_reason"] for choice in choices]
        assert ends == [None] * (len(ends) - 1) + ["stop"]


async def test_the_answer_is_the_fold_of_the_stream(api: Api):
    fields = {
        "messages": USER,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 1,
        "return_token_ids": True,
        "stop": "assi",
    }
    answer = await api.post(PATH, **fields)
    *events, _ = await api.events(PATH, stream_options={"include_usage": True}, **fields)
    assert len(events) > 20

    async def chunks():
        for event in events:
            yield msgspec.convert(event, ChatChunk)

    folded = msgspec.to_builtins(await fold(chunks()))
    for whole in (answer, folded):
        del whole["id"], whole["created"]
    assert folded == answer


async def test_a_bug_in_the_middle_of_a_stream(api: Api, caplog, monkeypatch):
    def broken(token_id):
        raise ZeroDivisionError

    monkeypatch.setattr("twostroke.api.chat.chat_logprobs", broken)
    role, error = await api.events(PATH, messages=USER, logprobs=True)
    assert role["choices"][0]["delta"]["role"] == "assistant"
    assert error["error"]["type"] == "server_error"
    assert "failed in its stream" in caplog.text


@pytest.mark.parametrize("continuous", [False, True])
async def test_usage_in_a_stream(api: Api, continuous):
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    *events, last, done = await api.events(
        PATH, messages=USER, max_tokens=3, stream_options=options
    )
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": CACHED_TOKENS}
    counts = [event["usage"] and event["usage"]["completion_tokens"] for event in events]
    assert counts == ([1, 1, 2, 3] if continuous else [None] * 4)


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 5])
async def test_stop_strings_and_characters_cut_anywhere(api: Api, tokens_per_step):
    api.core.tokens_per_step = tokens_per_step
    api.core.reply = lambda prompt: "好的👍 stop STOP here".encode()
    *events, done = await api.events(PATH, messages=USER, stop=["xyz", "STOP"])
    assert done == "[DONE]"
    pieces = [choice["delta"]["content"] for event in events for choice in event["choices"]]
    assert "".join(pieces) == "好的👍 stop "
    assert "�" not in "".join(pieces)
    end = events[-1]["choices"][0]
    assert (end["finish_reason"], end["stop_reason"]) == ("stop", "STOP")
    whole = await api.post(PATH, messages=USER, stop="STOP", include_stop_str_in_output=True)
    assert whole["choices"][0]["message"]["content"] == "好的👍 stop STOP"
    assert api.core.num_open == 0


async def test_logprobs(api: Api):
    api.core.reply = lambda prompt: "é!".encode()
    fields = {"messages": USER, "logprobs": True, "top_logprobs": 2, "max_tokens": 3}
    content = (await api.post(PATH, **fields))["choices"][0]["logprobs"]["content"]
    top = [
        {"token": "A", "logprob": -0.5, "bytes": [65]},
        {"token": "B", "logprob": -2.5, "bytes": [66]},
    ]
    assert content[0] == {
        "token": "bytes:\\xc3",
        "logprob": -1.0,
        "bytes": [0xC3],
        "top_logprobs": top,
    }
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], [33]]
    *events, _ = await api.events(PATH, **fields)
    streamed = [
        entry
        for event in events
        for choice in event["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == content
    plain = await api.post(PATH, messages=USER, logprobs=True, max_tokens=1)
    assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_prompt_logprobs_and_token_ids(api: Api):
    answer = await api.post(
        PATH, messages=USER, max_tokens=2, prompt_logprobs=1, return_token_ids=True
    )
    ids = list(RENDERED.encode())
    assert answer["prompt_token_ids"] == ids
    assert answer["choices"][0]["token_ids"] == ids[:2]
    first, second, *_ = answer["prompt_logprobs"]
    assert first is None
    assert second == {
        str(ids[1]): {"logprob": -1.0, "rank": 2, "decoded_token": "u"},
        "65": {"logprob": -0.5, "rank": 1, "decoded_token": "A"},
    }
    *events, _ = await api.events(PATH, messages=USER, max_tokens=2, return_token_ids=True)
    assert [e["choices"][0].get("token_ids") for e in events] == [None, ids[:1], ids[1:2]]
    assert events[0]["prompt_token_ids"] == ids


async def test_messages_that_clients_send(api: Api):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 7}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "9", "tool_call_id": "c1"},
    ]
    answer = await api.post(PATH, messages=messages)
    assert answer["choices"][0]["message"]["content"] == (
        "<system>be brief\n<user>a\nb\n<assistant>f7\n<tool>9\n<assistant>"
    )


async def test_template_options(api: Api):
    async def prompt(**fields) -> str:
        return (await api.post(PATH, **fields))["choices"][0]["message"]["content"]

    opened = [*USER, {"role": "assistant", "content": " Well, "}]
    assert await prompt(messages=opened, continue_final_message=True) == (
        "<user>héllo 👋\n<assistant> Well, "
    )
    assert (await prompt(messages=USER, chat_template_kwargs={"shout": True})).endswith(">!")
    assert (await prompt(messages=USER, add_generation_prompt=False)).endswith("👋\n")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        ({"messages": USER, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": USER, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"messages": USER, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"messages": USER, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (
            {"messages": USER, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        (
            {
                "messages": [{"role": "user", "content": ""}],
                "continue_final_message": True,
            },
            "continue_final_message",
        ),
        ({"messages": USER, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": USER, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"messages": USER, "temperature": -1}, "temperature"),
        ({"messages": USER, "logit_bias": {"258": 1}}, "logit_bias"),
    ],
)
async def test_refused_by_name(api: Api, fields, param):
    error = await api.refuse(PATH, **fields)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert api.core.added == []


async def test_bad_tool_arguments_name_the_call(api: Api):
    for arguments in ("[]", "{", ""):
        call = {"function": {"name": "f", "arguments": arguments}}
        message = {"role": "assistant", "tool_calls": [call]}
        if arguments:
            error = await api.refuse(PATH, messages=[message])
            assert error["param"] == "messages[0].tool_calls[0].function.arguments"
        else:  # a call without arguments
            await api.post(PATH, messages=[message])


async def test_without_a_template_the_hint_is_completions(api: Api):
    api.state.chat_template = None
    assert "/v1/completions" in (await api.refuse(PATH, messages=USER))["message"]


async def test_too_long_is_a_json_error_even_for_a_stream(api: Api):
    error = await api.refuse(PATH, messages=USER, max_tokens=10_000, stream=True)
    assert error["code"] == "context_length_exceeded"


async def test_parameters_reach_the_engine(api: Api):
    await api.post(
        PATH,
        messages=USER,
        max_completion_tokens=4,
        seed=7,
        top_k=-1,
        min_p=0.1,
        logit_bias={"65": 5},
        stop_token_ids=[66],
        priority=3,
        cache_salt="s",
        ignore_eos=True,
    )
    add = api.core.added[0]
    assert add.max_tokens == 4
    assert (add.priority, add.cache_salt, add.eos_token_ids) == (3, "s", ())
    params = add.params
    assert (params.seed, params.top_k, params.min_p) == (7, 0, 0.1)
    assert (params.logit_bias, params.stop_token_ids) == ({65: 5.0}, (66,))


async def test_a_text_far_beyond_the_context_is_refused_at_once(api: Api):
    error = await api.refuse(PATH, messages=[{"role": "user", "content": "x" * 60_000}])
    assert error["code"] == "context_length_exceeded"
    assert "no token has more than 4" in error["message"]
