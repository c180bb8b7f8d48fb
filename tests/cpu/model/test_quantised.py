"""Weights of 4 and 8 bits: kept as the file has them, and multiplied so."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.quants import quantize
from torch import Tensor

from tests.cpu.model.test_gguf import Quant, write_gguf
from twostroke.checkpoint import open_checkpoint
from twostroke.gguf_header import GGML_TYPES
from twostroke.model import few_rows_quantised
from twostroke.model.dequantise import dequantise
from twostroke.model.few_rows_quantised import MAX_QUANTISED_ROWS, QuantisedRows
from twostroke.model.gguf import GgufSource
from twostroke.model.layers import Linear
from twostroke.model.quantised import GROUP, QuantisedWeight, from_ggml, quantise, stack
from twostroke.model.registry import load_model
from twostroke.testing.tiny_model import write_tiny_checkpoint

needs_kernel = pytest.mark.skipif(
    not few_rows_quantised.works(), reason="the processor has neither AVX512-VNNI nor AVX2"
)


def random(*dims: int, seed: int = 0) -> Tensor:
    return torch.randn(dims, generator=torch.Generator().manual_seed(seed))


def random_weight(bits: int, out: int, width: int, *, minima: bool) -> QuantisedWeight:
    generator = torch.Generator().manual_seed(bits)
    low, high, kind = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    values = torch.randint(low, high, (out, width), generator=generator).to(kind)
    scales = random(out, width // GROUP, seed=1).mul_(0.01).half()
    return QuantisedWeight(
        bits, values, scales, random(out, width // GROUP, seed=2).half() if minima else None
    )


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1"])
def test_what_the_file_has_is_kept(name: str) -> None:
    kind = GGML_TYPES[Quant[name].value]
    stored = torch.from_numpy(quantize(random(6, 256).numpy(), Quant[name]).reshape(-1).copy())
    weight = from_ggml(stored.view(-1, kind.block_bytes), kind, 256)
    assert weight is not None
    expected = dequantise(stored, kind, torch.float32).view(6, 256)
    torch.testing.assert_close(weight.dequantised(), expected, atol=1e-6, rtol=1e-6)


def test_a_super_block_is_kept_up_to_the_rounding_of_its_scales() -> None:
    kind = GGML_TYPES[Quant.Q4_K.value]
    rng = np.random.default_rng(0)
    blocks = torch.from_numpy(rng.integers(0, 256, (8, kind.block_bytes), dtype=np.uint8))
    blocks[:, :4] = torch.tensor([0.01, 0.02]).half().view(torch.uint8)
    weight = from_ggml(blocks, kind, 1024)
    assert weight is not None
    expected = dequantise(blocks.flatten(), kind, torch.float32).view(2, 1024)
    assert (weight.dequantised() - expected).abs().max() < 2**-10 * expected.abs().max()


def test_other_formats_are_not() -> None:
    kind = GGML_TYPES[Quant.Q6_K.value]
    assert from_ggml(torch.zeros(4, kind.block_bytes, dtype=torch.uint8), kind, 256) is None


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_is_to_the_nearest(bits: int) -> None:
    weight = random(5, 96)
    weight[1, :GROUP] = 0  # a group without any scale
    rounded = quantise(weight, bits)
    step = rounded.scales.float().repeat_interleave(GROUP, 1)
    # Half a step, and what float16 takes from scale and minimum.
    assert ((rounded.dequantised() - weight).abs() <= 0.5 * step + 2e-2 * step + 2e-3).all()
    assert torch.equal(rounded.dequantised()[1, :GROUP], weight[1, :GROUP])


def test_only_like_is_stacked() -> None:
    one, two = (random_weight(4, 64, 64, minima=minima) for minima in (True, False))
    both = stack([one, one])
    assert both is not None
    assert len(both.values) == 128
    assert stack([one, two]) is None


@needs_kernel
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("bits", "minima"), [(4, True), (4, False), (8, False), (8, True)])
@pytest.mark.parametrize(("out", "width"), [(64, 32), (192, 576), (128, 1536)])
def test_the_product_is_that_of_the_dequantised_weight(
    out: int, width: int, bits: int, minima: bool, bias: bool
) -> None:
    weight = random_weight(bits, out, width, minima=minima)
    b = random(out, seed=3).bfloat16() if bias else None
    kernel = QuantisedRows(weight, b)
    x = random(20, width, seed=4).bfloat16()
    expected = x.double() @ weight.dequantised().double().T
    if b is not None:
        expected += b.double()
    # Half a step of x as integers of 16 bits, and the order of sums.
    step = x.double().view(20, -1, GROUP).abs().amax(-1) / (127 * 257)
    rounding = 0.5 * step.repeat_interleave(GROUP, 1)
    weights = weight.dequantised().double().abs().T
    bound = ((1.01 * rounding + 1e-6 * x.double().abs()) @ weights).max()
    for rows in (0, 1, 2, 3, 4, 7, 20):
        wide = kernel.into(torch.empty(rows, out), x[:rows])
        assert rows == 0 or (wide - expected[:rows]).abs().max() <= bound
        assert torch.equal(kernel(x[:rows]), wide.bfloat16()), "rounded from the same sums"


@needs_kernel
@pytest.mark.parametrize("bits", [4, 8])
def test_what_levels_hold_exactly_is_multiplied_exactly(bits: int) -> None:
    weight = random_weight(bits, 64, 96, minima=bits == 4)
    x = torch.randint(-127 * 257, 127 * 257 + 1, (3, 96)).float()
    x[:, ::GROUP] = 127 * 257  # so that the scale is 1
    y = QuantisedRows(weight, None).into(torch.empty(3, 64), x)
    expected = x.double() @ weight.dequantised().double().T
    assert (y - expected).abs().max() < 1e-6 * (x.abs() @ weight.dequantised().abs().T).max()


@needs_kernel
def test_minima_of_minus_eight_scales_need_not_be_read() -> None:
    weight = random_weight(4, 128, 64, minima=True)
    q4_0 = QuantisedWeight(4, weight.values, weight.scales, weight.scales * -8)
    x = random(2, 64, seed=1)
    kernel = QuantisedRows(q4_0, None)
    assert kernel.nbytes < QuantisedRows(weight, None).nbytes
    y = kernel.into(torch.empty(2, 128), x)
    torch.testing.assert_close(y, x @ q4_0.dequantised().T, atol=1e-3, rtol=1e-3)


@needs_kernel
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_seen_in_every_result(value: float) -> None:
    x = random(2, 64)
    x[0, 40] = value
    y = QuantisedRows(random_weight(4, 64, 64, minima=True), None).into(torch.empty(2, 64), x)
    assert not y[0].isfinite().any()
    assert y[1].isfinite().all()


@needs_kernel
def test_zeros_and_what_is_next_to_them() -> None:
    weight = random_weight(8, 64, 64, minima=False)
    x = torch.zeros(2, 64)
    x[1, 3], x[1, 40] = 1e-35, 1e-20
    y = QuantisedRows(weight, None).into(torch.empty(2, 64), x)
    assert torch.equal(y[0], torch.zeros(64))
    torch.testing.assert_close(y[1], x[1] @ weight.dequantised().T, atol=0, rtol=1e-3)


@needs_kernel
def test_a_linear_takes_the_form_that_is_faster() -> None:
    whole, few = random(64, 64).bfloat16(), random_weight(4, 64, 64, minima=True)
    x = random(MAX_QUANTISED_ROWS + 1, 64, seed=1).bfloat16()
    with torch.inference_mode():
        both, only = Linear(whole, None, few), Linear(None, None, few)
        assert torch.equal(both(x), Linear(whole)(x))
        assert torch.equal(both(x[:-1]), only(x)[:-1])
        assert torch.equal(both.in_float32(x[:-1]).bfloat16(), only(x)[:-1])


@needs_kernel
@pytest.mark.parametrize("kind", [Quant.Q4_1, Quant.Q8_0])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_file_is_multiplied_as_it_is(architecture: str, kind: int, tmp_path: Path) -> None:
    """Heads are put in pairs, q, k and v on top of each other, all in few bits."""
    write_tiny_checkpoint(tmp_path, architecture)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", tmp_path, kind))
    source = GgufSource(checkpoint.path, checkpoint.shape, torch.float32)
    name = "model.layers.0.self_attn.q_proj.weight"
    stored = source.read_quantised(name)
    assert stored is not None
    torch.testing.assert_close(stored.dequantised(), source.read(name)[0])
    models = [
        load_model(
            checkpoint,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            quantization="auto",
            keep_dequantised=keep,
        )
        for keep in (True, False)
    ]
    x = random(2, checkpoint.shape.hidden_size).bfloat16()
    for layer, lone in zip(models[0].layers, models[1].layers, strict=True):
        assert layer.qkv.quantised is not None
        assert torch.equal(layer.qkv(x), lone.qkv(x))
        many = x.repeat(40, 1)
        torch.testing.assert_close(layer.qkv(many), lone.qkv(many), atol=0.05, rtol=0.05)
    assert models[1].weight_bytes < models[0].weight_bytes
