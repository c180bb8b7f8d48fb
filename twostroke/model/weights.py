"""Where weights come from: safetensors files, or a seeded generator for dummy weights.

A source gives tensors under the names of a Hugging Face checkpoint (see `shape.tensor_shapes`).
`check_tensors` compares what a source holds with what the shape needs before anything is read.
Nothing here unpickles.
"""

import zlib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from twostroke.errors import ModelError, UnsupportedModelError
from twostroke.shape import ModelShape, tensor_shapes

_FLOATS = {"F64", "F32", "F16", "BF16"}


# Which rows, or which rows and columns, of a tensor are wanted. Slices have a start and a stop.
Part = tuple[slice, ...]
ALL: Part = ()


class WeightSource(Protocol):
    """Weights by Hugging Face name. `read` may be called from several threads."""

    total_bytes: int  # of all tensors, as stored

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor and its shape."""
        ...

    def read(self, name: str, part: Part = ALL) -> tuple[Tensor, int]:
        """Part of the tensor on the CPU (it may share read-only memory), and its bytes as stored.

        A part of the rows of a matrix is of whole heads, where it has heads.
        """
        ...

    def is_mapped(self, name: str) -> bool:
        """Whether what `read` gives may share the memory of the file."""
        ...

    def close(self) -> None:
        """Unmap the files. Tensors that were read stay valid."""
        ...


def check_tensors(source: WeightSource, shape: ModelShape, where: Path) -> None:
    """Raise ModelError naming the tensors that are missing, left over or of a wrong shape."""
    needed, found = tensor_shapes(shape), source.shapes()
    missing = [name for name in needed if name not in found]
    if missing:
        raise ModelError(
            f"{where}: {_some(missing)} missing", hint="the download is incomplete or damaged"
        )
    extra = [name for name in found if name not in needed and not _is_harmless(name, shape)]
    if extra:
        raise ModelError(
            f"{where}: {_some(extra)} left over",
            hint="the model's settings describe another model than the weights",
        )
    for name, dims in needed.items():
        if found[name] != dims:
            raise ModelError(
                f"{where}: tensor {name} has shape {list(found[name])}; "
                f"the model's settings need {list(dims)}"
            )


def _is_harmless(name: str, shape: ModelShape) -> bool:
    """Tensors that carry nothing: a copy of tied embeddings, frequencies that follow from theta."""
    tied = shape.tie_word_embeddings and name == "lm_head.weight"
    return tied or name.endswith(".rotary_emb.inv_freq")


def _some(names: list[str]) -> str:
    if len(names) == 1:
        return f"tensor {names[0]} is"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensors {', '.join(names[:3])}{more} are"


class SafetensorsSource:
    """The tensors of one or several safetensors files, memory-mapped."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._stack = ExitStack()
        self._handles: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.total_bytes = 0
        try:
            for file in files:
                self._open(file)
        except BaseException:
            self.close()
            raise

    def _open(self, file: Path) -> None:
        try:
            handle = self._stack.enter_context(safe_open(str(file), framework="pt", device="cpu"))
            names = list(handle.keys())
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{file} is not a sound safetensors file: {error}", hint="download it again"
            ) from None
        for name in names:
            if name in self._handles:
                raise ModelError(f"{file}: tensor {name} is in another shard too")
            part = handle.get_slice(name)
            if part.get_dtype() not in _FLOATS:
                raise UnsupportedModelError(
                    f"{file}: tensor {name} has type {part.get_dtype()}",
                    hint=f"supported: {', '.join(sorted(_FLOATS))}",
                )
            self._handles[name] = handle
            self._shapes[name] = tuple(part.get_shape())
        self.total_bytes += file.stat().st_size

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, part: Part = ALL) -> tuple[Tensor, int]:
        # A view of the mapped file: only the pages of the part will be read.
        tensor: Tensor = self._handles[name].get_tensor(name)[part]
        return tensor, tensor.nbytes

    def is_mapped(self, name: str) -> bool:
        return True

    def close(self) -> None:
        self._stack.close()
        self._handles.clear()


class DummySource:
    """Seeded random weights: normal with deviation 0.02 as transformers initialises them, norms
    1, biases 0."""

    def __init__(self, shape: ModelShape, seed: int) -> None:
        self._shapes = tensor_shapes(shape)
        self._dtype = getattr(torch, shape.dtype)
        self._seed = seed
        self.total_bytes = sum(
            torch.Size(dims).numel() * self._dtype.itemsize for dims in self._shapes.values()
        )

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, part: Part = ALL) -> tuple[Tensor, int]:
        tensor = torch.empty(self._shapes[name], dtype=self._dtype)
        if name.endswith("norm.weight"):
            tensor.fill_(1)
        elif name.endswith(".bias"):
            tensor.zero_()
        else:
            # A generator for each tensor: the order in which threads read must not matter.
            seed = zlib.crc32(f"{self._seed} {name}".encode())
            tensor.normal_(0, 0.02, generator=torch.Generator().manual_seed(seed))
        tensor = tensor[part]
        return tensor, tensor.nbytes

    def is_mapped(self, name: str) -> bool:
        return False

    def close(self) -> None:
        pass
