"""Qwen3-MoE's sparse MLP: a router picks k of E experts for each token.

Tokens are sorted by expert, so that each expert that is hit runs once, over all of its tokens. A
rank of a tensor-parallel group has some of the experts, and its output is the sum over those.
"""

import torch
from torch import Tensor

from twostroke.model.elementwise import Elementwise
from twostroke.model.layers import Linear, Mlp


class SparseMlp:
    """Mixture of experts: x [T, hidden] -> [T, hidden].

    `router` chooses among all experts; `experts` are those from number `first` on that are here.
    """

    __slots__ = ("_experts", "_first", "_normalise", "_router", "_top_k")

    def __init__(
        self, router: Linear, experts: list[Mlp], top_k: int, normalise: bool, first: int = 0
    ) -> None:
        self._router = router
        self._experts = experts
        self._first = first
        self._top_k = top_k
        self._normalise = normalise  # chosen probabilities sum to 1 (norm_topk_prob)

    @property
    def linears(self) -> list[Linear]:
        return [self._router, *(linear for expert in self._experts for linear in expert.linears)]

    def __call__(self, x: Tensor, ops: Elementwise) -> Tensor:
        probabilities = torch.softmax(self._router(x), -1, dtype=torch.float32)
        weights, chosen = torch.topk(probabilities, self._top_k, -1)  # both [T, k]
        if self._normalise:
            weights /= weights.sum(-1, keepdim=True)
        # Slot t * k + j is token t's j-th expert. Sorted by expert, each expert's slots are one
        # range; results go back to slot order, so a token's sum does not depend on the others.
        order = chosen.flatten().argsort(stable=True)
        last = self._first + len(self._experts)
        counts = torch.bincount(chosen.flatten(), minlength=last).tolist()
        before, counts = sum(counts[: self._first]), counts[self._first : last]
        ours = order[before : before + sum(counts)]
        rows = x.index_select(0, ours // self._top_k)
        outputs = torch.empty_like(rows)
        start = 0
        for expert, count in zip(self._experts, counts, strict=True):
            if count:
                outputs[start : start + count] = expert(rows[start : start + count], ops)
                start += count
        slots = x.new_zeros(len(order), x.shape[-1]).index_copy_(0, ours, outputs)
        slots = slots.view(-1, self._top_k, x.shape[-1])
        return torch.bmm(weights.to(x.dtype)[:, None], slots)[:, 0]
