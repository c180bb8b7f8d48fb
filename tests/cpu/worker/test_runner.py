"""The runner on a tiny model, against one plain forward pass over all tokens for each new one."""

import math
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.cpu.worker.driving import Driver, Request, small_config
from twostroke.checkpoint import open_checkpoint
from twostroke.errors import ConfigError
from twostroke.messages import NO_TOKENS, SamplingParams
from twostroke.worker import prompt_logprobs
from twostroke.worker import runner as runner_module
from twostroke.worker.attention import TorchAttention, make_attention
from twostroke.worker.inputs import PlanError
from twostroke.worker.runner import ModelRunner

KERNELS = {
    "best": make_attention,
    "torch": lambda *arguments, int8_scores: TorchAttention(*arguments),
}


class FullAttention:
    """Causal attention over the tokens at hand, without a cache."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)


def reference_logits(runner: ModelRunner, tokens: list[int]) -> Tensor:
    """Logits [len(tokens), vocab] of a full pass."""
    ids = torch.tensor(tokens)
    hidden = runner.model.forward(ids, torch.arange(len(tokens)), FullAttention())
    return runner.model.logits(hidden)


def reference_greedy(runner: ModelRunner, request: Request) -> list[int]:
    tokens = list(request.prompt)
    for _ in range(request.max_tokens):
        tokens.append(int(reference_logits(runner, tokens)[-1].argmax()))
    return tokens[len(request.prompt) :]


@pytest.fixture(scope="module", params=sorted(KERNELS))
def runner(request: pytest.FixtureRequest, tiny_dir: Path) -> ModelRunner:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_module, "make_attention", KERNELS[request.param])
        runner = ModelRunner(small_config(), open_checkpoint(tiny_dir))
    # Whatever lies in blocks that a request has not written must not reach it.
    runner.kv_pool.fill_(torch.nan)
    return runner


def mix(seed: int, count: int = 7) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request([rng.randrange(256) for _ in range(rng.randint(1, 50))], rng.randint(1, 12))
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("chunk", "preempt"), [(1000, 0.0), (1, 0.0), (3, 0.0), (20, 0.0), (16, 0.15)]
)
def test_greedy_tokens_equal_a_full_recompute(runner: ModelRunner, chunk: int, preempt: float):
    requests = mix(chunk)
    expected = [reference_greedy(runner, request) for request in requests]
    driver = Driver(runner.run, seed=chunk)
    assert driver.serve(requests, chunk=chunk, preempt=preempt) == expected


def test_more_requests_than_seats(runner: ModelRunner):
    requests = mix(99, count=20)
    expected = [reference_greedy(runner, request) for request in requests]
    assert Driver(runner.run).serve(requests, chunk=9) == expected


def test_a_seeded_request_draws_the_same_tokens_in_any_company(runner: ModelRunner):
    def seeded() -> Request:
        params = SamplingParams(temperature=0.9, top_p=0.95, seed=5, presence_penalty=0.5)
        return Request([9, 8, 7], 20, params)

    alone, crowded = seeded(), seeded()
    Driver(runner.run).serve([alone])
    Driver(runner.run, seed=1).serve([*mix(1, 5), crowded], chunk=2, preempt=0.1)
    assert alone.outputs == crowded.outputs
    assert len(set(alone.outputs)) > 3


@pytest.mark.parametrize("chunk", [1000, 5])
def test_log_probs_of_prompt_and_output(
    runner: ModelRunner, chunk: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(prompt_logprobs, "LOGITS_BYTES", 3 * 4 * 259)  # 3 positions at once
    params = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=3)
    request, other = Request(list(range(40, 61)), 4, params), Request([1, 2], 9)
    Driver(runner.run).serve([request, other], chunk=chunk)
    expected = torch.log_softmax(reference_logits(runner, request.tokens), -1)
    assert other.logprobs == other.prompt_logprobs == []
    assert len(request.logprobs) == 4
    assert len(request.prompt_logprobs) == 20  # none for the first token
    entries = request.prompt_logprobs + request.logprobs
    for position, entry in enumerate(entries):
        prompt = position < 20
        token = request.tokens[position + 1]
        assert entry.token_ids[0] == token
        assert len(entry.token_ids) == (4 if prompt else 3)
        for token_id, logprob in zip(entry.token_ids, entry.logprobs, strict=True):
            assert logprob == pytest.approx(float(expected[position, token_id]), abs=1e-4)
        assert entry.logprobs[1:] == sorted(entry.logprobs[1:], reverse=True)
        if not prompt:
            assert entry.rank == 1


def test_a_request_that_comes_back_with_outputs_reports_its_prompt_once(runner: ModelRunner):
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    request = Request([5, 6, 7, 8], 10, params)
    driver = Driver(runner.run, seed=3)
    driver.serve([request], preempt=0.4)
    assert [entry.token_ids for entry in request.prompt_logprobs] == [[6], [7], [8]]


def test_logits_that_are_not_finite_end_their_request_alone(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
):
    requests = mix(4, count=3)
    expected = [reference_greedy(runner, request) for request in requests[1:]]
    poisoned = requests[0].prompt = [77, 200, 13]
    logits = runner.model.logits
    hidden_of_poisoned = runner.model.forward(
        torch.tensor(poisoned), torch.arange(3), FullAttention()
    )[-1]

    def poison(hidden: Tensor) -> Tensor:
        result = logits(hidden)
        same = torch.isclose(hidden, hidden_of_poisoned, atol=1e-4).all(-1)
        result[same, 3] = math.nan
        return result

    monkeypatch.setattr(runner.model, "logits", poison)
    outputs = Driver(runner.run).serve(requests)
    assert outputs[0] == []
    assert "not finite" in requests[0].error
    assert outputs[1:] == expected


def test_a_plan_without_rows_does_not_touch_the_model(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delattr(runner, "model")
    Driver(runner.run).serve([])


def test_a_malformed_plan_is_refused_before_the_model_runs(runner: ModelRunner):
    plans = []

    def record(plan):
        plans.append(plan)
        return runner.run(plan)

    Driver(record).serve([Request([1, 2, 3], 2)])
    first = plans[0]
    first.new = []
    with pytest.raises(PlanError, match="are empty"):
        runner.run(first)
    first.slots = NO_TOKENS
    with pytest.raises(PlanError, match="0 rows but 1 of num_computed"):
        runner.seats.step_inputs(first)


def test_facts_say_what_was_chosen_and_why(tiny_dir: Path):
    stages = []
    runner = ModelRunner(
        small_config(num_gpu_blocks_override=5, max_model_len=0),
        open_checkpoint(tiny_dir),
        lambda *progress: stages.append(progress),
    )
    assert runner.num_blocks == 5
    assert runner.max_model_len == 32
    facts = {name: (value, reason) for name, value, reason in runner.facts}
    assert facts["Device"] == ("cpu, 1 thread", "--device, --cpu-threads")
    assert facts["Number format"] == ("float32", "--dtype")
    assert facts["KV pool"] == ("20 KiB, 5 blocks of 8 = 32 tokens", "--num-gpu-blocks-override")
    assert facts["Model length"][0] == "32 tokens"
    assert {stage for stage, _, _ in stages} >= {"weights", "kernels"}
    assert Driver(runner.run, num_blocks=5).serve([Request([1], 3)])


def test_a_length_that_cannot_fit_is_a_config_error(tiny_dir: Path):
    with pytest.raises(ConfigError, match="lower --max-model-len to 32"):
        ModelRunner(small_config(num_gpu_blocks_override=5), open_checkpoint(tiny_dir))


def test_kv_in_int8_is_refused_where_it_cannot_be(tiny_dir: Path):
    with pytest.raises(
        ConfigError, match="--kv-cache-dtype is int8, but the model runs in float32"
    ):
        ModelRunner(small_config(kv_cache_dtype="int8"), open_checkpoint(tiny_dir))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(tiny_dir: Path, dtype: str):
    runner = ModelRunner(small_config(dtype=dtype), open_checkpoint(tiny_dir))
    requests = mix(5, count=3)
    outputs = Driver(runner.run).serve(requests, chunk=7)
    assert [len(tokens) for tokens in outputs] == [request.max_tokens for request in requests]
