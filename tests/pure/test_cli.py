import dataclasses
import json
import os
import re
import shlex
import sys
import types

import pytest
from typer.testing import CliRunner

from twostroke import cli, cli_chat
from twostroke.cli_flags import ENGINE_ONLY, ONLINE_ONLY, SERVER_ONLY
from twostroke.config import EngineConfig
from twostroke.errors import ConfigError, EngineDeadError, ModelError, UnsupportedModelError

FIELDS = [field.name for field in dataclasses.fields(EngineConfig)]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("TWOSTROKE_"):
            monkeypatch.delenv(name)


def run(*texts: str, **options):
    """Run a command line, given whole or in pieces."""
    return CliRunner().invoke(cli.app, shlex.split(" ".join(texts)), **options)


@pytest.fixture
def launched(monkeypatch):
    """What `serve` hands to the launcher; its exit code is 7."""
    calls = []
    launch = types.ModuleType("twostroke.proc.start")
    launch.serve = lambda settings, explained: calls.append((settings, explained)) or 7
    monkeypatch.setitem(sys.modules, "twostroke.proc.start", launch)
    return calls


def test_serve_has_a_flag_for_every_setting_with_its_meaning_and_default():
    shown = " ".join(run("serve", "--help").output.split())
    for field in dataclasses.fields(EngineConfig):
        if field.name in ENGINE_ONLY:
            assert f"--{field.name} " not in shown
            continue
        assert f"--{field.name.replace('_', '-')} " in shown
        assert " ".join(field.metadata["doc"].split()) in shown
    assert "[default: 8000]" in shown
    assert "--enable-prefix-caching / --no-enable-prefix-caching" in shown
    assert "--dtype auto|float32|bfloat16|float16" in shown


def test_serve_launches_with_what_was_given(launched):
    result = run("serve", "a/model", "--port", "9000", "--no-enable-prefix-caching", "--check")
    assert result.exit_code == 7
    settings, explained = launched[0]
    assert settings == EngineConfig(
        model="a/model", port=9000, enable_prefix_caching=False, check=True
    )
    given = {it.name for it in explained if it.source == "flag"}
    assert given == {"model", "port", "enable_prefix_caching", "check"}


def test_serve_reads_a_file_and_flags_override_it(launched, tmp_path):
    path = tmp_path / "t.toml"
    path.write_text("port = 1\nmax_num_seqs = 4\n")
    run("serve", "--config", str(path), "--port", "2")
    settings, _ = launched[0]
    assert (settings.port, settings.max_num_seqs) == (2, 4)


def test_the_model_can_be_named_either_way_but_not_two_models(launched):
    run("serve", "--model", "m")
    run("serve", "m", "--model", "m")
    assert [settings.model for settings, _ in launched] == ["m", "m"]
    with pytest.raises(ConfigError, match="two models are given: a and --model b"):
        run("serve", "a", "--model", "b", catch_exceptions=False)


def test_engine_has_the_settings_of_one_engine_and_joins(monkeypatch):
    calls = []
    module = types.ModuleType("twostroke.proc.engine_main")
    module.run = lambda settings: calls.append(settings) or 5
    monkeypatch.setitem(sys.modules, "twostroke.proc.engine_main", module)
    result = run("engine m --role prefill --join [::1]:8100 --key k --max-num-seqs 3")
    assert result.exit_code == 5
    assert calls == [
        EngineConfig(
            model="m",
            role="prefill",
            join="[::1]:8100",
            key="k",
            max_num_seqs=3,
            kv_transport="shm",  # over the loopback address nobody else joins
        )
    ]
    shown = " ".join(run("engine", "--help").output.split())
    assert not [name for name in SERVER_ONLY if f"--{name.replace('_', '-')} " in shown]


def test_key_makes_a_key_once(tmp_path):
    from twostroke.keys import read_key

    path = tmp_path / "key"
    assert "holds a new key" in run(f"key {path}").output
    assert read_key(path)
    with pytest.raises(ConfigError, match="exists"):
        run(f"key {path}", catch_exceptions=False)


def test_an_unknown_flag_names_the_nearest(launched):
    result = run("serve", "--max-num-sequences", "3")
    assert result.exit_code == 2
    assert "--max-num-seqs" in result.output
    assert run("serv").exit_code == 2
    assert "serve" in run("serv").output
    assert launched == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("port 1 is in use"), 2),
        (ModelError("no such file"), 3),
        (UnsupportedModelError("mamba"), 3),
        (EngineDeadError("gone"), 1),
    ],
)
def test_errors_for_users_are_one_line_and_a_code(monkeypatch, capsys, error, code):
    def app():
        raise error

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_config_prints_a_file_that_gives_the_same_settings(launched, tmp_path):
    printed = run("config", "--port", "9000", "--dtype", "float32", "--api-key", "s3cret")
    assert "s3cret" not in printed.output
    path = tmp_path / "t.toml"
    path.write_text(printed.output)
    run("serve", "--config", str(path))
    assert launched[0][0] == EngineConfig(port=9000, dtype="float32")


def test_config_explains_value_source_and_reason(monkeypatch):
    monkeypatch.setenv("TWOSTROKE_MAX_NUM_SEQS", "8")
    output = run("config", "--explain", "--port", "9000").output
    assert [line.split()[0] for line in output.splitlines()] == ["setting", *FIELDS]
    assert re.search(r"^port +9000 +flag +--port$", output, re.MULTILINE)
    assert re.search(r"^max_num_seqs +8 +env +TWOSTROKE_MAX_NUM_SEQS$", output, re.MULTILINE)
    rows = json.loads(run("config", "--explain", "--json").output)
    assert {"name": "port", "value": 8000, "source": "default"}.items() <= rows[
        FIELDS.index("port")
    ].items()
    assert json.loads(run("config", "--json").output)["port"] == 8000


def test_version():
    from twostroke import __version__

    assert run("--version").output == f"twostroke {__version__}\n"


# ---------------------------------------------------------------- clients of a server


class FakeServer:
    """Stands where httpx's transport stands."""

    def __init__(self, monkeypatch) -> None:
        import httpx

        self.requests = []
        self.slots = []
        self.events = [
            delta("Hel"),
            delta("lo"),
            {"choices": [], "usage": {"completion_tokens": 2}},
        ]
        self.refusal = None
        connect = cli_chat.connect

        def connected(url, api_key):
            client = connect(url, api_key)
            client._transport = httpx.MockTransport(self.answer)
            return client

        monkeypatch.setattr(cli_chat, "connect", connected)

    def answer(self, request):
        import httpx

        self.requests.append(request)
        if self.refusal:
            return httpx.Response(400, json={"error": {"message": self.refusal}})
        if request.url.path == "/slots":
            return httpx.Response(200, json=self.slots)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "fake"}]})
        events = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in self.events]
        return httpx.Response(200, text="".join([*events, "data: [DONE]\n\n"]))

    def bodies(self):
        return [json.loads(it.content) for it in self.requests if it.method == "POST"]


def delta(text):
    return {"choices": [{"delta": {"content": text}}]}


@pytest.fixture
def fake_server(monkeypatch):
    return FakeServer(monkeypatch)


def test_chat_answers_one_prompt(fake_server):
    result = run("chat Hi --system 'Be brief' --max-tokens 5 --api-key k --url http://h:1/v1")
    assert (result.exit_code, result.stdout) == (0, "Hello\n")
    [body] = fake_server.bodies()
    assert body["messages"] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hi"},
    ]
    assert (body["model"], body["max_tokens"], body["stream"]) == ("default", 5, True)
    assert "temperature" not in body
    assert fake_server.requests[0].headers["authorization"] == "Bearer k"
    assert str(fake_server.requests[0].url) == "http://h:1/v1/chat/completions"


def test_an_answer_may_hold_what_unicode_calls_the_end_of_a_line(fake_server):
    text = "a\u2028b\u0085c\u2029d\x1ce"
    fake_server.events = [delta(text)]
    conversation = cli_chat.Conversation(cli_chat.connect("http://h", ""), "default")
    assert list(conversation.ask("x")) == [text]


def test_a_conversation_remembers_and_ends_with_its_input(fake_server):
    result = run("chat", input="one\n\ntwo\n")
    assert result.exit_code == 0
    assert result.stdout == "Hello\nHello\n"
    assert "fake at http://127.0.0.1:8000" in result.stderr
    assert "(2 tokens, first after " in result.stderr
    first, second = fake_server.bodies()
    assert [message["content"] for message in first["messages"]] == ["one"]
    assert [message["content"] for message in second["messages"]] == ["one", "Hello", "two"]


def test_an_interrupt_stops_the_answer_and_keeps_what_came(fake_server, monkeypatch):
    conversation = cli_chat.Conversation(cli_chat.connect("http://h", ""), "default")
    pieces = conversation.ask("count")
    assert next(pieces) == "Hel"
    with pytest.raises(KeyboardInterrupt):
        pieces.throw(KeyboardInterrupt())
    assert [message["content"] for message in conversation.messages] == ["count", "Hel"]

    monkeypatch.setattr(cli_chat, "print", interrupt_at("Hel"), raising=False)
    result = run("chat", input="one\n")
    assert result.exit_code == 0
    assert "(stopped)" in result.stderr


def interrupt_at(text):
    def printing(*args, **options):
        if args == (text,):
            raise KeyboardInterrupt
        print(*args, **options)

    return printing


def test_a_refusal_is_shown_and_its_question_forgotten(fake_server):
    fake_server.refusal = "too long"
    conversation = cli_chat.Conversation(cli_chat.connect("http://h", ""), "default")
    with pytest.raises(cli_chat.TwostrokeError, match="HTTP 400: too long"):
        list(conversation.ask("x"))
    assert conversation.messages == []
    fake_server.refusal = None
    fake_server.events = [delta("He"), {"error": {"message": "engine died"}}]
    with pytest.raises(cli_chat.TwostrokeError, match="the answer broke off: engine died"):
        list(conversation.ask("x"))
    result = run("chat", input="one\ntwo\n")
    assert result.exit_code == 0
    assert result.stderr.count("error: the answer broke off: engine died") == 2


def test_no_server(monkeypatch):
    for command in (["chat", "x"], ["ps"], ["bench", "serve"]):
        at = "--base-url" if command[0] == "bench" else "--url"
        result = run(*command, at, "http://127.0.0.1:9")
        assert isinstance(result.exception, ConfigError)
        assert "no server answers at http://127.0.0.1:9" in str(result.exception)
        assert "start one with twostroke serve" in str(result.exception)


def test_ps_shows_one_line_a_request(fake_server):
    assert run("ps").output == "no requests\n"
    fake_server.slots = [{"request_id": "r1", "state": "running", "age_s": 1.234}]
    assert run("ps").output == "request_id  state    age_s\nr1          running  1.2\n"


# ---------------------------------------------------------------- bench


def test_bench_serve_prints_vllms_block_then_json_and_saves(monkeypatch, tmp_path):
    from twostroke.bench import serving, stats
    from twostroke.bench.load import Outcome

    asked = []

    async def measure(options, on_done):
        asked.append(options)
        outcome = Outcome(4, 2, start_s=0.0, chunk_times_s=[0.1, 0.2])
        on_done(outcome)
        figures = stats.summarise([outcome], 1.0)
        return {"model_id": "m", "date": "d", "request_rate": 2.0, **figures, "first_error": None}

    monkeypatch.setattr(serving, "measure", measure)
    result = run(
        "bench serve --num-prompts 1 --request-rate 2 --max-concurrency 3 --ignore-eos",
        "--goodput ttft:200 --goodput tpot:5 --save-result --json --result-dir",
        str(tmp_path),
    )
    assert result.exit_code == 0
    [options] = asked
    assert (options.num_prompts, options.request_rate, options.max_concurrency) == (1, 2.0, 3)
    assert (options.goodput, options.ignore_eos) == (["ttft:200", "tpot:5"], True)
    lines = result.stdout.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert json.loads(lines[-1])["completed"] == 1
    [saved] = tmp_path.iterdir()
    assert json.loads(saved.read_text()) == json.loads(lines[-1])


def test_bench_flags_are_vllms():
    shown = run("bench", "serve", "--help").output
    flags = (
        "base-url model api-key dataset-name dataset-path num-prompts request-rate burstiness "
        "max-concurrency random-input-len random-output-len random-prefix-len random-range-ratio "
        "seed num-warmups ignore-eos goodput percentile-metrics metric-percentiles save-result "
        "result-dir result-filename"
    )
    for flag in flags.split():
        assert f"--{flag} " in shown
    assert run("bench", "serve", "--num-prompts", "0").exit_code == 2


def test_bench_throughput_measures_an_engine_with_the_settings_given(monkeypatch):
    made = []

    class Engine:
        def __init__(self, **settings):
            made.append(settings)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            made.append("closed")

        def reset_prefix_cache(self):
            return True

        def generate(self, prompts, params, *, use_tqdm):
            sample = types.SimpleNamespace(token_ids=[1] * params.max_tokens)
            return [types.SimpleNamespace(outputs=[sample]) for _ in prompts]

    monkeypatch.setattr("twostroke.LLM", Engine, raising=False)
    result = run(
        "bench throughput m --num-prompts 4 --input-len 8 --output-len 2",
        "--max-num-seqs 16 --json",
    )
    assert result.exit_code == 0, result.output
    assert (made[0]["model"], made[0]["max_num_seqs"], made[1]) == ("m", 16, "closed")
    figures = json.loads(result.stdout.splitlines()[-1])
    assert (figures["num_requests"], figures["total_num_tokens"]) == (4, 40)
    assert "4 x 8 in / 2 out" in result.stdout
    shown = run("bench", "throughput", "--help").output
    assert not [name for name in ONLINE_ONLY if f"--{name.replace('_', '-')} " in shown]
