"""The sampler over a batch of seats with different parameters."""

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from twostroke.client.sampling import validate
from twostroke.messages import NO_TOKENS, NewRequest, SamplingParams
from twostroke.worker.sampler import NO_DRAFT, Sampled, Sampler

VOCAB = 32
SEATS = 6


def make_sampler(seed: int = 0) -> Sampler:
    return Sampler(max_num_seqs=SEATS, vocab_size=VOCAB, seed=seed, device=torch.device("cpu"))


def seat(
    sampler: Sampler,
    slot: int,
    *,
    prompt: tuple[int, ...] = (1, 2, 3),
    outputs: tuple[int, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    request_id: str = "",
    **params: object,
) -> None:
    sampler.seat(
        NewRequest(
            slot=slot,
            request_id=request_id or f"r{slot}",
            token_ids=np.array(prompt + outputs, np.int32),
            num_prompt_tokens=len(prompt),
            params=SamplingParams(**{"temperature": 0.0} | params),
            stop_token_ids=stop_token_ids,
            block_ids=NO_TOKENS,
        )
    )


def sample(sampler: Sampler, logits: torch.Tensor, seats: list[int], positions: list[int]):
    return sampler.sample(logits, np.array(seats, np.int32), np.array(positions, np.int32))


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(
        np.random.default_rng(seed).normal(0, 2, (rows, VOCAB)).astype(np.float32)
    )


def test_greedy_rows_take_the_best():
    sampler = make_sampler()
    for slot in range(3):
        seat(sampler, slot, temperature=9e-6)
    logits = logits_of(3)
    expected = logits.argmax(-1).tolist()
    result = sample(sampler, logits, [2, 0, 1], [3, 3, 3])
    assert result.token_ids.tolist() == expected
    assert result.token_ids.dtype == np.int32
    assert result.sound.all()
    assert result.logprobs == {}


def test_one_rows_trouble_is_its_own():
    sampler = make_sampler()
    seat(sampler, 0)
    seat(sampler, 1, temperature=1.0, logprobs=2)
    seat(sampler, 2, temperature=1.0, top_k=5)
    seat(sampler, 3, presence_penalty=1.0)
    healthy = sample(make_sampler_like(), logits_of(1, 5), [2], [3]).token_ids[0]
    logits = logits_of(4)
    logits[0, 4] = torch.nan
    logits[1] = -torch.inf
    logits[2] = logits_of(1, 5)[0]
    logits[3, 2] = torch.inf
    result = sample(sampler, logits, [0, 1, 2, 3], [3, 3, 3, 3])
    assert result.sound.tolist() == [False, False, True, False]
    assert result.token_ids.tolist() == [0, 0, healthy, 0]


def make_sampler_like() -> Sampler:
    sampler = make_sampler()
    seat(sampler, 2, temperature=1.0, top_k=5)
    return sampler


def test_logit_bias_and_min_tokens():
    sampler = make_sampler()
    seat(sampler, 0, logit_bias={5: 100.0, 31: -100.0, VOCAB: 100.0})
    seat(sampler, 1, min_tokens=2, stop_token_ids=(8, 9, 10_000))
    seat(sampler, 2)
    logits = torch.zeros(3, VOCAB)
    logits[0, 31] = 50
    logits[1, 8], logits[1, 9], logits[1, 7] = 3, 2, 1
    logits[2, 8] = 1
    for output, expected in ((0, 7), (1, 7), (2, 8)):
        result = sample(sampler, logits.clone(), [0, 1, 2], [3 + output] * 3)
        assert result.token_ids.tolist() == [5, expected, 8]


def test_every_token_forbidden_is_an_error_of_that_row():
    sampler = make_sampler()
    seat(sampler, 0, min_tokens=1, stop_token_ids=tuple(range(VOCAB)))
    assert not sample(sampler, logits_of(1), [0], [3]).sound.any()


def penalised(logits: np.ndarray, prompt, outputs, *, presence=0.0, frequency=0.0, repetition=1.0):
    """vLLM's rules, one token at a time."""
    result = logits.astype(np.float64).copy()
    for token in set(prompt) | set(outputs):
        result[token] = (
            result[token] / repetition if result[token] > 0 else (result[token] * repetition)
        )
    for token in set(outputs):
        result[token] -= frequency * outputs.count(token) + presence
    return result


@pytest.mark.parametrize(
    "strengths",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 1.8},
        {"presence_penalty": -1.0, "frequency_penalty": 0.5, "repetition_penalty": 0.6},
    ],
)
def test_penalties_follow_the_tokens_so_far(strengths: dict[str, float]):
    sampler = make_sampler()
    prompt = (1, 2, 2, 3)
    outputs = [4, 4, 5]
    seat(sampler, 1, temperature=1.0)
    seat(sampler, 4, prompt=prompt, outputs=tuple(outputs), **strengths)
    names = {name.removesuffix("_penalty"): value for name, value in strengths.items()}
    for step in range(12):
        logits = logits_of(2, step)
        expected = penalised(logits[1].numpy(), prompt, outputs, **names)
        result = sample(sampler, logits, [1, 4], [3 + step, 7 + step])
        assert result.token_ids[1] == expected.argmax()
        outputs.append(int(result.token_ids[1]))


def test_a_vacated_seat_leaves_nothing_behind():
    sampler = make_sampler()
    for slot in range(SEATS):
        seat(
            sampler,
            slot,
            outputs=(4,),
            presence_penalty=2.0,
            logit_bias={5: 100.0},
            min_tokens=5,
            stop_token_ids=(6,),
            logprobs=3,
        )
    sampler.vacate(np.arange(SEATS, dtype=np.int32))
    logits = logits_of(SEATS)
    expected = logits.argmax(-1).tolist()
    for slot in range(SEATS):
        seat(sampler, slot, outputs=(4,))
    result = sample(sampler, logits, list(range(SEATS)), [4] * SEATS)
    assert result.token_ids.tolist() == expected
    assert result.logprobs == {}
    seat(sampler, 0, presence_penalty=0.1)  # lines of counts are used again, and clean
    one = sample(sampler, logits_of(1), [0], [3])
    assert one.token_ids.tolist() == logits_of(1).argmax(-1).tolist()


def drawn(sampler: Sampler, slot: int, company: list[int], count: int = 12) -> list[int]:
    """Tokens of seat `slot` while other seats run too, in turning order."""
    tokens = []
    for step in range(count):
        seats = [slot, *company] if step % 2 else [*company, slot]
        logits = torch.cat([logits_of(1, 1000 * (s != slot) + step) for s in seats])
        result = sample(sampler, logits, seats, [3 + step] * len(seats))
        tokens.append(int(result.token_ids[seats.index(slot)]))
    return tokens


def test_a_seed_gives_the_same_tokens_in_any_company_and_after_a_preemption():
    params = {"temperature": 1.0, "top_p": 0.9, "seed": 42}
    alone = make_sampler()
    seat(alone, 0, **params)
    tokens = drawn(alone, 0, [])
    crowded = make_sampler(seed=9)
    seat(crowded, 4, **params)
    for slot in (0, 1, 2):
        seat(crowded, slot, temperature=1.0, top_k=slot, presence_penalty=1.0)
    assert drawn(crowded, 4, [0, 1, 2]) == tokens
    back = make_sampler()
    seat(back, 2, outputs=tuple(tokens[:5]), **params)
    result = sample(back, logits_of(1, 5), [2], [3 + 5])
    assert result.token_ids[0] == tokens[5]
    other = make_sampler()
    seat(other, 0, **params | {"seed": 43})
    assert drawn(other, 0, []) != tokens


def test_without_a_seed_the_engines_seed_and_the_request_decide():
    def tokens(engine_seed: int, request_id: str) -> list[int]:
        sampler = make_sampler(engine_seed)
        seat(sampler, 0, temperature=2.0, request_id=request_id)
        return drawn(sampler, 0, [])

    assert tokens(0, "a") == tokens(0, "a")
    assert tokens(0, "a") != tokens(0, "b")
    assert tokens(0, "a") != tokens(1, "a")


@pytest.mark.parametrize("seed", [-1, 2**64 - 1, 2**70])
def test_any_integer_is_a_seed(seed: int):
    sampler = make_sampler()
    seat(sampler, 0, temperature=1.0, seed=seed)
    assert sample(sampler, logits_of(1), [0], [3]).sound.all()


def test_logprobs_are_of_the_raw_logits():
    sampler = make_sampler()
    seat(sampler, 0, logprobs=3, logit_bias={9: 100.0}, presence_penalty=1.0)
    seat(sampler, 1)
    seat(sampler, 2, logprobs=0, temperature=1.0, seed=1)
    seat(sampler, 3, logprobs=VOCAB + 5)
    logits = logits_of(4)
    expected = torch.log_softmax(logits.double(), -1)
    result = sample(sampler, logits.clone(), [0, 1, 2, 3], [3] * 4)
    assert set(result.logprobs) == {0, 2, 3}
    check_logprobs(result, expected, {0: 3, 2: 0, 3: VOCAB})
    assert result.token_ids[0] == 9


def check_logprobs(result: Sampled, expected: torch.Tensor, num_top: dict[int, int]) -> None:
    for row, entry in result.logprobs.items():
        token = int(result.token_ids[row])
        best = expected[row].sort(descending=True).indices.tolist()[: num_top[row]]
        assert entry.token_ids == [token, *best]
        assert entry.rank == int((expected[row] > expected[row, token]).sum()) + 1
        assert entry.logprobs == pytest.approx(
            [float(expected[row, i]) for i in entry.token_ids], abs=1e-5
        )


def test_a_row_is_kept_while_the_drafts_before_it_are_what_was_sampled():
    sampler = make_sampler()
    for slot in range(4):
        seat(sampler, slot)
    logits = logits_of(10, 3)
    best = logits.argmax(-1).tolist()
    wrong = [(token + 1) % VOCAB for token in best]
    logits[9] = torch.nan  # behind a draft that is refused: nobody's trouble
    seats = [2, 2, 2, 0, 1, 1, 1, 1, 3, 3]
    drafts = [best[0], best[1], NO_DRAFT, NO_DRAFT, best[4], wrong[5], best[6], NO_DRAFT]
    drafts += [wrong[8], NO_DRAFT]
    result = sampler.sample(
        logits,
        np.array(seats, np.int32),
        np.array([3, 4, 5, 3, 3, 4, 5, 6, 3, 4], np.int32),
        np.array(drafts, np.int32),
    )
    assert result.token_ids.tolist() == [*best[:9], 0]
    assert result.kept.tolist() == [True] * 6 + [False, False, True, False]
    assert result.sound.tolist() == [True] * 9 + [False]


def extreme(low: float, high: float):
    return st.one_of(st.floats(low, high), st.sampled_from([low, high]))


@hypothesis.settings(deadline=None, max_examples=200)
@hypothesis.given(
    many=st.lists(
        st.fixed_dictionaries(
            {
                "temperature": extreme(0.0, 1.7e308),
                "top_k": st.one_of(st.integers(-1, VOCAB + 1), st.integers(0, 2**63 - 1)),
                "top_p": extreme(5e-324, 1.0),
                "min_p": extreme(0.0, 1.0),
                "presence_penalty": extreme(-2.0, 2.0),
                "frequency_penalty": extreme(-2.0, 2.0),
                "repetition_penalty": extreme(1e-3, 1e3),
                "seed": st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
                "min_tokens": st.integers(0, 9),
                "logprobs": st.one_of(st.none(), st.integers(0, 20)),
                "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), extreme(-100.0, 100.0)),
            }
        ),
        min_size=1,
        max_size=SEATS,
    ),
    scale=st.sampled_from([0.0, 1.0, 50.0]),
)
def test_whatever_passes_validation_can_be_sampled(many: list[dict], scale: float) -> None:
    """A request that the API lets through must not end the worker, nor fail for its parameters."""
    sampler = make_sampler()
    for slot, params in enumerate(many):
        validate(SamplingParams(**params), vocab_size=VOCAB)
        seat(sampler, slot, outputs=(4, 5), stop_token_ids=(7, VOCAB + 3), **params)
    seats = list(range(len(many)))
    result = sample(sampler, logits_of(len(many)) * scale, seats, [5] * len(many))
    assert result.sound.all()
    assert ((result.token_ids >= 0) & (result.token_ids < VOCAB)).all()
    for slot, params in enumerate(many):
        assert result.token_ids[slot] != 7 or params["min_tokens"] <= 2


def test_a_top_k_beyond_any_vocabulary_is_off():
    sampler = make_sampler()
    seat(sampler, 0, temperature=1.0, seed=5, top_k=2**62)
    seat(sampler, 1, temperature=1.0, seed=5)
    row = logits_of(1)
    result = sample(sampler, row.expand(2, -1).clone(), [0, 1], [3, 3])
    assert result.token_ids[0] == result.token_ids[1]
