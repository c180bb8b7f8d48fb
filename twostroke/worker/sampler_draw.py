"""Drawing tokens: reproducible uniforms, and inverse-CDF sampling row by row.

The same (seed, output position, logits) gives the same token whatever else is in the batch, however
often the request was preempted, and whether steps overlap or not: the random number is a hash of
seed and position instead of a generator's next value, and no arithmetic here mixes rows or depends
on how many there are. Shapes: Q rows to draw, V vocabulary.
"""

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twostroke.messages import Float64s, Int32s, Int64s

UInt64s = NDArray[np.uint64]

# Widths of the candidate lists tried before the whole vocabulary is looked at. A row with top-k has
# the first that holds it; one with top-p alone goes on until its candidates hold that mass, which
# depends on its own logits only. On a CPU the 64 best of 49k take 0.1 ms a row, sorting all 4, and
# a `_Ranking` 0.4, which is less than the best 1,024.
_GPU_WIDTHS = (64, 1024, 8192)
_CPU_WIDTHS = (64,)

_BLOCK = 256  # weights that `pick` sums up at once


def _mix(x: UInt64s) -> UInt64s:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): every output bit is well mixed."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: UInt64s, positions: Int32s | Int64s) -> Float64s:
    """One number in [0, 1) for each (seed, output position), of 53 random bits."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    counter = (positions.astype(np.uint64) + np.uint64(1)) * golden
    # The seed is mixed by itself first: seeds 1, 2, 3 ... must not give shifted streams.
    bits = _mix(_mix(seeds + golden) ^ counter)
    return (_mix(bits + golden) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """Index [Q] drawn from unnormalised `weights` [Q, n] by `uniform` [Q] float64 in [0, 1).

    Long rows are drawn in two steps, a block and then an index in it: that needs one pass of sums
    over all weights in place of a running sum, which is ten times slower.
    """
    length, device = weights.shape[-1], weights.device
    if length <= 4 * _BLOCK:
        return _scan(weights, uniform)[0]
    whole = length - length % _BLOCK
    sums = weights[:, :whole].view(len(weights), -1, _BLOCK).sum(-1)
    if whole < length:
        sums = torch.cat((sums, weights[:, whole:].sum(-1, keepdim=True)), -1)
    block, rest = _scan(sums, uniform)
    index = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=device)
    inside = weights.gather(-1, index.clamp(max=length - 1)).masked_fill_(index >= length, 0.0)
    return block * _BLOCK + _scan(inside, rest)[0]


def _scan(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The index [Q] that `uniform` falls on, and where within that index's share, in [0, 1).

    It is the first whose cumulative weight exceeds the target, so its weight is positive: the
    running sum does not move at a weight of zero.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = uniform[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True).clamp_(max=weights.shape[-1] - 1)
    weight = weights.gather(-1, index)
    # A parallel scan (on a GPU) rounds differently from element to element, so its sum may move.
    none = weight <= 0
    if none.any():
        index = torch.where(none, weights.argmax(-1, keepdim=True), index)
        weight = weights.gather(-1, index)
    rest = 1 - (cumulative.gather(-1, index) - target) / weight
    return index[:, 0], rest.clamp_(0, 1 - 2.0**-53)[:, 0]


def draw(
    logits: Tensor,
    *,
    temperature: Float64s,
    top_k: Int32s,
    top_p: Float64s,
    min_p: Float64s,
    uniform: Float64s,
) -> Tensor:
    """Tokens [Q] int64 drawn from `logits` [Q, V] float32, which it overwrites.

    Order as in vLLM: temperature, min_p, top-k, top-p, draw. `top_k` 0, `top_p` 1 and `min_p` 0 are
    off. Of tokens that tie at the edge of top-k or top-p only as many are kept as fit.
    """
    device, vocab_size = logits.device, logits.shape[-1]
    # With the maximum at 0 neither a tiny temperature nor exp can overflow.
    logits -= logits.amax(-1, keepdim=True)
    logits /= _column(temperature.astype(np.float32), device)
    if min_p.any():
        with np.errstate(divide="ignore"):
            least = _column(np.log(min_p).astype(np.float32), device)
        logits.masked_fill_(logits < least, -torch.inf)
    top_k = np.where((top_k <= 0) | (top_k > vocab_size), vocab_size, top_k).astype(np.int32)
    targets = torch.from_numpy(uniform).to(device)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=device)

    filtered = (top_k < vocab_size) | (top_p < 1)
    if not filtered.any():
        return pick(torch.softmax(logits, -1), targets)
    if not filtered.all():
        rows = _indices(np.flatnonzero(~filtered), device)
        tokens[rows] = pick(torch.softmax(logits.index_select(0, rows), -1), targets[rows])
    todo = np.flatnonzero(filtered)
    tried = _CPU_WIDTHS if device.type == "cpu" else _GPU_WIDTHS
    widths = [*(width for width in tried if width < vocab_size), vocab_size]
    first = np.where(top_k < vocab_size, np.searchsorted(widths, top_k), 0)
    for i, width in enumerate(widths):
        now = todo[first[todo] <= i]
        if len(now):
            rows = _indices(now, device)
            if width == vocab_size > tried[-1] and device.type == "cpu":
                for row in now.tolist():
                    ranking = _Ranking(logits[row])
                    tokens[row] = ranking.draw(int(top_k[row]), top_p[row], uniform[row])
                break
            these = logits if len(now) == len(logits) else logits.index_select(0, rows)
            picked, sure = _draw_from_top(these, width, top_k[now], top_p[now], targets[rows])
            tokens[rows] = picked
            todo = np.setdiff1d(todo, now[sure.cpu().numpy()], assume_unique=True)
    return tokens


def _draw_from_top(
    logits: Tensor, width: int, top_k: Int32s, top_p: Float64s, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens [Q] drawn from the `width` best, and whether those hold all that top-k and top-p keep.

    `logits` [Q, V] have their maximum at 0. A `top_k` is at most `width`, or V.
    """
    device, vocab_size = logits.device, logits.shape[-1]
    if width == vocab_size:
        values, token_ids = logits.sort(stable=True, dim=-1, descending=True)
    else:
        values, token_ids = logits.topk(width, -1)
    weights = values.to(torch.float64).exp_()
    k = _column(top_k, device)
    weights.masked_fill_(torch.arange(width, device=device) >= k, 0.0)
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    if (top_k > width).any():
        # Mass of the whole row: the largest weight is 1, so its probability is 1 / mass.
        mass = 1 / torch.softmax(logits, -1).amax(-1, keepdim=True).to(torch.float64)
        total = torch.where(k > width, mass, total)
    wanted = _column(top_p, device) * total
    # A token stays while those before it do not reach top_p; the best one always stays.
    dropped = cumulative - weights >= wanted
    dropped[:, 0] = False
    sure = (k <= width) | (cumulative[:, -1:] >= wanted)
    picked = pick(weights.masked_fill_(dropped, 0.0), uniform)
    return token_ids.gather(-1, picked[:, None])[:, 0], sure[:, 0]


class _Ranking:
    """The tokens of one row by falling logit, sorted only where somebody looks.

    Tokens are counted and their weights summed up in buckets of nearly equal logits. Bucket by
    bucket these sums are those of the sorted row, so that a rank or a mass is found by sorting the
    one bucket that it falls into. `logits` [V] float32 on a CPU have their maximum at 0.
    """

    # The upper half of a float32's bits: 128 buckets between a number and its double. Tokens that
    # are less likely than the best by a factor of exp(128) share one, for nobody ever draws them.
    _LOWEST = np.float32(128)
    _SHIFT = 16
    _NUM_BUCKETS = int(_LOWEST.view(np.int32) >> _SHIFT) + 1

    def __init__(self, logits: Tensor) -> None:
        self._depths = np.abs(logits.numpy())
        self._weights = torch.exp(logits).numpy()
        self._buckets = np.minimum(self._depths, self._LOWEST).view(np.int32) >> self._SHIFT
        size = self._NUM_BUCKETS
        self._counts = np.cumsum(np.bincount(self._buckets, minlength=size))
        self._masses = np.cumsum(np.bincount(self._buckets, self._weights, minlength=size))

    def _open(self, bucket: int) -> tuple[int, Int64s, Float64s]:
        """Rank of a bucket's first token, its tokens in order, and the mass up to each of them."""
        token_ids = np.flatnonzero(self._buckets == bucket)
        token_ids = token_ids[np.argsort(self._depths[token_ids], kind="stable")]
        before = self._masses[bucket - 1] if bucket else 0.0
        mass = before + np.cumsum(self._weights[token_ids], dtype=np.float64)
        return int(self._counts[bucket]) - len(token_ids), token_ids, mass

    def _mass_of(self, count: int) -> float:
        """Mass of the `count` best."""
        first, _, mass = self._open(int(np.searchsorted(self._counts, count)))
        return float(mass[count - first - 1])

    def _reach(self, mass: float, side: Literal["left", "right"]) -> tuple[int, int]:
        """Rank and id of the first token with which the mass reaches (right: exceeds) `mass`."""
        bucket = int(np.searchsorted(self._masses, mass, side))
        first, token_ids, masses = self._open(min(bucket, self._NUM_BUCKETS - 1))
        # A sum of sums is rounded differently; a weight of zero, at the end, moves neither.
        last = int(np.searchsorted(masses, masses[-1]))
        index = min(int(np.searchsorted(masses, mass, side)), last)
        return first + index, int(token_ids[index])

    def draw(self, top_k: int, top_p: float, uniform: float) -> int:
        """A token of those that top-k and then top-p keep; `uniform` in [0, 1) says which."""
        total = self._mass_of(top_k)
        kept = min(top_k, self._reach(top_p * total, "left")[0] + 1) if top_p < 1 else top_k
        total = self._mass_of(kept)
        return self._reach(uniform * total, "right")[1]


def _column(values: NDArray[np.float32] | Float64s | Int32s, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)[:, None]


def _indices(rows: Int64s, device: torch.device) -> Tensor:
    return torch.from_numpy(rows).to(device)
