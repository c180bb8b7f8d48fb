"""Products in 8 bits: exact once both sides are integers, and near what they were before."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.cpu.model.causal import logits, random_tokens
from tests.cpu.model.test_gguf import Quant, write_gguf
from twostroke.checkpoint import open_checkpoint
from twostroke.config import Quantization
from twostroke.model.int8_rows import (
    TURNED,
    Int8Rows,
    bytes_of,
    can_multiply,
    hadamard,
    padded,
    quantise,
    works,
)
from twostroke.model.layers import Linear, Mlp
from twostroke.model.llama import DecoderModel
from twostroke.model.registry import load_model
from twostroke.testing.tiny_model import write_tiny_checkpoint

needs_kernel = pytest.mark.skipif(not works(), reason="the processor has no AVX512-VNNI")


def random(*dims: int, seed: int = 0) -> Tensor:
    return torch.randn(dims, generator=torch.Generator().manual_seed(seed))


def turned_back(values: Tensor, scales: Tensor, width: int) -> Tensor:
    rows = values.double() * scales.double()[:, None]
    blocks = rows.view(len(rows), -1, TURNED) @ hadamard().double()
    return blocks.flatten(1)[:, :width]


def parts_of(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The integers of x in 8 bits, their scales, and the integers' sums."""
    sums = bytes_of(x)[:, padded(x.shape[1]) + 4 :][:, :4].contiguous().view(torch.int32)
    return *quantise(x), sums[:, 0]


@needs_kernel
@pytest.mark.parametrize("width", [64, 100, 576])
def test_a_weight_is_rounded_to_the_nearest_for_each_output(width: int) -> None:
    weight = random(5, width).bfloat16()
    weight[1] = 0
    values, scales = quantise(weight)
    assert values.shape == (5, padded(width))
    assert torch.equal(values[1], torch.zeros_like(values[1]))
    # Turning is a rotation: the error of a row stays as long as it is.
    error = (turned_back(values, scales, width) - weight).norm(dim=1)
    assert (error <= 0.5 * scales * padded(width) ** 0.5 * 1.001).all()
    assert (values.abs().amax(1) == torch.tensor([127, 0, 127, 127, 127])).all()


def test_the_matrix_is_its_own_inverse() -> None:
    assert torch.equal(hadamard() @ hadamard(), torch.eye(TURNED))


@needs_kernel
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("width", [1, 64, 100, 1536])
def test_x_is_rounded_to_the_nearest_for_each_row(width: int) -> None:
    x = random(21, width).bfloat16()
    x[0], x[1, 0], x[2] = 0, 1000, x[2] * 1e-20
    values, scales, sums = parts_of(x)
    assert torch.equal(sums, values.sum(1, dtype=torch.int32))
    turned = torch.zeros(21, padded(width), dtype=torch.float64)
    turned[:, :width] = x
    turned = (turned.view(21, -1, TURNED) @ hadamard().double()).flatten(1)
    expected = turned.abs().amax(1) / 127
    torch.testing.assert_close(scales.double(), expected, atol=0, rtol=1e-5)
    error = (values * scales.double()[:, None] - turned).abs()
    assert (error <= 0.5001 * expected[:, None]).all()


@needs_kernel
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out", "width"), [(64, 64), (192, 100), (128, 1536), (640, 576)])
def test_the_product_of_the_integers_is_exact(out: int, width: int, bias: bool) -> None:
    weight, x = random(out, width).bfloat16(), random(300, width, seed=1).bfloat16()
    b = random(out, seed=2).bfloat16() if bias else None
    values, scales = quantise(weight)
    n, x_scales, _ = parts_of(x)
    sums = n.double() @ values.double().T
    assert sums.abs().max() < 2**31
    expected = sums.float() * scales * x_scales[:, None]
    if b is not None:
        expected += b.float()
    kernel = Int8Rows(weight, b)
    for rows in (0, 1, 2, 5, 6, 7, 64, 97, 192, 300):
        wide = kernel.into(torch.empty(rows, out), x[:rows])
        assert torch.equal(wide, expected[:rows]), f"{rows} rows"
        assert torch.equal(kernel(x[:rows]), expected[:rows].bfloat16()), f"{rows} rows"


@needs_kernel
def test_the_largest_sums_fit() -> None:
    """All products of one sign, over as many inputs as models have."""
    width = 32_768
    weight, x = torch.zeros(64, width), torch.zeros(2, width)
    weight[:, ::TURNED], x[0, ::TURNED], x[1, ::TURNED] = 1, 1, -1
    y = Int8Rows(weight.bfloat16(), None).into(torch.empty(2, 64), x.bfloat16())
    exact = torch.tensor([[width / TURNED], [-width / TURNED]])
    torch.testing.assert_close(y, exact.expand(2, 64), atol=0, rtol=1e-5)


@needs_kernel
def test_a_channel_that_is_much_larger_costs_the_others_little() -> None:
    """What turning is for."""
    weight, x = random(640, 576), random(64, 576, seed=1)
    weight[:, 11], x[:, 11] = 0, 100
    weight, x = weight.bfloat16(), x.bfloat16()
    expected, largest = x.float() @ weight.float().T, x.float().abs().amax(1, keepdim=True)
    as_it_is = (x.float() * 127 / largest).round() * largest / 127 @ weight.float().T
    error = (Int8Rows(weight, None)(x) - expected).norm()
    assert error < 0.3 * (as_it_is - expected).norm()


@needs_kernel
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_seen_in_every_result(value: float) -> None:
    x = random(2, 64).bfloat16()
    x[0, 40] = value
    y = Int8Rows(random(64, 64).bfloat16(), None)(x)
    assert not y[0].isfinite().any()
    assert y[1].isfinite().all()


@needs_kernel
def test_a_linear_with_this_form_takes_any_rows() -> None:
    weight, bias = random(64, 96).bfloat16(), random(64, seed=1).bfloat16()
    linear = Linear(None, bias, int8=Int8Rows(weight, bias))
    x = random(100, 2 * 96, seed=2).bfloat16()[:, ::2]  # not contiguous
    with torch.inference_mode():
        many = linear(x)
        assert torch.equal(many[:3], linear(x[:3]))
        assert torch.equal(linear.in_float32(x).bfloat16(), many)
        torch.testing.assert_close(many, Linear(weight, bias)(x), atol=0.3, rtol=0.05)
    assert linear.num_weights == weight.numel()
    assert linear.bytes_read(1) == linear.bytes_read(100) < weight.nbytes


def test_outputs_that_do_not_fill_a_block_have_no_kernel() -> None:
    assert not can_multiply(63)
    assert can_multiply(128) == works()


def load(directory: Path, quantization: Quantization) -> DecoderModel:
    return load_model(
        open_checkpoint(directory),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        quantization=quantization,
    )


class InTorch:
    """A linear layer as `Int8Rows` has it, computed by torch."""

    def __init__(self, linear: Linear, width: int) -> None:
        with torch.inference_mode():  # the weight is what the linear layer makes of ones
            self._weight = quantise(linear(torch.eye(width).bfloat16()).T.contiguous())

    def __call__(self, x: Tensor) -> Tensor:
        rows = torch.zeros(len(x), padded(x.shape[1]))
        rows[:, : x.shape[1]] = x
        rows = (rows.view(len(x), -1, TURNED) @ hadamard()).flatten(1)
        x_scales = rows.abs().amax(1, keepdim=True) / 127
        values, scales = self._weight
        return ((rows / x_scales).round() @ values.float().T * scales * x_scales).bfloat16()


@needs_kernel
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_model_gives_what_the_same_in_torch_does(architecture: str, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, architecture, intermediate_size=160)
    model, expected, tokens = load(tmp_path, "int8"), load(tmp_path, "none"), random_tokens(70)
    whole = logits(expected, tokens)
    for layer in expected.layers:
        assert isinstance(layer.mlp, Mlp)
        layer.qkv, layer.output = InTorch(layer.qkv, 64), InTorch(layer.output, 64)  # type: ignore
        layer.mlp.gate_up = InTorch(layer.mlp.gate_up, 64)  # type: ignore
        layer.mlp.down = InTorch(layer.mlp.down, 160)  # type: ignore
    found, same = logits(model, tokens), logits(expected, tokens)
    # Other roundings to bfloat16 and then to 8 bits: far less than what 8 bits cost.
    assert (found - same).norm() < 0.3 * (found - whole).norm()
    assert (found - whole).norm() < 0.05 * whole.norm()


@needs_kernel
def test_all_of_a_model_but_its_ends_is_in_8_bits(tmp_path: Path) -> None:
    for architecture in ("llama", "qwen2", "qwen3_moe"):
        write_tiny_checkpoint(tmp_path / architecture, architecture, moe_intermediate_size=64)
        whole, int8 = (load(tmp_path / architecture, kind) for kind in ("none", "int8"))
        tokens = random_tokens(70)
        expected, found = logits(whole, tokens), logits(int8, tokens)
        assert (found - expected).norm() < 0.1 * expected.norm()
        assert int8.weight_bytes < whole.weight_bytes
        linears = [linear for layer in int8.layers for linear in (layer.qkv, layer.output)]
        assert all(linear.int8 is not None for linear in linears)
        assert int8.lm_head.int8 is None


@needs_kernel
def test_a_file_in_few_bits_is_rounded_to_8_bits_when_asked(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    path = write_gguf(tmp_path / "model.gguf", tmp_path, Quant.Q4_1)
    stored, int8, tokens = load(path, "none"), load(path, "int8"), random_tokens(20)
    assert int8.layers[0].qkv.int8 is not None
    expected, found = logits(stored, tokens), logits(int8, tokens)
    assert (found - expected).norm() < 0.05 * expected.norm()


@needs_kernel
def test_what_does_not_fill_blocks_of_outputs_stays_in_bfloat16(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, hidden_size=96)
    whole, int8, tokens = load(tmp_path, "none"), load(tmp_path, "int8"), random_tokens(70)
    for layer in int8.layers:
        assert layer.qkv.int8 is not None
        assert layer.output.int8 is None  # 96 outputs
    expected, found = logits(whole, tokens), logits(int8, tokens)
    assert 0 < (found - expected).norm() < 0.05 * expected.norm()
