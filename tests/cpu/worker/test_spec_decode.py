"""Speculation on the real core and a tiny model: whatever is drafted, tokens are the same.

Numbers are float32, so that verifying several tokens at once rounds too little to matter.
"""

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from tests.cpu.engine import Run, drive
from tests.cpu.worker.driving import small_config
from tests.cpu.worker.test_runner import FullAttention
from twostroke.checkpoint import open_checkpoint
from twostroke.clock import WallClock
from twostroke.config import EngineConfig, SchedulerConfig
from twostroke.core.loop import EngineCore
from twostroke.errors import ConfigError
from twostroke.messages import AddRequest, EngineReady, FinishReason, SamplingParams
from twostroke.proc.core_main import scheduler_config
from twostroke.testing.tiny_model import write_tiny_checkpoint
from twostroke.worker.executor import ThreadExecutor
from twostroke.worker.runner import ModelRunner

# Draft models: the target itself, one whose guesses are often right, one that knows nothing.
METHODS = ("ngram", "same model", "near model")
NUM_DRAFTS = 3
NUM_DRAWS = 2000


class Engine:
    """A worker with its settings; `run` gives it a new core each time."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.executor = ThreadExecutor(config, open_checkpoint(Path(config.model)))

    def run(
        self,
        requests: list[AddRequest],
        *,
        arrivals: list[int] | None = None,
        aborts: dict[int, int] | None = None,
        **scheduler: object,
    ) -> Run:
        ready = EngineReady(0, self.executor.max_model_len, self.executor.num_blocks, 8)
        settings = scheduler_config(self.config, ready)
        values = {name: getattr(settings, name) for name in settings.__dataclass_fields__}
        core = EngineCore(SchedulerConfig(**(values | scheduler)), WallClock(), check=True)
        return drive(core, self.executor, requests, arrivals=arrivals, aborts=aborts)


@pytest.fixture(scope="module")
def engine(
    tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Engine]]:
    other = tmp_path_factory.mktemp("other")
    write_tiny_checkpoint(other, seed=7, num_hidden_layers=1, head_dim=32)
    near = tmp_path_factory.mktemp("near")
    shutil.copytree(tiny_dir, near, dirs_exist_ok=True)
    noise = np.random.default_rng(0)
    weights = load_file(near / "model.safetensors")
    for values in weights.values():
        values += 0.15 * values.std() * noise.standard_normal(values.shape, np.float32)
    save_file(weights, near / "model.safetensors", metadata={"format": "pt"})
    models = {"same model": tiny_dir, "near model": near, "other model": other}
    engines = []

    @cache
    def make(method: str = "none", two_in_flight: bool = True, **changes: object) -> Engine:
        settings: dict[str, object] = {"speculative_method": method, "prompt_lookup_min": 1}
        if method in models:
            settings |= {
                "speculative_method": "draft_model",
                "speculative_model": str(models[method]),
            }
        config = small_config(
            model=str(tiny_dir),
            async_scheduling=two_in_flight,
            num_speculative_tokens=NUM_DRAFTS,
            **(settings | changes),
        )
        engines.append(Engine(config))
        return engines[-1]

    yield make
    for one in engines:
        one.executor.shutdown()


def ask(
    handle: int,
    prompt: list[int],
    max_tokens: int = 24,
    eos_token_ids: tuple[int, ...] = (),
    **params: object,
) -> AddRequest:
    values = {"temperature": 0.0, "max_tokens": max_tokens} | params
    return AddRequest(
        handle=handle,
        request_id=f"r{handle}",
        prompt_token_ids=np.array(prompt, np.int32),
        params=SamplingParams(**values),
        max_tokens=max_tokens,
        eos_token_ids=eos_token_ids,
    )


def repetitive(seed: int) -> list[int]:
    """A phrase, three times: prompt look-up finds it in what the model makes of it."""
    return [(seed * 31 + i * i) % 256 for i in range(8)] * 3


@st.composite
def mixes(draw: st.DrawFn) -> list[tuple[list[int], int]]:
    """Prompts, some with shared prefixes and repetitions, and how many tokens each wants."""
    mix = []
    for _ in range(draw(st.integers(1, 6))):
        prefix = repetitive(draw(st.integers(0, 2)))[: draw(st.sampled_from([0, 7, 8, 16, 24]))]
        own = draw(st.lists(st.integers(0, 255), min_size=1, max_size=20))
        mix.append((prefix + own, draw(st.integers(1, 50))))
    return mix


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    mix=mixes(),
    data=st.data(),
    method=st.sampled_from([*METHODS, "other model"]),
    two_in_flight=st.booleans(),
    budget=st.sampled_from([10, 21, 64, 256]),
    caching=st.booleans(),
    blocks=st.sampled_from([14, 20, 128]),
    threshold=st.sampled_from([0, 0, 2, 9]),
)
def test_greedy_tokens_equal_those_without_drafts(
    engine, mix, data, method, two_in_flight, budget, caching, blocks, threshold
):
    requests = [ask(i, prompt, count) for i, (prompt, count) in enumerate(mix)]
    arrivals = data.draw(st.lists(st.integers(0, 12), min_size=len(mix), max_size=len(mix)))
    drafted = engine(method, two_in_flight).run(
        requests,
        arrivals=arrivals,
        num_blocks=blocks,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        long_prefill_token_threshold=threshold,
    )
    plain = engine().run(requests)
    assert drafted.tokens == plain.tokens
    assert drafted.ended == plain.ended


@pytest.mark.parametrize("two_in_flight", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_tight_pools_preempt_and_change_nothing(engine, method, two_in_flight):
    requests = [ask(i, repetitive(i), 40) for i in range(6)]
    drafted = engine(method, two_in_flight).run(requests, num_blocks=24)
    assert drafted.core.stats().num_preemptions > 0
    assert drafted.tokens == engine().run(requests).tokens
    assert drafted.drafted >= drafted.accepted > 0
    assert (drafted.drafted == drafted.accepted) == (method == "same model")


@pytest.mark.parametrize("two_in_flight", [False, True])
def test_drafts_of_the_same_model_are_all_accepted(engine, two_in_flight):
    requests = [ask(i, repetitive(i), 41) for i in range(3)]
    drafted = engine("same model", two_in_flight).run(requests)
    assert drafted.accepted == drafted.drafted > 80
    plain = engine("none", two_in_flight).run(requests)
    assert drafted.core.stats().num_steps < plain.core.stats().num_steps / 2


SAMPLING: dict[str, dict[str, object]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 5},
    "default seed": {"temperature": 0.6},
    "top-k and top-p": {"temperature": 1.2, "top_k": 12, "top_p": 0.8, "seed": 6},
    "min_p": {"temperature": 0.9, "min_p": 0.1, "seed": 1},
    "presence and frequency": {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    "repetition": {"repetition_penalty": 1.2, "temperature": 0.7, "seed": 8},
    "all penalties": {
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "temperature": 0.7,
        "seed": 9,
    },
    "bias": {"logit_bias": {7: 3.5, 9: 3.0, 11: -100.0}, "temperature": 0.5, "seed": 3},
    "log-probs": {"logprobs": 3, "temperature": 0.5, "seed": 4},
}


@pytest.mark.parametrize("two_in_flight", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_all_that_shapes_a_distribution_holds_at_each_draft(engine, method, two_in_flight):
    requests = [ask(i, repetitive(i), 30, **params) for i, params in enumerate(SAMPLING.values())]
    drafted = engine(method, two_in_flight).run(requests)
    plain = engine().run(requests)
    names = list(SAMPLING)
    for handle, name in enumerate(names):
        assert drafted.tokens[handle] == plain.tokens[handle], name
    logprobs = names.index("log-probs")
    assert list(drafted.logprobs) == [logprobs]
    for ours, theirs in zip(drafted.logprobs[logprobs], plain.logprobs[logprobs], strict=True):
        assert (ours.token_ids, ours.rank) == (theirs.token_ids, theirs.rank)
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    assert drafted.accepted > 5


@pytest.mark.parametrize("two_in_flight", [False, True])
@pytest.mark.parametrize("name", SAMPLING)
def test_each_way_of_sampling_accepts_drafts(engine, name, two_in_flight):
    run = engine("same model", two_in_flight).run([ask(0, repetitive(2), 60, **SAMPLING[name])])
    assert 0 < run.accepted <= run.drafted


@pytest.mark.parametrize("two_in_flight", [False, True])
@pytest.mark.parametrize("method", ["ngram", "same model"])
def test_a_stop_among_accepted_drafts_drops_the_rest(engine, method, two_in_flight):
    [tokens] = engine().run([ask(0, repetitive(1), 40)]).tokens.values()
    stops = list(dict.fromkeys(tokens))
    requests = [
        ask(i, repetitive(1), 40, stop_token_ids=(stop,), min_tokens=i % 3)
        for i, stop in enumerate(stops)
    ]
    requests += [
        ask(100 + i, repetitive(1), 40, eos_token_ids=(stop,)) for i, stop in enumerate(stops)
    ]
    requests += [ask(200 + i, repetitive(1), i) for i in range(1, 12)]
    drafted = engine(method, two_in_flight).run(requests)
    plain = engine().run(requests)
    assert drafted.tokens == plain.tokens
    assert drafted.ended == plain.ended
    assert drafted.accepted > 0
    assert drafted.ended[0] == (FinishReason.STOP, stops[0])


@pytest.mark.parametrize("two_in_flight", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_min_tokens_holds_stop_ids_back_at_each_draft(engine, method, two_in_flight):
    [tokens] = engine().run([ask(0, repetitive(1), 40)]).tokens.values()
    stop = (tokens[2], tokens[3])
    requests = [
        ask(i, repetitive(1), 40, stop_token_ids=stop, min_tokens=minimum, **params)
        for i, (minimum, params) in enumerate(
            (minimum, SAMPLING[name]) for minimum in (5, 17) for name in ("greedy", "all penalties")
        )
    ]
    drafted = engine(method, two_in_flight).run(requests)
    assert drafted.tokens == engine().run(requests).tokens
    assert all(len(tokens) > 5 for tokens in drafted.tokens.values())


@pytest.mark.parametrize("two_in_flight", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_sequence_ends_at_the_models_length(engine, method, two_in_flight):
    request = ask(0, repetitive(3), 500)
    drafted = engine(method, two_in_flight).run([request])
    assert drafted.tokens == engine().run([request]).tokens
    assert len(drafted.tokens[0]) == 96 - 24
    assert drafted.ended[0] == (FinishReason.LENGTH, None)


@pytest.mark.parametrize("two_in_flight", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_aborts_while_drafts_are_due_leave_the_others_alone(engine, method, two_in_flight):
    requests = [ask(i, repetitive(i), 40, presence_penalty=0.1) for i in range(12)]
    drafted = engine(method, two_in_flight).run(
        requests, arrivals=[i // 2 for i in range(12)], aborts={i: i for i in range(2, 9)}
    )
    plain = engine().run(requests)
    for handle, tokens in drafted.tokens.items():
        assert tokens == plain.tokens[handle][: len(tokens)]
    for handle in (0, 1, 9, 10, 11):
        assert len(drafted.tokens[handle]) == 40


@pytest.mark.parametrize("method", ["near model", "same model"])
def test_the_joint_distribution_is_that_of_the_model(engine, method):
    """Chi-square over all (first, second, third token) of three choices each, of each draw."""
    prompt, params = repetitive(5), {"temperature": 1.7, "top_k": 3}
    speculating = engine(method, max_num_seqs=64, num_gpu_blocks_override=512)
    model = ModelRunner(small_config(), open_checkpoint(Path(speculating.config.model))).model

    def distribution(tokens: list[int]) -> dict[int, float]:
        ids = torch.tensor(tokens)
        hidden = model.forward(ids, torch.arange(len(tokens)), FullAttention())
        top = (model.logits(hidden[-1:])[0] / 1.7).topk(3)
        probabilities = torch.softmax(top.values, -1).tolist()
        return dict(zip(top.indices.tolist(), probabilities, strict=True))

    expected = {
        (a, b, c): p * q * r
        for a, p in distribution(prompt).items()
        for b, q in distribution([*prompt, a]).items()
        for c, r in distribution([*prompt, a, b]).items()
    }
    # Of four tokens the second and third are verified together.
    run = speculating.run([ask(i, prompt, 4, seed=i, **params) for i in range(NUM_DRAWS)])
    counts: dict[tuple[int, ...], int] = defaultdict(int)
    for tokens in run.tokens.values():
        counts[tuple(tokens[:3])] += 1
    assert set(counts) <= set(expected)
    assert 0.1 < run.accepted / run.drafted < 0.9
    # Cells with fewer than 5 expected draws are pooled. 26 degrees of freedom at most: the
    # statistic exceeds 54.1 once in a thousand.
    statistic, rest, rest_expected = 0.0, 0, 0.0
    for cell, probability in expected.items():
        if NUM_DRAWS * probability < 5:
            rest, rest_expected = rest + counts[cell], rest_expected + NUM_DRAWS * probability
        else:
            statistic += (counts[cell] - NUM_DRAWS * probability) ** 2 / (NUM_DRAWS * probability)
    if rest_expected:
        statistic += (rest - rest_expected) ** 2 / max(rest_expected, 1.0)
    assert statistic < 54.1


def test_a_draft_model_of_another_vocabulary_is_refused(tiny_dir: Path, tmp_path: Path):
    other = write_tiny_checkpoint(tmp_path, vocab_size=300)
    config = small_config(speculative_method="draft_model", speculative_model=str(other))
    with pytest.raises(ConfigError, match="vocabulary of 300 tokens; the model's has 259"):
        ModelRunner(config, open_checkpoint(tiny_dir))


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_the_start_up_block_tells_of_drafts(tiny_dir: Path, method: str):
    model = str(tiny_dir) if method == "draft_model" else ""
    config = small_config(speculative_method=method, speculative_model=model)
    runner = ModelRunner(config, open_checkpoint(tiny_dir))
    facts = {name: (value, reason) for name, value, reason in runner.facts}
    assert facts["Drafts"][0] == "at most 4 tokens a step"
    assert (tiny_dir.name if model else "1 to 32 tokens") in facts["Drafts"][1]
    # 2 layers x 2 x 2 heads x 16 x 4 bytes x 8 tokens = 4 KiB a block; twice that with the draft's.
    assert facts["KV pool"][0].startswith("1 MiB" if model else "512 KiB")
