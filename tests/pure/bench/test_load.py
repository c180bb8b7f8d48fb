import pytest

from twostroke.bench import load
from twostroke.bench.load import Outcome, Target
from twostroke.bench.workload import Prompt
from twostroke.errors import ConfigError

TARGET = Target(model="fake", ignore_eos=True)


async def test_every_piece_is_timed_and_tokens_are_those_the_server_counts(server):
    async with load.connect(server.url) as client:
        outcome = await load.send(client, TARGET, Prompt([21, 22, 23], 5))
    assert outcome.error == ""
    assert (outcome.prompt_tokens, outcome.output_tokens) == (3, 5)
    assert len(outcome.chunk_times_s) == 5  # the last event, which only says why it ended, is none
    times = [outcome.start_s, *outcome.chunk_times_s]
    assert times == sorted(times)
    assert server.bodies[0]["prompt"] == [21, 22, 23]
    assert server.bodies[0]["ignore_eos"] is True
    assert server.bodies[0]["stream_options"] == {"include_usage": True}


async def test_an_answer_whose_only_token_has_no_text_still_has_a_first_token_time(server):
    async def answer(ask, send):
        from tests.pure.bench.conftest import event

        await send({"type": "http.response.start", "status": 200, "headers": []})
        await event(send, {"choices": [{"text": "", "finish_reason": "length"}]})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    server.answer = answer
    async with load.connect(server.url) as client:
        outcome = await load.send(client, TARGET, Prompt([21], 1))
    assert outcome.error == ""
    assert len(outcome.chunk_times_s) == 1


@pytest.mark.parametrize(
    ("fault", "value", "words"),
    [
        ("error", (429, "too many"), "HTTP 429: too many"),
        ("error_midway", "engine died", "engine died"),
        ("cut_off", True, "before [DONE]"),
        ("silent", True, "no token"),
    ],
)
async def test_failures_become_errors_of_their_request(server, fault, value, words):
    setattr(server, fault, value)
    async with load.connect(server.url) as client:
        outcome = await load.send(client, TARGET, Prompt([21], 3))
    assert words in outcome.error


async def test_a_server_that_is_not_there(server):
    async with load.connect("http://127.0.0.1:9") as client:
        assert "Connect" in (await load.send(client, TARGET, Prompt([21], 1))).error
        with pytest.raises(ConfigError, match=r"no server answers at http://127\.0\.0\.1:9"):
            await load.find_model(client)
        assert await load.find_vocab_size(client) == load.DEFAULT_VOCAB_SIZE


async def test_model_and_vocabulary_come_from_the_server(server):
    async with load.connect(server.url + "/v1") as client:
        assert await load.find_model(client) == "fake"
        assert await load.find_vocab_size(client) == 64


async def test_outcomes_are_in_the_order_of_the_prompts_and_concurrency_is_bounded(server):
    prompts = [Prompt([21] * (i + 1), 3) for i in range(12)]
    seen = []
    async with load.connect(server.url) as client:
        outcomes, duration_s = await load.run(
            client, TARGET, prompts, [0.0] * 12, max_concurrency=2, on_done=seen.append
        )
    assert [outcome.prompt_tokens for outcome in outcomes] == list(range(1, 13))
    assert server.most_live <= 2
    assert len(seen) == 12
    assert duration_s > 0


async def test_open_loop_sends_no_request_before_its_time(server):
    offsets_s = [0.0, 0.02, 0.04]
    async with load.connect(server.url) as client:
        outcomes, duration_s = await load.run(client, TARGET, [Prompt([21], 1)] * 3, offsets_s)
    gaps = [outcome.start_s - outcomes[0].start_s for outcome in outcomes]
    # The first request may itself leave late by some moments, never the others early.
    assert gaps[1] > 0
    assert gaps[2] > gaps[1]
    assert duration_s >= 0.04


def test_latencies_of_an_outcome():
    outcome = Outcome(10, 4, start_s=1.0, chunk_times_s=[1.5, 1.75, 2.0])
    assert (outcome.ttft_s, outcome.e2el_s, outcome.itls_s) == (0.5, 1.0, [0.25, 0.25])
    assert outcome.tpot_s == pytest.approx(0.5 / 3)
    assert Outcome(1, 1, 1.0, [1.5]).tpot_s == 0
