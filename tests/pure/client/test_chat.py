import pytest

from twostroke.client import chat
from twostroke.client.chat import ChatTemplate
from twostroke.errors import ModelError, RequestError

CHATML = """{% for message in messages %}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
HELLO = [{"role": "user", "content": "hi <b>"}]


def test_blocks_leave_no_blank_lines():
    turn = "<|im_start|>user\nhi <b><|im_end|>\n"
    assert ChatTemplate(CHATML).render(HELLO) == turn + "<|im_start|>assistant\n"
    assert ChatTemplate(CHATML).render(HELLO, add_generation_prompt=False) == turn


def test_what_templates_of_hugging_face_use():
    template = ChatTemplate(
        "{{ bos_token }}{{ messages | tojson }}{{ tools | tojson(indent=1) }}{{ mode }}"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{% generation %}x{% endgeneration %}{{ strftime_now('%Y') | length }}{{ eos_token }}",
        bos_token="<s>",
        eos_token="</s>",
    )
    text = template.render([{"role": "ü"}], tools=[{"a": 1}], mode="<m>")
    assert text == '<s>[{"role": "ü"}][\n {\n  "a": 1\n }\n]<m>01x4</s>'


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages[7].role }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ range(1000000) | list }}",
        "{{ 'x' * 1000000000 }}",
        "{{ 10 ** 100000000 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_fails_is_an_error_of_the_messages(source):
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source).render(HELLO)
    assert caught.value.param == "messages"


def test_the_reason_that_a_template_gives_is_shown():
    with pytest.raises(RequestError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(HELLO)


def test_the_output_is_bounded(monkeypatch):
    monkeypatch.setattr(chat, "MAX_CHARS", 1000)
    template = ChatTemplate(
        "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}"
    )
    with pytest.raises(RequestError, match="more than 1,000"):
        template.render(HELLO)


def test_kwargs_cannot_replace_what_the_server_sets():
    with pytest.raises(RequestError) as caught:
        ChatTemplate(CHATML).render(HELLO, messages=[])
    assert caught.value.param == "chat_template_kwargs"


def test_a_template_that_is_not_jinja_is_refused():
    with pytest.raises(ModelError, match="not valid"):
        ChatTemplate("{% for %}")
