"""From flags to scenarios, and the command as people run it."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tests.pure.test_imports import loaded
from twostroke import cli
from twostroke.errors import ConfigError
from twostroke.twin.deploy import scenario_of
from twostroke.twin.options import Engines, TwinOptions, parse_engines

ARTICLE = {
    "model": "Qwen3-30B-A3B",
    "gpu": "H100",
    "workload": "poisson:65/s,in=8192,out=1024,n=325",
    "kv_gib": 54.0,
    "max_num_batched_tokens": 65_536,
}


@pytest.mark.parametrize(
    ("text", "engines"),
    [
        ("4xTP8", Engines(4, 8)),
        ("TP2", Engines(1, 2)),
        ("3", Engines(3)),
        ("2xtp4xDP2", Engines(2, 4, 2)),
        ("2xTP4DP2", Engines(2, 4, 2)),
        ("DP4", Engines(1, 1, 4)),
    ],
)
def test_engines_in_words(text, engines):
    assert parse_engines("--both", text) == engines


@pytest.mark.parametrize("text", ["x", "0xTP8", "4x", "TP", "4xTP0", "4 x TP8", "", "99999"])
def test_engines_that_are_none(text):
    with pytest.raises(ConfigError, match="--both is"):
        parse_engines("--both", text)


def test_the_article_s_deployment():
    scenario = scenario_of(TwinOptions(**ARTICLE, prefill="4xTP8", decode="7xTP8"))
    assert [(group.role, group.count) for group in scenario.engines] == [
        ("prefill", 4),
        ("decode", 7),
    ]
    assert scenario.num_devices == 88
    decode = scenario.engines[1]
    assert decode.layout.token_bytes == 24_576  # a rank: heads are stored twice
    assert (decode.config.num_blocks - 1) * 16 // 8192 == 288  # prompts that 54 GiB hold
    assert decode.config.max_model_len == 9217
    assert scenario.link.bandwidth.rate_at(0) == 8 * 50e9


def test_engines_of_a_data_parallel_group_are_counted():
    scenario = scenario_of(TwinOptions(**ARTICLE, both="1xTP2xDP4"))
    assert scenario.engines[0].count == 4
    assert scenario.num_devices == 8


def test_links_from_numbers_and_files(tmp_path):
    curve = tmp_path / "b.csv"
    curve.write_text("seconds,rate\n0,1e9\n5,2e9\n")
    scenario = scenario_of(
        TwinOptions(**ARTICLE, prefill="1", decode="1", link=str(curve), fabric="800Gb/s")
    )
    assert scenario.link.bandwidth.rate_at(6) == 2e9
    assert scenario.link.fabric is not None
    assert scenario.link.fabric.rate_at(0) == 100e9


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": ""}, "no model"),
        ({"workload": ""}, "no workload"),
        ({}, "no engine"),
        ({"both": "1xTP3"}, "TP3 cannot share"),
        ({"both": "1", "gpu": "H10"}, "--gpu is 'H10'"),
        ({"both": "1", "dtype": "int3"}, "--dtype"),
        ({"both": "1", "kv_mode": "push"}, "--kv-mode is 'push'; choices: pull, stream"),
        ({"both": "1", "pd_policy": "maybe"}, "--pd-policy"),
        ({"both": "1", "cost": "magic"}, "--cost is 'magic'"),
        ({"both": "1", "link": "-3"}, "--link is -3"),
        ({"both": "1", "link": "nowhere.csv"}, "cannot read"),
        ({"both": "1", "link": "0GB/s"}, "--link is '0GB/s'"),
        ({"both": "1", "fabric": "fast GB/s"}, "--fabric is 'fast GB/s'"),
        ({"both": "1", "link": "maps"}, "cannot read"),
        ({"both": "1", "kv_gib": 1e-9}, "holds no block"),
        ({"both": "1", "gpu": "RTX 4090", "kv_gib": 0.0}, "leave no room for KV"),
    ],
)
def test_what_cannot_be_simulated_is_named(fields, words):
    with pytest.raises(ConfigError, match=words):
        scenario_of(TwinOptions(**(ARTICLE | fields)))


def test_the_command(tmp_path):
    command = ["twin", "--model", "smollm2-135m", "--both", "2", "--json"]
    command += ["--workload", "poisson:5/s,in=100,out=20,n=20"]
    ledger = tmp_path / "ledger.jsonl"
    done = CliRunner().invoke(cli.app, [*command, "--save-ledger", str(ledger)])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output.splitlines()[-1])["completed"] == 20
    again = CliRunner().invoke(
        cli.app, ["twin", "--model", "smollm2-135m", "--both", "1", "--workload", str(ledger)]
    )
    assert again.exit_code == 0, again.output
    assert "Successful requests:                     20" in again.output


def test_errors_are_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "twostroke.cli", "twin", "--model", "nothing", "--both", "1"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: no workload is given")
    assert "Traceback" not in done.stderr


def test_a_simulation_loads_nothing_slow():
    slow = ["torch", "numba", "plotly", "httpx", "zmq", "starlette", "asyncio", "transformers"]
    assert (
        loaded(["twostroke.twin.world", "twostroke.twin.deploy", "twostroke.twin.figures"], slow)
        == []
    )
