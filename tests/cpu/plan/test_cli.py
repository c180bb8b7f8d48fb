"""`twostroke plan` and `twostroke diagnose` as a user meets them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.pure.advice.test_verdicts import HEALTHY
from twostroke.cli import app
from twostroke.cost import LinearStepCost
from twostroke.errors import ConfigError, TwostrokeError
from twostroke.plan import render
from twostroke.plan.question import Engines, ask
from twostroke.plan.search import search

SNAPSHOT = Path(__file__).parent / "plan.txt"
QUESTION = [
    "plan", "--model", "llama-3.1-8b", "--gpu", "H100", "--workload",
    "poisson:2/s,in=512,out=32,n=20", "--slo", "ttft=1s,tpot=50ms", "--gpus", "2", "--checks", "1",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_json_is_nothing_but_json() -> None:
    done = run(*QUESTION, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["carries_the_load"]
    assert found["options"][0]["twin"]["failed"] == 0
    assert not list(Path().iterdir())


def test_the_report_ends_with_the_path_of_its_json() -> None:
    done = run(*QUESTION, "--html", "plan.html")
    assert done.exit_code == 0, done.output
    assert "JSON: plan.json" in done.stdout
    assert json.loads(Path("plan.json").read_text())["options"]
    assert "<title>twostroke plan" in Path("plan.html").read_text()


def test_the_text_is_what_it_was() -> None:
    """With costs of its own, so that it changes only when the report does.

    To renew it: delete plan.txt and run this test.
    """
    from dataclasses import replace

    cost = LinearStepCost(base_s=4e-3, token_s=2e-5, row_s=2e-5, context_s=4e-8)
    question = ask(
        "qwen3-30b-a3b", "H100", "poisson:20/s,in=4096,out=512,n=100", "ttft=2s,tpot=50ms",
        gpus=8, engines=Engines(max_num_seqs=256),
    )  # fmt: skip
    costs = {size: replace(cost, base_s=4e-3 / size, token_s=2e-5 / size) for size in (1, 2, 4, 8)}
    text = render.text(search(replace(question, costs=costs), checks=0), "plan.json") + "\n"
    assert max(map(len, text.splitlines())) <= render.WIDTH
    if not SNAPSHOT.exists():
        SNAPSHOT.write_text(text)
    assert text == SNAPSHOT.read_text()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("plan",), "--model is missing"),
        ((*QUESTION, "--slo", "ttft=soon"), "--slo ttft is 'soon'"),
        ((*QUESTION, "--gpu", "H1000"), "did you mean H100"),
        ((*QUESTION, "--dtype", "int3"), "--dtype is 'int3'"),
        ((*QUESTION, "--gpu-memory-utilization", "2"), "must be in"),
        ((*QUESTION, "--max-num-batched-tokens", "4"), "less than --max-num-seqs"),
        ((*QUESTION, "--html", "/nowhere/plan.html"), "cannot write /nowhere/plan.html"),
        (("plan", "--example", "paper"), "known: article"),
        (("diagnose",), "give one thing to diagnose"),
        (("diagnose", "--url", "127.0.0.1:1", "--for", "0s"), "cannot read http://127"),
    ],
)
def test_wrong_input_ends_in_one_line(arguments: tuple[str, ...], complaint: str) -> None:
    done = run(*arguments)
    assert isinstance(done.exception, TwostrokeError), done.output
    assert complaint in str(done.exception)
    assert isinstance(done.exception, ConfigError)


def test_diagnose_reads_what_it_wrote() -> None:
    Path("seen.json").write_text(json.dumps(HEALTHY.as_dict()))
    done = run("diagnose", "seen.json")
    assert done.exit_code == 0, done.output
    assert "nothing binds" in done.stdout.splitlines()[0]
    assert "JSON: diagnosis.json" in done.stdout
    again = run("diagnose", "diagnosis.json", "--json", "--turn-tokens", "16")
    answers = {it["name"]: it["answer"] for it in json.loads(again.stdout)["verdicts"]}
    assert answers["append_on_decode"] == "append"
