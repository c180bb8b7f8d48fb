"""From logits to tokens, for all rows of a step at once.

Each seat's parameters sit in NumPy columns; what only some seats need (penalty counts, logit bias,
stop ids to hold back) is kept for those seats alone. The order is vLLM's:

    raw log-probs -> logit bias, min_tokens -> penalties
                  -> greedy argmax, or temperature -> min_p -> top-k, top-p -> draw

A batch of plain greedy rows costs one argmax.

Drafts are verified by sampling: a seat with g drafts has g + 1 rows, each sampled as if the drafts
before it had been accepted, and a draft is accepted when it is the token that was sampled at its
position. Every token is thus drawn from the target's own distribution and by the same random number
as without drafts: speculation changes no distribution, and a seeded request's tokens not at all. A
draft is accepted with the probability that the target gives it, which is that of rejection sampling
(Leviathan, Kalman and Matias 2023) when the draft is deterministic, as all of ours are.

Shapes: S seats, R rows, V vocabulary.
"""

import hashlib
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from twostroke.messages import NO_TOKENS, Bools, Int32s, Int64s, NewRequest, TokenLogprobs
from twostroke.worker.input_rows import accept_rows
from twostroke.worker.inputs import spans
from twostroke.worker.logprobs import token_logprobs
from twostroke.worker.sampler_draw import UInt64s, draw, uniforms

GREEDY_BELOW = 1e-5  # temperatures below this are greedy, as in vLLM
# Above this every token is equally likely; float32 has no number for 1e39, and -inf / inf is none.
HIGHEST_TEMPERATURE = 1e30
NO_DRAFT = -1  # equals no token


@dataclass(slots=True)
class Sampled:
    """A token for each row; where `sound` is False there was none to draw and it is 0.

    A row is `kept` when the drafts that it builds on were all accepted.
    """

    token_ids: Int32s  # [R]
    sound: Bools  # [R]
    kept: Bools  # [R]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by row, where asked for


class Sampler:
    """Sampling state by seat. `seed` is for requests that bring none."""

    def __init__(
        self, *, max_num_seqs: int, vocab_size: int, seed: int, device: torch.device
    ) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self._device = device
        self._temperature = np.zeros(max_num_seqs)
        self._top_k = np.zeros(max_num_seqs, np.int32)
        self._top_p = np.ones(max_num_seqs)
        self._min_p = np.zeros(max_num_seqs)
        self._seeds: UInt64s = np.zeros(max_num_seqs, np.uint64)
        self._num_prompt_tokens = np.zeros(max_num_seqs, np.int32)
        self._min_tokens = np.zeros(max_num_seqs, np.int32)
        self._num_logprobs = np.full(max_num_seqs, -1, np.int32)  # -1: none wanted
        self._held_back: dict[int, Int64s] = {}  # seat -> ids masked until min_tokens
        self._bias: dict[int, tuple[Int64s, Tensor]] = {}  # seat -> ids, what to add
        self._has_bias = np.zeros(max_num_seqs, np.bool_)
        self._special: set[int] = set()  # seats that want more than their most likely token
        self._penalties = _Penalties(max_num_seqs, vocab_size, device)

    def seat(self, new: NewRequest) -> None:
        """Take over a request's parameters, and its tokens so far if they are penalised."""
        params, seat = new.params, new.slot
        self._temperature[seat] = min(params.temperature, HIGHEST_TEMPERATURE)
        self._top_k[seat] = min(params.top_k, self._vocab_size)  # clients send 2**40 for all
        self._top_p[seat] = params.top_p
        self._min_p[seat] = params.min_p
        self._seeds[seat] = self._seed_of(new)
        self._num_prompt_tokens[seat] = new.num_prompt_tokens
        self._num_logprobs[seat] = -1 if params.logprobs is None else params.logprobs
        held_back = self._known(new.stop_token_ids)
        self._min_tokens[seat] = params.min_tokens if len(held_back) else 0
        self._held_back[seat] = held_back
        bias = params.logit_bias or {}
        ids = self._known(tuple(bias))
        self._has_bias[seat] = len(ids) > 0
        self._bias[seat] = ids, torch.tensor([bias[i] for i in ids.tolist()], dtype=torch.float32)
        self._penalties.seat(new)
        if (
            self._temperature[seat] >= GREEDY_BELOW
            or self._num_logprobs[seat] >= 0
            or self._min_tokens[seat] > 0
            or self._has_bias[seat]
            or self._penalties.of(seat)
        ):
            self._special.add(seat)

    def vacate(self, seats: Int32s) -> None:
        """Forget what these seats held."""
        for seat in seats.tolist():
            self._special.discard(seat)
            self._held_back.pop(seat, None)
            self._bias.pop(seat, None)
            self._penalties.vacate(seat)

    def _known(self, token_ids: tuple[int, ...]) -> Int64s:
        """Those that the vocabulary has; others cannot be sampled anyway."""
        ids = np.array(token_ids, np.int64)
        return ids[(ids >= 0) & (ids < self._vocab_size)]

    def _seed_of(self, new: NewRequest) -> int:
        if new.params.seed is not None:
            return new.params.seed % 2**64
        name = f"{self._seed}:{new.request_id}".encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")

    def sample(
        self,
        logits: Tensor,
        seats: Int32s,
        positions: Int32s | Int64s,
        drafts: Int32s = NO_TOKENS,
    ) -> Sampled:
        """Sample one token for each row of `logits` [R, V] float32, which may be overwritten.

        `positions` [R] are where the tokens go in their requests: num_prompt_tokens for the first.
        `drafts` [R] or empty: what stands there already, to be verified; NO_DRAFT in the last row
        of each seat. The rows of a seat are in order and side by side.
        """
        outputs = positions - self._num_prompt_tokens[seats]
        reported = np.flatnonzero(self._num_logprobs[seats] >= 0)
        if len(reported):
            rows = torch.from_numpy(reported).to(self._device)
            raw = torch.log_softmax(logits.index_select(0, rows), -1)
        self._edit(logits, seats, outputs, drafts)
        tokens = argmax(logits)
        sound = _are_finite(logits, tokens)
        drawn = np.flatnonzero(sound & (self._temperature[seats] >= GREEDY_BELOW))
        if len(drawn):
            rows, theirs = torch.from_numpy(drawn).to(self._device), seats[drawn]
            tokens[rows] = draw(
                logits if len(drawn) == len(seats) else logits.index_select(0, rows),
                temperature=self._temperature[theirs],
                top_k=self._top_k[theirs],
                top_p=self._top_p[theirs],
                min_p=self._min_p[theirs],
                uniform=uniforms(self._seeds[theirs], outputs[drawn]),
            )
        if not sound.all():
            tokens[torch.from_numpy(~sound).to(self._device)] = 0
        token_ids = tokens.to("cpu", torch.int32).numpy()
        kept = _kept(seats, sound, token_ids, drafts)
        self._penalties.count(seats, tokens, kept)
        logprobs: dict[int, TokenLogprobs] = {}
        if len(reported):
            rows = torch.from_numpy(reported).to(self._device)
            wanted = self._num_logprobs[seats[reported]].tolist()
            found = token_logprobs(raw, tokens[rows], wanted)
            logprobs = dict(zip(reported.tolist(), found, strict=True))
        return Sampled(token_ids, sound, kept, logprobs)

    def take_best(self, best: Int32s, seats: Int32s, drafts: Int32s = NO_TOKENS) -> Sampled:
        """What `sample` says where `wants_best(seats)`: the most likely token of each row, which is
        -1 in `best` [R] if its logit is not a number."""
        sound: Bools = best >= 0
        token_ids = np.maximum(best, 0)
        return Sampled(token_ids, sound, _kept(seats, sound, token_ids, drafts))

    def wants_best(self, seats: Int32s) -> bool:
        """Whether all of these want their most likely token, and nothing else is asked for."""
        return not self._special or self._special.isdisjoint(seats.tolist())

    def _edit(
        self, logits: Tensor, seats: Int32s, outputs: Int32s | Int64s, drafts: Int32s
    ) -> None:
        """Apply logit bias, min_tokens and penalties in place."""
        biased = np.flatnonzero(self._has_bias[seats])
        if len(biased):
            bias = [self._bias[seat] for seat in seats[biased].tolist()]
            index = self._index(biased, [ids for ids, _ in bias])
            added = torch.cat([values for _, values in bias]).to(self._device)
            logits.index_put_(index, added, accumulate=True)
        early = np.flatnonzero(outputs < self._min_tokens[seats])
        if len(early):
            held_back = [self._held_back[seat] for seat in seats[early].tolist()]
            minus_infinity = torch.tensor(-torch.inf, device=self._device)
            logits.index_put_(self._index(early, held_back), minus_infinity)
        self._penalties.apply(logits, seats, drafts)

    def _index(self, rows: Int64s, token_ids: list[Int64s]) -> tuple[Tensor, Tensor]:
        """(row, token) indices, where row `rows[i]` has `token_ids[i]`."""
        flat_rows = np.repeat(rows, [len(ids) for ids in token_ids])
        flat_ids = np.concatenate(token_ids)
        device = self._device
        return torch.from_numpy(flat_rows).to(device), torch.from_numpy(flat_ids).to(device)


def _places(seats: Int32s) -> Int64s:
    """For each row: which of its seat's rows it is, from 0 on."""
    index = np.arange(len(seats))
    first = np.append(True, seats[1:] != seats[:-1])
    places: Int64s = index - np.maximum.accumulate(np.where(first, index, 0))
    return places


def _kept(seats: Int32s, sound: Bools, token_ids: Int32s, drafts: Int32s) -> Bools:
    """Rows that build on nothing but accepted drafts."""
    if not len(drafts):
        return np.ones(len(seats), np.bool_)
    kept = np.empty(len(seats), np.bool_)
    accept_rows(seats, sound & (token_ids == drafts), kept)
    return kept


def argmax(logits: Tensor) -> Tensor:
    """Index [R] of each row's maximum, of which NaN counts as one."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))  # ten times as fast as torch's
    return logits.argmax(-1)


def _are_finite(logits: Tensor, tokens: Tensor) -> Bools:
    """Whether each row's logit of its token is a number."""
    if logits.device.type == "cpu":  # a third of the time of torch's calls
        found = logits.numpy()[np.arange(len(tokens)), tokens.numpy()]
    else:
        found = logits.gather(-1, tokens[:, None])[:, 0].cpu().numpy()
    finite: Bools = np.isfinite(found)
    return finite


class _Penalties:
    """Presence, frequency and repetition penalties, and the token counts they need.

    Counts take a vocabulary's length per request, so only seats that use penalties have a line of
    them. Repetition looks at prompt and output (as in vLLM and Hugging Face), the others at the
    output only.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._strengths = np.zeros((3, max_num_seqs))  # presence, frequency, repetition
        self._line = np.full(max_num_seqs, -1, np.int64)  # -1: not penalised
        self._free: list[int] = []
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._seen = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)

    def seat(self, new: NewRequest) -> None:
        params = new.params
        strengths = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        if strengths == (0.0, 0.0, 1.0):
            return
        if not self._free:
            self._grow()
        line = self._line[new.slot] = self._free.pop()
        self._strengths[:, new.slot] = strengths
        outputs = new.token_ids[new.num_prompt_tokens :]
        counts = np.bincount(outputs, minlength=self._vocab_size).astype(np.int32)
        self._counts[line] = torch.from_numpy(counts).to(self._device)
        self._seen[line] = False
        self._seen[line, torch.from_numpy(new.token_ids.astype(np.int64)).to(self._device)] = True

    def of(self, seat: int) -> bool:
        """Whether this seat's tokens are penalised."""
        return bool(self._line[seat] >= 0)

    def _grow(self) -> None:
        """Double the lines."""
        have = len(self._counts)
        more = max(1, have)
        self._free.extend(range(have, have + more))
        self._counts = torch.cat((self._counts, self._counts.new_zeros(more, self._vocab_size)))
        self._seen = torch.cat((self._seen, self._seen.new_zeros(more, self._vocab_size)))

    def vacate(self, seat: int) -> None:
        line = int(self._line[seat])
        if line >= 0:
            self._free.append(line)
            self._line[seat] = -1

    def apply(self, logits: Tensor, seats: Int32s, drafts: Int32s) -> None:
        """Penalise in place; a row counts the drafts of its seat's rows before it as output."""
        penalised = np.flatnonzero(self._line[seats] >= 0)
        if not len(penalised):
            return
        rows = torch.from_numpy(penalised).to(self._device)
        lines = torch.from_numpy(self._line[seats[penalised]]).to(self._device)
        strengths = self._strengths[:, seats[penalised]].astype(np.float32)
        presence, frequency, repetition = torch.from_numpy(strengths).to(self._device)[:, :, None]
        x = logits.index_select(0, rows)
        drafted = self._drafts_before(penalised, seats, drafts) if len(drafts) else None
        if (strengths[2] != 1).any():
            seen = self._seen.index_select(0, lines)
            if drafted is not None:
                seen.index_put_(drafted, seen.new_ones(()))
            repeated = torch.where(x > 0, x / repetition, x * repetition)
            x = torch.where(seen, repeated, x)
        if strengths[:2].any():
            counts = self._counts.index_select(0, lines)
            if drafted is not None:
                counts.index_put_(drafted, counts.new_ones(()), accumulate=True)
            x -= frequency * counts + presence * (counts > 0)
        logits[rows] = x

    def _drafts_before(self, rows: Int64s, seats: Int32s, drafts: Int32s) -> tuple[Tensor, Tensor]:
        """(i, token) for each draft that row `rows[i]` builds on."""
        places = _places(seats[rows])
        theirs = drafts[spans(rows - places, places)].astype(np.int64)
        which = torch.from_numpy(np.repeat(np.arange(len(rows)), places))
        return which.to(self._device), torch.from_numpy(theirs).to(self._device)

    def count(self, seats: Int32s, tokens: Tensor, kept: Bools) -> None:
        """Note the sampled `tokens` [R] of rows at `seats`, where they were kept."""
        penalised = np.flatnonzero((self._line[seats] >= 0) & kept)
        if len(penalised):
            lines = torch.from_numpy(self._line[seats[penalised]]).to(self._device)
            index = lines, tokens[torch.from_numpy(penalised).to(self._device)]
            self._counts.index_put_(index, self._counts.new_ones(()), accumulate=True)
            self._seen.index_put_(index, self._seen.new_ones(()))
