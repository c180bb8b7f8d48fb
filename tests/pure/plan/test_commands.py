"""What a plan tells people to run is what the command line takes."""

import shlex
from dataclasses import replace

import pytest
import typer

from twostroke import cli
from twostroke.errors import ConfigError
from twostroke.plan.candidates import size_engines
from twostroke.plan.commands import HUB, commands
from twostroke.plan.layout import Layout
from twostroke.plan.question import Engines, Question, ask
from twostroke.plan.room import room_of
from twostroke.twin.models import KNOWN


def question(gpus: int = 16, **engines: object) -> Question:
    return ask(
        "qwen3-30b-a3b", "H100", "poisson:20/s,in=4096,out=512,n=50", "", gpus=gpus,
        engines=Engines(**engines),
    )  # fmt: skip


def apart(asked: Question, prefill: int, decode: int, sizes: tuple[int, int] = (2, 2)) -> Layout:
    engines = size_engines(asked).engines
    return Layout(
        prefill=replace(engines[sizes[0]], count=prefill),
        decode=replace(engines[sizes[1]], count=decode),
    )


def parsed(line: str) -> dict[str, object]:
    """The parameters of a command of ours, without running it."""
    name, command, *args = shlex.split(line, comments=True)
    assert name == "twostroke"
    group = typer.main.get_command(cli.app)
    found = group.get_command(typer.Context(group), command)  # type: ignore[attr-defined]
    context = found.make_context(command, args)
    return dict(context.params)


@pytest.mark.parametrize(
    ("asked", "layout"),
    [
        (question(), apart(question(), 1, 3)),
        (question(), apart(question(), 4, 2, (1, 4))),
        (question(kv_mode="stream", block_size=32), apart(question(), 1, 2)),
        (question(), Layout(both=size_engines(question()).engines[2])),
    ],
    ids=["one host", "several hosts", "streams", "together"],
)
def test_commands_of_ours_are_taken(asked: Question, layout: Layout) -> None:
    lines = [line for line in commands(asked, layout) if line.startswith("twostroke ")]
    assert lines
    given = [parsed(line) for line in lines]
    assert any("Qwen/Qwen3-30B-A3B" in it.values() for it in given)
    if asked.engines.kv_mode == "stream":
        assert any(it.get("kv_mode") == "stream" for it in given)


def test_vllm_gets_no_more_seats_than_leave_room_for_what_arrives() -> None:
    asked = question(max_num_seqs=4096, max_num_batched_tokens=8192)
    layout = apart(asked, 3, 1)
    room = room_of(asked, layout)
    assert room.staging < 0
    assert 0 < room.advised_seats < room.holds
    assert 0 < room.held_share < room.hold_limit
    decode = next(line for line in commands(asked, layout) if "kv_consumer" in line)
    assert f"--max-num-seqs {room.advised_seats} " in decode
    assert "--quantization" not in decode


def test_eight_bit_weights_are_for_vllm_alone() -> None:
    asked = question(dtype="float8", kv_dtype="float8")
    ours, *lines = commands(asked, apart(asked, 1, 1))
    assert ours.startswith("# twostroke has no float8 weights")
    theirs = [line for line in lines if not line.startswith("#")]
    assert len(theirs) == 2
    assert all("--quantization fp8 --kv-cache-dtype fp8" in line for line in theirs)


def test_types_that_an_engine_does_not_have_are_said_so() -> None:
    asked = question(kv_dtype="int8")
    assert [line[:12] for line in commands(asked, apart(asked, 1, 1))] == [
        "# twostroke ", "# vLLM has n",
    ]  # fmt: skip


def test_known_models_are_named_as_hugging_face_names_them() -> None:
    assert set(HUB) == set(KNOWN)
    with pytest.raises(ConfigError, match="is not known"):
        ask("nobody-1b", "H100", "poisson:1/s,in=8,out=8,n=2", "")
