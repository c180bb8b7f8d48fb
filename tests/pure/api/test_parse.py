import json

import pytest

from twostroke.api.parse import HINTS, parse
from twostroke.api.protocol import ChatRequest, CompletionRequest
from twostroke.errors import RequestError, UnsupportedFieldError

CHAT = {"messages": [{"role": "user", "content": "x"}]}


def chat(**fields) -> ChatRequest:
    return parse(json.dumps({**CHAT, **fields}).encode(), ChatRequest)


def test_null_asks_for_the_default():
    assert chat(temperature=None, n=None, stop=None, tools=None, whatever=None) == chat()


@pytest.mark.parametrize("name", sorted(HINTS))
def test_hints_are_accepted(name):
    assert chat(**{name: {"any": ["thing"]}}) == chat()


@pytest.mark.parametrize(
    ("name", "harmless", "harmful"),
    [
        ("tools", [], [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "none", "auto"),
        ("functions", [], [{}]),
        ("function_call", "none", "auto"),
        ("response_format", {"type": "text"}, {"type": "json_schema", "json_schema": {}}),
        ("modalities", ["text"], ["text", "audio"]),
        ("audio", None, {"voice": "x"}),
        ("prediction", None, {"type": "content"}),
        ("web_search_options", None, {}),
        ("logits_processors", [], ["x"]),
        ("use_beam_search", False, True),
        ("best_of", 1, 2),
        ("echo", False, True),
        ("suffix", "", "x"),
        ("kv_transfer_params", None, {"do_remote_decode": True}),
        ("bad_words", [], ["x" * 1000]),
        ("length_penalty", 1, 2),
    ],
)
def test_unsupported_is_refused_by_name_unless_it_asks_for_nothing(name, harmless, harmful):
    assert chat(**{name: harmless}) == chat()
    with pytest.raises(UnsupportedFieldError) as refused:
        chat(**{name: harmful})
    assert refused.value.param == name
    assert refused.value.code == "unsupported_parameter"
    assert name in str(refused.value)


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_response_format_is_refused_with_its_type(kind):
    with pytest.raises(UnsupportedFieldError, match=f"response_format of type '{kind}'.*ask for"):
        chat(response_format={"type": kind})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("temprature", "temperature"), ("max_token", "max_tokens"), ("Stream", "stream")],
)
def test_unknown_fields_name_the_nearest(name, nearest):
    with pytest.raises(RequestError, match=f"did you mean {nearest}") as refused:
        chat(**{name: 1})
    assert refused.value.param == name


def test_an_unknown_field_like_nothing_we_know():
    with pytest.raises(RequestError, match="remove it") as refused:
        chat(**{"q" * 10_000: 1})
    assert len(refused.value.param) < 100


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"n": 1.5}, "n"),
        ({"n": True}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"seed": 2**63}, "seed"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a", 3]}, "stop[1]"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"05": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"stream_options": {"include_usages": True}}, "stream_options.include_usages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "text": "x"}]}, "messages[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": 1}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "audio": {"id": "a"}}]}, "messages[0].audio"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_wrong_types_name_the_path(fields, param):
    with pytest.raises(RequestError) as refused:
        chat(**fields)
    assert refused.value.param == param
    assert param in str(refused.value)


def test_a_missing_field_is_named():
    with pytest.raises(RequestError, match="messages is missing"):
        parse(b"{}", ChatRequest)
    with pytest.raises(RequestError, match="prompt is missing"):
        parse(b"{}", CompletionRequest)


def test_a_hostile_value_of_an_unread_field_is_not_built():
    body = b'{"user": ' + b"[" * 500 + b"]" * 500 + b', "prompt": "x", "tools": {"a": 1e999}}'
    with pytest.raises(RequestError) as refused:
        parse(body, CompletionRequest)
    assert refused.value.param == "tools"
