"""The profile's load: what a round holds, how it keeps within limits, and who was alone."""

import itertools

import pytest

from twostroke.bench.load import Outcome
from twostroke.cost_host import Wave
from twostroke.proc.profile_load import MOST_OUTPUT, Card, Limits, Load, Pace, deck, waves_of

LIMITS = Limits(max_tokens=512, max_num_seqs=6, num_kv_tokens=1024, vocab_size=300)


def outcome(start_s: float, end_s: float, prompt: int = 100, output: int = 10) -> Outcome:
    return Outcome(prompt, output, start_s, [start_s + (end_s - start_s) / 2, end_s])


def test_a_round_has_all_sizes_of_bursts_up_to_the_largest() -> None:
    cards = deck(LIMITS)
    assert {card.count for card in cards if not card.spread} == {1, 2, 3, 6}
    assert max(card.count for card in deck(Limits(512, 64, 1024, 300))) == 64
    load = Load(LIMITS, 1, 60.0)
    drawn = list(itertools.islice(load.cards(), 1 + 2 * len(cards)))
    assert drawn[0] == Card(1)
    for half in (drawn[1 : 1 + len(cards)], drawn[1 + len(cards) :]):
        assert sorted(half, key=str) == sorted(cards, key=str)


@pytest.mark.parametrize("card", [Card(1), Card(6), Card(12, 2.0)], ids=str)
def test_requests_keep_within_limits(card: Card) -> None:
    load = Load(LIMITS, 1, 60.0)
    load.pace.add([outcome(0.0, 1.0, 1000, 10)], 0.1)
    for _ in range(20):
        prompts, offsets = load.requests(card)
        assert 1 <= len(prompts) == len(offsets) <= card.count
        assert offsets == sorted(offsets)
        assert offsets[0] == 0.0
        assert all(len(it.prompt) + it.output_tokens <= LIMITS.max_tokens for it in prompts)
        if not card.spread:
            total = sum(len(it.prompt) + MOST_OUTPUT for it in prompts)
            assert total <= LIMITS.num_kv_tokens
            assert not any(offsets)


def test_a_slow_server_is_sent_less() -> None:
    """50 tokens a second: no prompt takes more than a twentieth of the 60 s, no card a fifth."""
    load = Load(Limits(4096, 64, 1 << 20, 300), 1, 60.0)
    load.pace.add([outcome(0.0, 1.0, 420, 10)], 10.0)
    lone = [load.requests(Card(1))[0][0] for _ in range(50)]
    assert 100 < max(len(it.prompt) for it in lone) <= 150
    prompts, _ = load.requests(Card(64))
    assert len(prompts) < 64
    assert load.pace.seconds(prompts) <= 12.0


def test_a_tiny_model_is_asked_for_what_it_can() -> None:
    load = Load(Limits(max_tokens=8, max_num_seqs=2, num_kv_tokens=16, vocab_size=3), 1, 60.0)
    for _ in range(20):
        prompts, _ = load.requests(Card(2))
        assert all(len(it.prompt) + it.output_tokens <= 8 for it in prompts)
        assert all(0 <= token < 3 for it in prompts for token in it.prompt)


def test_pace() -> None:
    pace = Pace()
    assert pace.seconds([]) == 0.0
    pace.add([outcome(0.0, 1.0, 20, 10)], 2.0)  # 100 tokens, at 8 for one of output
    assert pace.tokens(1.0) == 50


def test_who_was_alone() -> None:
    burst = [outcome(0.0, 2.0, 10), outcome(0.0, 3.0, 30)]
    assert waves_of(Card(2), burst) == [Wave(2, 20, 0.0, 3.0, 1.0)]
    stream = [outcome(*it) for it in ((0.0, 1.0), (2.0, 5.0), (3.0, 4.0), (4.5, 6.0), (7.0, 8.0))]
    assert waves_of(Card(5, 1.0), stream) == [
        Wave(1, 100, 0.0, 1.0, 0.5),
        Wave(1, 100, 7.0, 8.0, 7.5),
    ]


def test_the_same_seed_draws_the_same() -> None:
    first, again = (Load(LIMITS, 7, 60.0) for _ in range(2))
    assert first.requests(Card(3)) == again.requests(Card(3))
