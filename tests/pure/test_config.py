import dataclasses
from pathlib import Path

import pytest

from twostroke import config
from twostroke.config import EngineConfig, resolve
from twostroke.errors import ConfigError

LISTEN = {"engines_listen": "127.0.0.1:8100", "key": "k"}
JOIN = {"join": "127.0.0.1:8100", "key": "k"}


def sources(flags, **where):
    _, explained = resolve(flags, environ=where.pop("environ", {}), **where)
    return {it.name: (it.value, it.source, it.reason) for it in explained}


def test_defaults_are_explained_by_their_meaning():
    settings, explained = resolve({}, environ={})
    assert settings == EngineConfig()
    assert [it.name for it in explained] == [f.name for f in dataclasses.fields(EngineConfig)]
    assert {it.source for it in explained} == {"default"}
    assert all(it.reason for it in explained)
    assert set(config.field_docs()) == {it.name for it in explained}


def test_a_flag_beats_the_environment_which_beats_a_file_which_beats_the_default(tmp_path):
    path = tmp_path / "t.toml"
    path.write_text('port = 1\nmax-num-seqs = 2\nblock_size = 3\ndtype = "float32"\n')
    environ = {"TWOSTROKE_PORT": "11", "TWOSTROKE_MAX_NUM_SEQS": "12", "HOME": "x"}
    found = sources({"port": "21", "host": None}, config_file=path, environ=environ)
    assert found["port"] == (21, "flag", "--port")
    assert found["max_num_seqs"] == (12, "env", "TWOSTROKE_MAX_NUM_SEQS")
    assert found["block_size"] == (3, "file", f"block_size in {path}")
    assert found["dtype"][:2] == ("float32", "file")
    assert found["host"][1] == "default"


def test_what_is_printed_as_a_file_reads_back(tmp_path):
    import json

    _, explained = resolve({"max_model_len": 512, "enable_prefix_caching": False}, environ={})
    path = tmp_path / "t.toml"
    path.write_text("".join(f"{it.name} = {json.dumps(it.value)}\n" for it in explained))
    again, _ = resolve({}, config_file=path, environ={})
    assert again == EngineConfig(max_model_len=512, enable_prefix_caching=False)


def test_a_secret_is_used_but_not_shown():
    settings, explained = resolve({"api_key": "s3cret"}, environ={})
    assert settings.api_key == "s3cret"
    assert "s3cret" not in str(explained)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            {"max_num_sequences": 1},
            "unknown setting --max-num-sequences; did you mean max_num_seqs?",
        ),
        ({"zzz": 1}, "unknown setting --zzz; see twostroke config --explain"),
        ({"dtype": "float61"}, "choices: auto, float32, bfloat16, float16; did you mean float16?"),
        ({"port": "many"}, "--port is 'many'; it must be a whole number"),
        ({"port": 1.5}, "it must be a whole number"),
        ({"port": True}, "it must be a whole number"),
        ({"gpu_memory_utilization": "x"}, "it must be a number"),
        ({"gpu_memory_utilization": 1.5}, r"it must be in \(0, 1\]"),
        ({"gpu_memory_utilization": "nan"}, r"it must be in \(0, 1\]"),
        ({"block_size": 0}, "--block-size is 0; it must be at least 1"),
        ({"port": 70000}, "at most 65535"),
        ({"host": 3}, "it must be text"),
        ({"offline": "maybe"}, "it must be true or false"),
        ({"max_num_batched_tokens": 8}, "less than --max-num-seqs 64"),
        ({"enable_chunked_prefill": False}, "without chunked prefill"),
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size is 0; it must be at least 1"),
        ({"shutdown_timeout_s": -1}, "at least 0"),
        ({"shutdown_timeout_s": "inf"}, "at most 86400"),
        ({"shutdown_timeout_s": "nan"}, "at most 86400"),
        ({"speculative_method": "draft_model"}, "a draft model needs both"),
        (
            {"tensor_parallel_size": 2}
            | {"speculative_method": "draft_model", "speculative_model": "x"},
            "a draft model does not work with --tensor-parallel-size 2; use .* ngram",
        ),
        ({"speculative_model": "x"}, "method is none and --speculative-model x"),
        ({"prompt_lookup_min": 40}, "--prompt-lookup-min is 40, more than --prompt-lookup-max 32"),
        ({"num_speculative_tokens": 0}, "at least 1"),
        ({"num_speculative_tokens": 129}, "at most 128"),
        (
            {
                "speculative_config": '{"model": "x"}',
                "max_num_seqs": 9,
                "max_num_batched_tokens": 9,
            },
            "leaves no tokens beside a draft row",
        ),
        ({"speculative_config": "ngram"}, "--speculative-config is not a JSON object"),
        ({"speculative_config": "[]"}, "not an object"),
        ({"speculative_config": '{"methd": 1}'}, "has the key 'methd'; known are method, model"),
        (
            {"speculative_config": '{"num_speculative_tokens": "x"}'},
            "num_speculative_tokens of --speculative-config is 'x'; it must be a whole number",
        ),
        ({"prefill": 1}, "--prefill is 1 and --decode 0; give both, or --engines-listen"),
        ({"decode": 2}, "--decode is 2 and --prefill 0; .* engines with --role prefill join"),
        (
            {"prefill": 1, "decode": 1, "data_parallel_size": 2},
            "--data-parallel-size 2 does not go with --prefill; say how many",
        ),
        (
            LISTEN | {"data_parallel_size": 2},
            "--data-parallel-size 2 does not go with --engines-listen",
        ),
        (
            {"prefill": 1, "decode": 1, "speculative_config": '{"model": "x"}'},
            "a draft model does not work where KV is handed over",
        ),
        ({"kv_hold_share": 0}, r"--kv-hold-share is 0.0; it must be in \(0, 1\]"),
        ({"kv_lease_s": 0.5}, "--kv-lease-s is 0.5; it must be at least 1"),
        ({"kv_lease_s": "nan"}, "it must be at least 1"),
        ({"handoff_timeout_s": 30}, "it must be more than --kv-lease-s 30.0"),
        ({"handoff_timeout_s": "inf"}, "and at most 86400"),
        ({"handoff_retries": -1}, "at least 0"),
        ({"engines_listen": "x:1"}, "engines that join over the network need --key FILE"),
        ({"key": "k"}, "--key is k, but no engine can join; .* twostroke key FILE makes one"),
        (LISTEN | {"engines_listen": "8100"}, "--engines-listen is '8100'; it must be HOST:PORT"),
        (LISTEN | {"engines_listen": "::1:80"}, r"must be HOST:PORT; for example .*\[::1\]:8100"),
        (LISTEN | {"engines_listen": "h:70000"}, "must be HOST:PORT"),
        (LISTEN | {"engines_listen": "h:-1"}, "must be HOST:PORT"),
        (LISTEN | {"engines_listen": "[h]:1"}, "must be HOST:PORT"),
        (LISTEN | {"join": "x:1"}, "--join x:1 does not go with --engines-listen 127.0.0.1:8100"),
        ({"role": "decode"}, "--role is decode without --join"),
        ({"ray": "auto", "prefill": 1, "decode": 1}, "--ray auto needs --prefill, --decode and"),
        (LISTEN | {"engine_timeout_s": 0.5}, "--engine-timeout-s is 0.5; it must be from 1"),
    ],
)
def test_what_cannot_work_is_refused_with_value_limit_and_hint(flags, words):
    with pytest.raises(ConfigError, match=words):
        resolve(flags, environ={})


@pytest.mark.parametrize(
    ("flags", "roles", "hands_off"),
    [
        ({}, ("both",), False),
        ({"data_parallel_size": 2}, ("both", "both"), False),
        ({"prefill": 1, "decode": 2}, ("prefill", "decode", "decode"), True),
        (LISTEN, (), True),
        (LISTEN | {"prefill": 1}, ("prefill",), True),
        (JOIN, ("both",), True),
        (JOIN | {"role": "decode"}, ("decode",), True),
        (LISTEN | {"ray": "auto", "prefill": 1, "decode": 1}, (), True),
    ],
)
def test_which_engines_run_here(flags, roles, hands_off):
    settings, _ = resolve(flags, environ={})
    assert settings.local_roles == roles
    assert settings.hands_off is hands_off


@pytest.mark.parametrize(
    ("flags", "transport", "reason"),
    [
        ({"prefill": 1, "decode": 1}, "shm", "all engines are on this host"),
        (LISTEN, "shm", "all engines are on this host"),
        (LISTEN | {"engines_listen": "[::1]:1"}, "shm", "all engines are on this host"),
        (JOIN | {"join": "localhost:1"}, "shm", "all engines are on this host"),
        (JOIN | {"join": "10.0.0.1:1"}, "nixl", "--join 10.0.0.1:1 is reached from other hosts"),
        (LISTEN | {"engines_listen": "0.0.0.0:1"}, "nixl", "--engines-listen 0.0.0.0:1 is reached"),
        ({"prefill": 1, "decode": 1, "device": "cuda"}, "nixl", "KV is on GPUs"),
        (LISTEN | {"ray": "auto", "prefill": 1, "decode": 1}, "nixl", "nodes of a Ray cluster"),
    ],
)
def test_the_transport_follows_from_where_the_engines_are(flags, transport, reason):
    assert resolve(flags, environ={})[0].kv_transport == transport
    value, source, why = sources(flags)["kv_transport"]
    assert (value, source) == (transport, "derived")
    assert reason in why
    assert sources(flags | {"kv_transport": "nixl"})["kv_transport"][:2] == ("nixl", "flag")
    assert sources({})["kv_transport"][:2] == ("auto", "default")


def test_where_other_hosts_read_the_kv_of_engines_here():
    remote = LISTEN | {"prefill": 1, "engines_listen": "10.0.0.1:1"}
    assert sources(remote)["kv_host"] == ("10.0.0.1", "derived", "--engines-listen")
    assert sources(remote | {"kv_host": "h"})["kv_host"][:2] == ("h", "flag")
    assert sources(LISTEN | {"prefill": 1, "kv_transport": "nixl"})["kv_host"][0] == ""
    any_address = remote | {"engines_listen": "0.0.0.0:1"}
    assert sources(any_address | {"prefill": None})["kv_host"][0] == ""  # all engines join
    with pytest.raises(ConfigError, match=r"at which address others read .*--kv-host"):
        resolve(any_address, environ={})


def test_vllms_speculative_config_sets_ours():
    given = '{"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 4}'
    found = sources({}, environ={"TWOSTROKE_SPECULATIVE_CONFIG": given})
    assert found["speculative_method"] == (
        "ngram",
        "env",
        "speculative_method of --speculative-config",
    )
    assert found["num_speculative_tokens"][0] == 6
    assert found["prompt_lookup_min"][0] == found["prompt_lookup_max"][0] == 4
    settings, _ = resolve({"speculative_config": '{"model": "some/model"}'}, environ={})
    assert (settings.speculative_method, settings.speculative_model) == (
        "draft_model",
        "some/model",
    )
    assert (settings.prompt_lookup_min, settings.prompt_lookup_max) == (1, 32)
    assert settings.num_speculative_tokens == 4
    settings, _ = resolve({"speculative_method": "ngram"}, environ={})
    assert settings.num_speculative_tokens == 7


@pytest.mark.parametrize(("text", "value"), [("1", True), ("YES", True), ("off", False)])
def test_switches_in_the_environment(text, value):
    settings, _ = resolve({}, environ={"TWOSTROKE_CHECK": text})
    assert settings.check is value


def test_an_unknown_variable_is_an_error_but_other_documented_ones_are_not():
    resolve({}, environ=dict.fromkeys(config.OTHER_ENVIRONMENT, "x"))
    with pytest.raises(ConfigError, match="TWOSTROKE_PROT; did you mean port"):
        resolve({}, environ={"TWOSTROKE_PROT": "1"})


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        resolve({}, config_file=tmp_path / "none", environ={})
    path = tmp_path / "t.toml"
    path.write_text("port = ")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        resolve({}, config_file=path, environ={})
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        resolve({}, config_file=path, environ={})
    path.write_text("prot = 1")
    with pytest.raises(ConfigError, match=f"unknown setting prot in {path}; did you mean port"):
        resolve({}, config_file=path, environ={})


def test_the_cache_directory_follows_the_environment(monkeypatch):
    monkeypatch.setenv("TWOSTROKE_CACHE", "~/c")
    assert config.cache_dir() == Path("~/c").expanduser()
    monkeypatch.delenv("TWOSTROKE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert config.cache_dir() == Path("/x/twostroke")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert config.cache_dir() == Path("~/.cache/twostroke").expanduser()
