"""The hardware table: names people use find their row, others are refused with what there is."""

import pytest

from twostroke.errors import ConfigError
from twostroke.twin.hardware import GPUS, find_gpu

SHARES = (
    "memory_share",
    "gemm_share",
    "attention_share",
    "expert_memory_share",
    "expert_gemm_share",
    "reduce_share",
)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("H100", "H100"),
        ("h100_sxm", "H100"),
        ("NVIDIA H200", "H200"),
        ("rtx-4090", "RTX 4090"),
        ("RTXPRO6000", "RTX PRO 6000"),
        ("rtx_pro_6000_server", "RTX PRO 6000"),
        ("a100-80gb", "A100"),
    ],
)
def test_names(name: str, row: str) -> None:
    assert find_gpu(name) is GPUS[row]


def test_unknown_names_are_told_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError, match=r"did you mean H100\? known: A100, .*RTX 4090"):
        find_gpu("H1000")
    with pytest.raises(ConfigError, match="known: A100"):
        find_gpu("")


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_rows_are_sane(gpu: object) -> None:
    """Shares are shares; each row says where it comes from."""
    assert all(0 < getattr(gpu, share) <= 1 for share in SHARES)
    assert getattr(gpu, "source", "")
