import random
from types import SimpleNamespace

import pytest

from twostroke.bench import offline
from twostroke.bench.options import ThroughputOptions
from twostroke.errors import TwostrokeError


class Engine:
    """Gives the tokens asked for; notes every call."""

    def __init__(self, short_by: int = 0, resets: bool = True) -> None:
        self.calls = []
        self.short_by, self.resets = short_by, resets

    def generate(self, prompts, params, *, use_tqdm):
        self.calls.append((prompts, params))
        tokens = [1] * (params.max_tokens - self.short_by)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)]) for _ in prompts]

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return self.resets


def test_the_published_cases_are_those_prompts():
    single, long, batch, shared = offline.peer_cases()
    draw = random.Random(0)
    assert single.prompts == [[draw.randrange(20, 49152) for _ in range(32)]]
    assert long.prompts == [[draw.randrange(20, 49152) for _ in range(1024)]]
    assert (len(batch.prompts), batch.num_input_tokens, batch.num_output_tokens) == (
        64,
        64 * 256,
        64 * 64,
    )
    assert len({tuple(prompt[:192]) for prompt in shared.prompts}) == 1
    assert len({tuple(prompt) for prompt in shared.prompts}) == 256
    assert {len(prompt) for prompt in shared.prompts} == {256}
    assert [case.output_tokens for case in offline.peer_cases()] == [128, 1, 64, 32]
    assert offline.peer_cases()[3].prompts == shared.prompts


def test_each_run_starts_with_an_empty_prefix_cache_after_a_warm_up_on_other_prompts():
    engine = Engine()
    case = offline.random_case(ThroughputOptions(num_prompts=9, input_len=6, output_len=20), seed=1)
    measured = offline.measure(engine, case, runs=3)
    warm_up, *runs = engine.calls
    assert len(warm_up[0]) == offline.WARM_UP_PROMPTS
    assert not [prompt for prompt in warm_up[0] if prompt in case.prompts]
    assert runs[0::2] == ["reset"] * 3
    assert [prompts for prompts, _ in runs[1::2]] == [case.prompts] * 3
    _, params = runs[1]
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (0.0, 20, True)
    assert len(measured.times_s) == 3


def test_figures():
    case = offline.Case("x", "2 x 3 in / 5 out", [[1, 2, 3], [4, 5, 6]], 5)
    measured = offline.Measured(case, [4.0, 2.0, 1.0])
    assert offline.result_of(measured) == {
        "elapsed_time": 2.0,
        "num_requests": 2,
        "total_num_tokens": 16,
        "requests_per_second": 1.0,
        "tokens_per_second": 8.0,
        "output_tokens_per_second": 5.0,
        "times_s": [4.0, 2.0, 1.0],
    }
    table = offline.table_of([measured])
    assert table.splitlines()[-1].startswith("x: 2 x 3 in / 5 out      2.00             5 ")
    assert table.endswith("1.00 to 4.00")
    assert max(map(len, table.splitlines())) <= 100


def test_a_figure_that_would_be_wrong_is_refused():
    case = offline.Case("x", "", [[1, 2]], 5)
    with pytest.raises(TwostrokeError, match="4 tokens came out, of 1 prompts with 5 each"):
        offline.measure(Engine(short_by=1), case, runs=1)
    with pytest.raises(TwostrokeError, match="could not be emptied"):
        offline.measure(Engine(resets=False), case, runs=1)
