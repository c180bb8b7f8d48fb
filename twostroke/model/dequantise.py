"""ggml's block formats as float tensors, vectorised in torch.

Each format packs a row into blocks of 32 or 256 values with a scale (d), for some also a minimum
(m); the layouts are those of ggml-common.h, the arithmetic is float32 as in the gguf package, to
whose results these are tested equal, and several times faster. Where numba is there, the formats
and the type that are most used are compiled (see `dequantise_kernels`).
"""

import functools
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from twostroke.gguf_header import GgmlType

# Values converted at once: float32 intermediates stay in the cache.
_CHUNK_VALUES = 1 << 19


def dequantise(stored: Tensor, kind: GgmlType, dtype: torch.dtype) -> Tensor:
    """Stored bytes, uint8 [n], as values in `dtype`, flat."""
    plain = _PLAIN.get(kind.name)
    if plain is not None:
        return stored.view(plain).to(dtype)
    blocks = stored.view(-1, kind.block_bytes)
    values = torch.empty(len(blocks), kind.block_size, dtype=dtype)
    if dtype == torch.bfloat16 and kind.name in _COMPILED and (kernels := _kernels()) is not None:
        _COMPILED[kind.name](kernels, blocks, values)
        return values.flatten()
    step = _CHUNK_VALUES // kind.block_size
    for start in range(0, len(blocks), step):
        chunk = slice(start, start + step)
        values[chunk] = _BLOCKS[kind.name](blocks[chunk])
    return values.flatten()


def half(column: Tensor) -> Tensor:
    """Two bytes of each block as a float16 scale: [n, 2] -> float32 [n, 1]."""
    return column.contiguous().view(torch.float16).float()


def nibbles(packed: Tensor) -> Tensor:
    """[n, b] -> [n, 2 b] uint8: all low halves, then all high halves."""
    is_plain = packed.dim() == 2 and len(packed) > 0 and packed.stride(1) == 1
    if is_plain and (kernels := _kernels()) is not None:
        out = torch.empty(len(packed), 2 * packed.shape[1], dtype=torch.uint8)
        row_bytes = packed.stride(0)
        flat = packed.as_strided(((len(packed) - 1) * row_bytes + packed.shape[1],), (1,))
        kernels.nibbles(flat.numpy(), row_bytes, out.numpy())
        return out
    return torch.cat((packed & 15, packed >> 4), -1)


def _bits(packed: Tensor) -> Tensor:
    """[n, b] -> [n, 8 b] uint8: the bits of each byte, lowest first."""
    places = torch.arange(8, dtype=torch.uint8)
    return ((packed[..., None] >> places) & 1).flatten(-2)


def _q8_0(blocks: Tensor) -> Tensor:  # d, 32 x int8
    return blocks[:, 2:].view(torch.int8).float().mul_(half(blocks[:, :2]))


def _q4_0(blocks: Tensor) -> Tensor:  # d, 16 x 2 nibbles
    return nibbles(blocks[:, 2:]).float().sub_(8).mul_(half(blocks[:, :2]))


def _q4_1(blocks: Tensor) -> Tensor:  # d, m, 16 x 2 nibbles
    d, m = half(blocks[:, :2]), half(blocks[:, 2:4])
    return nibbles(blocks[:, 4:]).float().mul_(d).add_(m)


def _q5_0(blocks: Tensor) -> Tensor:  # d, 32 high bits, 16 x 2 nibbles
    q = nibbles(blocks[:, 6:]) | (_bits(blocks[:, 2:6]) << 4)
    return q.float().sub_(16).mul_(half(blocks[:, :2]))


def _q5_1(blocks: Tensor) -> Tensor:  # d, m, 32 high bits, 16 x 2 nibbles
    d, m = half(blocks[:, :2]), half(blocks[:, 2:4])
    q = nibbles(blocks[:, 8:]) | (_bits(blocks[:, 4:8]) << 4)
    return q.float().mul_(d).add_(m)


def scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """d and m of the 8 groups of a K block, [n, 8, 1] each.

    16 six-bit numbers in 12 bytes: four scales and four minima in the low bits of bytes 0-7, the
    low halves of the other eight in bytes 8-11, their top two bits in the top of bytes 0-7.
    """
    packed = blocks[:, 4:16]
    low, high, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((low & 63, (rest & 15) | ((low >> 2) & 48)), -1)
    minima = torch.cat((high & 63, (rest >> 4) | ((high >> 2) & 48)), -1)
    d = half(blocks[:, :2]) * scales.float()
    m = half(blocks[:, 2:4]) * minima.float()
    return d[..., None], m[..., None]


def _q4_k(blocks: Tensor) -> Tensor:  # d, m, 12 bytes of scales, 4 x 32 x 2 nibbles
    d, m = scales_and_minima(blocks)
    q = nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32)
    return q.float().mul_(d).sub_(m).flatten(1)


def _q5_k(blocks: Tensor) -> Tensor:  # as Q4_K, with 32 bytes of high bits before the nibbles
    d, m = scales_and_minima(blocks)
    q = nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    # Bit g of high byte i belongs to value i of group g.
    high = (blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    return (q | (high << 4)).float().mul_(d).sub_(m).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:  # 2 x 64 x 2 nibbles, 2 x 32 x 4 bit pairs, 16 x int8, d
    low = nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 8, 32)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = (pairs >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]) & 3
    q = (low | (high.view(-1, 8, 32) << 4)).float().sub_(32)
    scales = half(blocks[:, 208:]) * blocks[:, 192:208].view(torch.int8).float()
    return q.view(-1, 16, 16).mul_(scales[..., None]).flatten(1)


@functools.cache
def _kernels() -> ModuleType | None:
    """None where numba cannot be imported."""
    try:
        from twostroke.model import dequantise_kernels
    except ImportError:
        return None
    return dequantise_kernels


def _q4_compiled(kernels: ModuleType, blocks: Tensor, values: Tensor) -> None:
    kernels.q4(blocks.numpy(), blocks.shape[1] == 20, values.view(torch.uint16).numpy())


def _q8_compiled(kernels: ModuleType, blocks: Tensor, values: Tensor) -> None:
    kernels.q8(blocks.numpy(), values.view(torch.uint16).numpy())


_COMPILED = {"Q4_0": _q4_compiled, "Q4_1": _q4_compiled, "Q8_0": _q8_compiled}
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
