"""What `twostroke profile` sends to a server: a load that is like no other and has a bit of each.

    lone     one request while nothing else runs         the way in and out, steps of one row
    burst    n at once                                   batches, from n rows down to one
    stream   n at random moments, as many as the engine  prompts among decodes, engines that compute
             carries, half of that, or a quarter         at once, steps after a pause

All lengths are drawn at random, because it matters that they do not recur: what an engine has
prepared for a number of tokens (compiled kernels, memory) helps the next step of just as many, and
users' prompts are of all lengths. On two cores of a Zen 4, prompts of 97 to 111 tokens took SmolLM2
92 ms in a served load, and 73 to 83 ms those of 96 that came again and again.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from twostroke.bench.load import Outcome
from twostroke.bench.workload import FIRST_TOKEN_ID, Prompt
from twostroke.cost_host import Wave

# Answers are so long that in most steps nothing changes, as for users; and that of a burst enough
# last until P has computed the last prompts, for D to have steps of many rows: with 32 tokens at
# most it had 17 where a load of chats had 24.
LEAST_PROMPT, MOST_OUTPUT = 4, 64  # tokens
LONE_EACH = 4  # lone requests in a round
BURSTS = (2, 3, 6)  # and as many as the engine takes
STREAMS = ((12, 1.0), (8, 2.0), (8, 2.0), (6, 4.0))  # requests; over how much longer than they take
BURST_TOKENS = 4096  # of all prompts of a burst together, about
STREAM_AS = 4  # prompts of a stream are as long as those of a burst of so many
PROMPT_SHARE, CARD_SHARE = 0.05, 0.2  # most of the whole time that one prompt, one card takes
OUTPUT_COST = 8  # prompt tokens that one of output is reckoned to cost, where a rate is chosen


@dataclass(frozen=True)
class Limits:
    """What a server can take."""

    max_tokens: int  # of a prompt and its answer
    max_num_seqs: int
    num_kv_tokens: int
    vocab_size: int


@dataclass(frozen=True)
class Card:
    """`count` requests, over `spread` times the seconds that they take: 0 is all at once."""

    count: int
    spread: float = 0.0


def deck(limits: Limits) -> list[Card]:
    """A round of the load, in no order."""
    bursts = sorted({min(count, limits.max_num_seqs) for count in (*BURSTS, limits.max_num_seqs)})
    streams = [Card(count, spread) for count, spread in STREAMS]
    return [Card(1)] * LONE_EACH + [Card(count) for count in bursts] + streams


class Pace:
    """How fast the server is, learned from what it was sent."""

    def __init__(self) -> None:
        self._tokens, self._seconds = 0.0, 0.0

    def add(self, outcomes: list[Outcome], seconds: float) -> None:
        """So long these took, when all were sent at once."""
        self._tokens += sum(it.prompt_tokens + OUTPUT_COST * it.output_tokens for it in outcomes)
        self._seconds += seconds

    def seconds(self, prompts: list[Prompt]) -> float:
        """What these will take at once; 0 while nothing is known."""
        tokens = sum(len(it.prompt) + OUTPUT_COST * it.output_tokens for it in prompts)
        return tokens * self._seconds / self._tokens if self._tokens else 0.0

    def tokens(self, seconds: float) -> float:
        """Prompt tokens that it takes in so many seconds; few while nothing is known."""
        return seconds * self._tokens / self._seconds if self._seconds else LEAST_PROMPT


class Load:
    """Draws cards without end, and their requests, for a load that is to take `seconds`."""

    def __init__(self, limits: Limits, seed: int, seconds: float) -> None:
        self.pace = Pace()
        self._limits = limits
        self._seconds = seconds
        self._random = random.Random(seed)

    def cards(self) -> Iterator[Card]:
        """Round after round, each in an order of its own, and a lone request to begin with."""
        yield Card(1)
        while True:
            cards = deck(self._limits)
            self._random.shuffle(cards)
            yield from cards

    def requests(self, card: Card) -> tuple[list[Prompt], list[float]]:
        """Its prompts, and when each is to be sent, in seconds from the first."""
        longest = self._longest(STREAM_AS if card.spread else card.count)
        prompts = [self._prompt(longest) for _ in range(card.count)]
        while len(prompts) > 1 and self.pace.seconds(prompts) > CARD_SHARE * self._seconds:
            prompts.pop()  # a large batch of a slow model
        span_s = card.spread * self.pace.seconds(prompts)
        offsets = sorted(self._random.uniform(0, span_s) for _ in prompts)
        return prompts, [offset - offsets[0] for offset in offsets]

    def _longest(self, count: int) -> int:
        limits = self._limits
        longest = min(limits.max_tokens, limits.num_kv_tokens // count) - MOST_OUTPUT
        longest = min(
            longest, BURST_TOKENS // count, int(self.pace.tokens(PROMPT_SHARE * self._seconds))
        )
        return max(LEAST_PROMPT, longest)

    def _prompt(self, longest: int) -> Prompt:
        """Short ones as often as long ones; random ids, so nothing is found in a prefix cache."""
        limits, draw = self._limits, self._random
        length = round(math.exp(draw.uniform(math.log(LEAST_PROMPT), math.log(longest))))
        length = max(1, min(length, limits.max_tokens - 1))
        most = max(1, min(MOST_OUTPUT, limits.max_tokens - length))
        first = min(FIRST_TOKEN_ID, limits.vocab_size - 1)
        ids = [draw.randrange(first, limits.vocab_size) for _ in range(length)]
        return Prompt(ids, draw.randint(min(2, most), most))


def waves_of(card: Card, outcomes: list[Outcome]) -> list[Wave]:
    """Those of a card's requests that say what the way in and out takes: all of a burst, and of a
    stream each that was alone."""
    if not card.spread:
        lengths = [it.prompt_tokens for it in outcomes]
        return [
            Wave(
                len(outcomes),
                round(sum(lengths) / len(lengths)),
                min(it.start_s for it in outcomes),
                max(it.chunk_times_s[-1] for it in outcomes),
                min(it.chunk_times_s[0] for it in outcomes),
            )
        ]
    waves, ended_s = [], -math.inf
    following = [*(it.start_s for it in outcomes[1:]), math.inf]
    for it, next_s in zip(outcomes, following, strict=True):
        end_s = it.chunk_times_s[-1]
        if ended_s < it.start_s and end_s < next_s:
            waves.append(Wave(1, it.prompt_tokens, it.start_s, end_s, it.chunk_times_s[0]))
        ended_s = max(ended_s, end_s)
    return waves
