"""The compiled small operations against torch's, and that a row's result is its own."""

import pytest
import torch
from torch import Tensor

from twostroke.model.elementwise import (
    CompiledElementwise,
    TorchElementwise,
    kernels,
    make_elementwise,
)

pytestmark = [
    pytest.mark.skipif(kernels() is None, reason="numba cannot be imported"),
    pytest.mark.usefixtures("threads"),
]
TORCH = TorchElementwise(torch.bfloat16)


def random(*dims: int, seed: int = 0) -> Tensor:
    return torch.randn(dims, generator=torch.Generator().manual_seed(seed))


def ulps(a: Tensor, b: Tensor) -> int:
    """How many bfloat16 steps two tensors are apart, at most."""
    return int((a.view(torch.int16).int() - b.view(torch.int16).int()).abs().max())


@pytest.mark.parametrize("width", [8, 64, 576, 580])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_add_norm(rows: int, width: int) -> None:
    ops, h, weight = CompiledElementwise(), random(rows, width), random(width, seed=1)
    for y in (None, random(rows, width, seed=2).bfloat16()):
        ours, theirs = h.clone(), h.clone()
        x, expected = ops.add_norm(ours, y, weight, 1e-5), TORCH.add_norm(theirs, y, weight, 1e-5)
        assert torch.equal(ours, theirs)
        assert not rows or ulps(x, expected) <= 1


@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("normed", [False, True])
def test_rotate(head_dim: int, normed: bool) -> None:
    qkv = random(9, 7, head_dim).bfloat16()
    weight = random(5, head_dim, seed=1).bfloat16() if normed else None
    angles = random(9, head_dim // 2, seed=2)
    rotations = torch.stack((angles.cos(), angles.sin()), 1)
    ours, theirs = qkv.clone(), qkv.clone()
    CompiledElementwise().rotate(ours, rotations, 5, weight, 1e-5)
    TORCH.rotate(theirs, rotations, 5, weight, 1e-5)
    # A product that cancels may differ by more steps, but those are small ones.
    torch.testing.assert_close(ours.float(), theirs.float(), atol=0.02, rtol=0.01)
    assert torch.equal(ours[:, 5:], qkv[:, 5:])


@pytest.mark.parametrize("width", [64, 72, 1536])
def test_silu_multiply_is_nearer_than_torch(width: int) -> None:
    gate_up = (random(9, 2 * width) * 4).bfloat16()
    gate_up[0, :4] = torch.tensor([200.0, -200.0, 0.0, float("nan")])
    gate, up = gate_up.double().chunk(2, -1)
    exact = torch.nn.functional.silu(gate) * up
    ours, theirs = CompiledElementwise().silu_multiply(gate_up), TORCH.silu_multiply(gate_up)
    # Half a step of bfloat16, and what the inverse and the power are off.
    torch.testing.assert_close(ours.double(), exact, atol=1e-30, rtol=2**-8 + 2e-4, equal_nan=True)
    errors = [((y - exact) / exact)[1:].abs().mean() for y in (ours, theirs)]
    assert errors[0] < 0.9 * errors[1]


def test_a_row_does_not_depend_on_the_others() -> None:
    ops, h, y = CompiledElementwise(), random(40, 576), random(40, 576, seed=1).bfloat16()
    weight, gate_up = random(576, seed=2), random(40, 3072, seed=3).bfloat16()
    x, act = ops.add_norm(h.clone(), y, weight, 1e-5), ops.silu_multiply(gate_up)
    for row in (0, 17, 39):
        one = slice(row, row + 1)
        assert torch.equal(ops.add_norm(h[one].clone(), y[one], weight, 1e-5), x[one])
        assert torch.equal(ops.silu_multiply(gate_up[one]), act[one])


def test_other_types_run_on_torch() -> None:
    device = torch.device("cpu")
    assert isinstance(make_elementwise(device, torch.float32), TorchElementwise)
    assert isinstance(make_elementwise(device, torch.bfloat16), CompiledElementwise)
