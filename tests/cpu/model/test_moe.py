"""The sparse MLP against a loop over tokens and experts."""

import pytest
import torch

from twostroke.model.elementwise import Elementwise, TorchElementwise
from twostroke.model.layers import Linear, Mlp
from twostroke.model.moe import SparseMlp

HIDDEN, WIDTH, EXPERTS = 16, 24, 6

OPS = TorchElementwise(torch.float32)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("num_tokens", "top_k"), [(0, 2), (1, 1), (1, 6), (40, 3)])
def test_equals_a_loop(normalise: bool, num_tokens: int, top_k: int) -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        router = Linear(torch.randn(EXPERTS, HIDDEN))
        experts = [
            Mlp(Linear(torch.randn(2 * WIDTH, HIDDEN)), Linear(torch.randn(HIDDEN, WIDTH)))
            for _ in range(EXPERTS)
        ]
        x = torch.randn(num_tokens, HIDDEN)
        y = SparseMlp(router, experts, top_k, normalise)(x, OPS)
        expected = torch.zeros_like(x)
        for token in range(num_tokens):
            chances = torch.softmax(router(x[token : token + 1])[0], 0)
            weights, chosen = chances.topk(top_k)
            if normalise:
                weights = weights / weights.sum()
            for weight, expert in zip(weights, chosen.tolist(), strict=True):
                expected[token] += weight * experts[expert](x[token : token + 1], OPS)[0]
    torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)


def test_experts_that_nobody_chose_do_not_run() -> None:
    class Refusing(Mlp):
        def __call__(self, x: torch.Tensor, ops: Elementwise) -> torch.Tensor:
            raise AssertionError("ran")

    with torch.inference_mode():
        one, two = Linear(torch.randn(2 * WIDTH, HIDDEN)), Linear(torch.randn(HIDDEN, WIDTH))
        choosing_the_first = torch.zeros(EXPERTS, HIDDEN)
        choosing_the_first[0] = 1
        experts = [Mlp(one, two), *(Refusing(one, two) for _ in range(EXPERTS - 1))]
        y = SparseMlp(Linear(choosing_the_first), experts, 1, True)(torch.ones(3, HIDDEN), OPS)
    assert y.shape == (3, HIDDEN)
