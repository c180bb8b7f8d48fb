"""Linear layers and rotary embedding on their own."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from twostroke.model import layers
from twostroke.model.elementwise import TorchElementwise
from twostroke.model.layers import Linear, Rotary, in_pairs, inverse_frequencies
from twostroke.shape import RopeScaling, from_hf_config
from twostroke.testing.tiny_model import tiny_config


def random(*dims: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(dims, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 7, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_equals_torch(dtype: torch.dtype, rows: int, bias: bool) -> None:
    weight, b, x = random(48, 32), random(48, seed=1), random(rows, 64, seed=2)[:, :32]
    with torch.inference_mode():
        linear = Linear(weight.to(dtype), b.to(dtype) if bias else None)
        y = linear(x.to(dtype))
    expected = F.linear(x, weight, b if bias else None)
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(y.float(), expected, atol=tolerance, rtol=tolerance)
    assert y.dtype == dtype
    assert linear.weight_bytes == (48 * 32 + bias * 48) * dtype.itemsize


@pytest.fixture
def torch_that_cannot_pack(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("built without oneDNN")

    monkeypatch.setattr(layers, "_pack", refuse)
    layers._can_pack.cache_clear()
    yield
    layers._can_pack.cache_clear()


@pytest.mark.usefixtures("torch_that_cannot_pack")
def test_linear_without_onednn() -> None:
    weight, x = random(8, 16), random(3, 16, seed=1)
    assert torch.equal(Linear(weight)(x), F.linear(x, weight))


def test_rotation_in_pairs_equals_rotating_halves() -> None:
    """The order that Hugging Face keeps, its formula, and the same heads in pairs."""
    shape = from_hf_config(tiny_config())
    positions = torch.tensor([0, 1, 7, 500])
    q = random(4, 3, 16)
    angles = positions[:, None, None] * inverse_frequencies(shape)[0]
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    expected = q * cos + torch.cat((-q[..., 8:], q[..., :8]), -1) * sin
    pairs = torch.stack([in_pairs(head.flatten(), 16).view(3, 16) for head in q])
    rotated, before = pairs.clone(), pairs[:, 2].clone()
    rotations = Rotary(shape, torch.device("cpu")).rotations(positions)
    TorchElementwise(torch.float32).rotate(rotated, rotations, 2, None, 0.0)
    halves = torch.stack((rotated[..., 0::2], rotated[..., 1::2]), -2).flatten(-2)
    torch.testing.assert_close(halves[:, :2], expected[:, :2])
    assert torch.equal(rotated[:, 2], before), "a value head was turned"


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("scaling", "magnitude"),
    [
        (YARN, 1.1386294),
        (YARN | {"attention_factor": 1.5}, 1.5),
        (YARN | {"mscale": 1.0, "mscale_all_dim": 2.0}, 1.1386294 / 1.2772589),
        (YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}, 1.1386294),
    ],
)
def test_yarn_equals_transformers(scaling: dict[str, Any], magnitude: float) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = tiny_config(rope_scaling=scaling, head_dim=64, max_position_embeddings=512)
    ours, factor = inverse_frequencies(from_hf_config(config))
    theirs, their_factor = ROPE_INIT_FUNCTIONS["yarn"](LlamaConfig(**config), torch.device("cpu"))
    torch.testing.assert_close(ours, theirs)
    assert factor == pytest.approx(their_factor)
    assert factor == pytest.approx(magnitude)


def test_factors_divide_the_frequencies() -> None:
    plain = from_hf_config(tiny_config())
    assert inverse_frequencies(plain)[1] == 1
    factors = (1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0)
    scaled = dataclasses.replace(plain, rope_scaling=RopeScaling("factors", factors=factors))
    ours, magnitude = inverse_frequencies(scaled)
    torch.testing.assert_close(ours, inverse_frequencies(plain)[0] / torch.tensor(factors))
    assert magnitude == 1
