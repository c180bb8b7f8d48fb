"""The kernel for few rows against oneDNN, to the last bit."""

import pytest
import torch

from twostroke.model import few_rows as module
from twostroke.model.few_rows import MAX_ROWS, FewRows, few_rows
from twostroke.model.layers import Linear

pytestmark = pytest.mark.skipif(
    not module._works(), reason="the processor has no AVX512-BF16, or torch no GNU OpenMP"
)


def random(*dims: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(dims, generator=torch.Generator().manual_seed(seed)).bfloat16()


def packed(weight: torch.Tensor) -> torch.Tensor:
    tensor: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return tensor


def onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("out", "width"), [(64, 32), (960, 576), (576, 1536), (3072, 576), (128, 4096)]
)
def test_every_number_of_rows_gives_the_bits_of_onednn(out: int, width: int, bias: bool) -> None:
    with torch.inference_mode():
        weight, b = packed(random(out, width)), random(out, seed=1) if bias else None
        x = random(MAX_ROWS + 6, width, seed=2)
        expected = onednn(x, weight, b)
        ours = few_rows(weight, b)
        assert ours is not None
        for rows in (0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 40, MAX_ROWS):
            assert torch.equal(ours(x[:rows]), expected[:rows]), f"{rows} rows"


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, MAX_ROWS, 2 * MAX_ROWS + 3])
def test_in_float32_nothing_is_rounded(rows: int, bias: bool) -> None:
    with torch.inference_mode():
        weight, b = random(640, 576), random(640, seed=1) if bias else None
        x = random(rows, 576, seed=2)
        linear = Linear(weight, b)
        wide = linear.in_float32(x)
        assert wide.dtype == torch.float32
        exact = x.double() @ weight.double().T + (b.double() if b is not None else 0)
        torch.testing.assert_close(wide.double(), exact, atol=1e-4, rtol=1e-5)
        assert torch.equal(wide.bfloat16()[:MAX_ROWS], linear(x[:MAX_ROWS]))


def test_rows_may_lie_apart() -> None:
    with torch.inference_mode():
        weight, x = packed(random(64, 64)), random(5, 192, seed=1)[:, 64:128]
        ours = few_rows(weight, None)
        assert ours is not None
        assert torch.equal(ours(x), onednn(x.contiguous(), weight, None))


def test_linear_takes_the_kernel_up_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    call = FewRows.__call__

    def record(self: FewRows, x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return call(self, x)

    monkeypatch.setattr(FewRows, "__call__", record)
    with torch.inference_mode():
        linear = Linear(random(64, 64))
        for rows in (1, MAX_ROWS, MAX_ROWS + 1):
            linear(random(rows, 64))
        linear(random(64, 3).T)
    assert seen == [1, MAX_ROWS]


@pytest.mark.parametrize(
    ("out", "width", "dtype"),
    [(63, 64, torch.bfloat16), (64, 48, torch.bfloat16), (64, 64, torch.float32)],
)
def test_other_weights_are_left_to_onednn(out: int, width: int, dtype: torch.dtype) -> None:
    with torch.inference_mode():
        assert few_rows(packed(random(out, width).to(dtype)), None) is None


def test_nothing_is_used_where_it_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("the processor has no AVX512-BF16")

    monkeypatch.setattr(module, "_compiled", refuse)
    module._works.cache_clear()
    try:
        with torch.inference_mode():
            assert few_rows(packed(random(64, 64)), None) is None
    finally:
        module._works.cache_clear()


def test_an_unknown_layout_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if oneDNN laid weights out in another way: the trial sees wrong results."""
    scrambled = module._onednn
    monkeypatch.setattr(module, "_onednn", lambda x, weight: scrambled(x, weight).flip(-1))
    module._chunk_inputs.cache_clear()
    try:
        with torch.inference_mode():
            assert few_rows(packed(random(64, 64)), None) is None
    finally:
        module._chunk_inputs.cache_clear()
