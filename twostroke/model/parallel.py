"""Tensor parallelism: which part of a model a rank holds, and what ranks say to each other.

    q, k, v, gate, up      split by output: a rank has whole heads and its share of the MLP's width
    o, down                split by input: each rank computes a summand of the output, `all_reduce`
    experts                whole ones, dealt out; each rank sums over its own, `all_reduce`
    embedding, LM head     split by vocabulary: rows of other ranks are summed in, logits gathered
    norms, router          on every rank

With more ranks than KV heads a head is on several ranks, next to the query heads that share it.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from twostroke.shape import ModelShape

# Shares of a large dimension are multiples of these: the kernels' tile sizes.
_VOCABULARY_UNIT = 64
_WIDTH_UNIT = 32


class Group(Protocol):
    """The ranks of one model. All must make the same calls in the same order."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, the same to the last bit on every rank; may be in place."""
        ...

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's `x`, in order of rank, on rank 0; nothing elsewhere."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's `x`, a CPU tensor; every rank brings one of the same shape and type."""
        ...

    def minimum(self, value: int) -> int:
        """The least of every rank's `value`."""
        ...


class Alone:
    """The one rank of a group of one."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        return [x]

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def minimum(self, value: int) -> int:
        return value


ALONE = Alone()


@dataclass(frozen=True)
class Shard:
    """What rank `rank` of `size` holds of a model; the size is one that `shape` allows."""

    shape: ModelShape
    rank: int = 0
    size: int = 1

    @property
    def num_heads(self) -> int:
        return self.shape.num_heads // self.size

    @property
    def num_kv_heads(self) -> int:
        return max(1, self.shape.num_kv_heads // self.size)

    @property
    def q_rows(self) -> slice:
        """Its rows of the q projection, and columns of the output projection."""
        size = self.num_heads * self.shape.head_dim
        return slice(self.rank * size, (self.rank + 1) * size)

    @property
    def kv_rows(self) -> slice:
        """Its rows of the k and v projections."""
        first = self.rank * self.shape.num_kv_heads // self.size
        head_dim = self.shape.head_dim
        return slice(first * head_dim, (first + self.num_kv_heads) * head_dim)

    @property
    def experts(self) -> range:
        share = self._share(self.shape.num_experts)
        return range(share.start, share.stop)

    @property
    def mlp_columns(self) -> slice:
        """Its share of a dense MLP's width."""
        width = self.shape.intermediate_size
        # Uneven by an eighth at most.
        unit = _WIDTH_UNIT if width >= 8 * _WIDTH_UNIT * self.size else 1
        return self._share(width, unit)

    @property
    def padded_vocabulary(self) -> int:
        """Tokens a rank: the same on each, the last ones padded."""
        if self.size == 1:
            return self.shape.vocab_size
        units = -(-self.shape.vocab_size // (_VOCABULARY_UNIT * self.size))
        return units * _VOCABULARY_UNIT

    @property
    def vocabulary(self) -> slice:
        """Its tokens; fewer than `padded_vocabulary`, or none, at the end."""
        first = self.rank * self.padded_vocabulary
        vocab_size = self.shape.vocab_size
        return slice(min(first, vocab_size), min(first + self.padded_vocabulary, vocab_size))

    def _share(self, total: int, unit: int = 1) -> slice:
        """An even share of `total`, in whole units but for the last."""
        units = -(-total // unit)
        start, stop = (rank * units // self.size * unit for rank in (self.rank, self.rank + 1))
        return slice(start, min(stop, total))
