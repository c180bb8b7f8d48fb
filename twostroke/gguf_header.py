"""Reads the header of a GGUF file (version 2 or 3): metadata and where each tensor lies.

Format: github.com/ggml-org/ggml, docs/gguf.md. The file is memory-mapped and never trusted: each
count and length is checked against the bytes that are left before anything is allocated, so a
damaged or hostile file ends in a ModelError that says what is wrong with it. No torch, and no
tensor data is touched, except RoPE factors, which belong to the shape.
"""

import dataclasses
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from twostroke.errors import ModelError, UnsupportedModelError
from twostroke.shape import ModelShape, RopeScaling, from_hf_config

MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 1024
MAX_ALIGNMENT = 1 << 20


class GgmlType(NamedTuple):
    """How a tensor is stored: `block_bytes` bytes hold `block_size` values of a row."""

    name: str
    block_size: int
    block_bytes: int


GGML_TYPES = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    30: GgmlType("BF16", 1, 2),
}

# Known, for a better message, but not read.
_OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16",
    26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

# Value types of metadata: number to struct format. 8 is a string, 9 an array.
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9

# The fewest bytes that a metadata entry and a tensor's entry can take.
_LEAST_ENTRY_BYTES = 8 + 4 + 1
_LEAST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


class TensorInfo(NamedTuple):
    """Where a tensor lies. `shape` is in torch's order: [out, in], rows are contiguous."""

    name: str
    shape: tuple[int, ...]
    kind: GgmlType
    offset: int  # from the start of the file
    num_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """A mapped GGUF file whose header was read and checked.

    Metadata values are int, float, bool, str, a list of str, or a NumPy array of numbers.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: mmap.mmap

    def bytes_of(self, info: TensorInfo) -> NDArray[np.uint8]:
        """The stored bytes of a tensor, without a copy; not to be written to."""
        return np.frombuffer(self.data, np.uint8, info.num_bytes, info.offset)

    def let_go(self, info: TensorInfo) -> None:
        """The tensor's pages leave this process's memory; when it is read again, they come back."""
        start = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (info.offset + info.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start and hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED, start, end - start)


class _Cursor:
    """Reads little-endian values and refuses to pass the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 0

    def error(self, problem: str) -> ModelError:
        return ModelError(
            f"{self.path} is not a sound GGUF file: {problem}", hint="download it again"
        )

    def need(self, count: int, each_bytes: int, what: str) -> None:
        """Refuse `count` items of at least `each_bytes` that cannot fit into what is left."""
        left = self.size - self.position
        if count * each_bytes > left:
            raise self.error(
                f"{what} needs {count * each_bytes:,} bytes at offset {self.position:,}, "
                f"{left:,} are left"
            )

    def scalar(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        self.need(1, size, what)
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += size
        return value

    def string(self, what: str, most: int | None = None) -> str:
        length = self.scalar("Q", what)
        if most is not None and length > most:
            raise self.error(f"{what} is {length:,} bytes long; at most {most:,}")
        self.need(length, 1, what)
        raw = self.data[self.position : self.position + length]
        self.position += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8") from None

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings in one tight loop: vocabularies have 50,000 to 250,000."""
        self.need(count, 8, what)
        data, position, end = self.data, self.position, self.size
        length_at = struct.Struct("<Q").unpack_from
        values = []
        try:
            for _ in range(count):
                (length,) = length_at(data, position)
                start = position + 8
                position = start + length
                if position > end:
                    raise self.error(f"a string of {what} passes the end of the file")
                values.append(data[start:position].decode())
        except struct.error:
            raise self.error(f"{what} passes the end of the file") from None
        except UnicodeDecodeError:
            raise self.error(f"a string of {what} is not UTF-8") from None
        self.position = position
        return values

    def array(self, what: str) -> list[str] | NDArray[Any]:
        kind = self.scalar("I", what)
        count = self.scalar("Q", what)
        if kind == _STRING:
            return self.strings(count, what)
        if kind not in _SCALARS:
            raise self.error(f"{what} is an array of type {kind}; strings and numbers are allowed")
        dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
        self.need(count, dtype.itemsize, what)
        values = np.frombuffer(self.data, dtype, count, self.position).copy()
        self.position += values.nbytes
        return values

    def value(self, what: str) -> Any:
        kind = self.scalar("I", what)
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what)
        if kind not in _SCALARS:
            raise self.error(f"{what} has the unknown type {kind}")
        return self.scalar(_SCALARS[kind], what)


def read_gguf(path: Path) -> GgufFile:
    """Map a GGUF file and read its header.

    Raises ModelError when the file cannot be read or is damaged, UnsupportedModelError for a
    version, byte order or tensor type that this engine does not read.
    """
    try:
        with path.open("rb") as file:
            # Private rather than read-only: torch takes no read-only memory. Nobody writes to it.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise ModelError(f"{path} is empty", hint="download it again") from None
    cursor = _Cursor(path, data)
    if data[:4] != b"GGUF":
        raise cursor.error(f"it starts with {data[:4]!r}, not b'GGUF'")
    cursor.position = 4
    version = cursor.scalar("I", "the version")
    if version not in (2, 3):
        order = " (big-endian)" if int.from_bytes(version.to_bytes(4, "little")) in (2, 3) else ""
        raise UnsupportedModelError(
            f"{path} has GGUF version {version}{order}; versions 2 and 3, little-endian, are read"
        )
    num_tensors = cursor.scalar("Q", "the tensor count")
    num_entries = cursor.scalar("Q", "the metadata count")
    cursor.need(num_entries, _LEAST_ENTRY_BYTES, f"metadata of {num_entries:,} entries")
    cursor.need(num_tensors, _LEAST_TENSOR_BYTES, f"a list of {num_tensors:,} tensors")
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.string("a metadata key", MAX_NAME_BYTES)
        if key in metadata:
            raise cursor.error(f"metadata key {key!r} appears twice")
        metadata[key] = cursor.value(f"metadata {key!r}")
    return GgufFile(path, metadata, _read_tensors(cursor, num_tensors, metadata), data)


def _read_tensors(
    cursor: _Cursor, num_tensors: int, metadata: dict[str, Any]
) -> dict[str, TensorInfo]:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT:
        raise cursor.error(f"general.alignment is {alignment!r}; from 1 to {MAX_ALIGNMENT:,}")
    cursor.need(num_tensors, _LEAST_TENSOR_BYTES, f"a list of {num_tensors:,} tensors")
    relative: dict[str, TensorInfo] = {}
    for _ in range(num_tensors):
        info = _read_tensor(cursor)
        if info.name in relative:
            raise cursor.error(f"tensor {info.name!r} appears twice")
        if info.offset % alignment:
            raise cursor.error(f"tensor {info.name!r} is not aligned to {alignment} bytes")
        relative[info.name] = info
    # │ header │ padding │ tensor │ padding │ tensor │ ...   offsets count from `start`
    start = -(-cursor.position // alignment) * alignment
    end_of_last, last = start, ""
    tensors = {name: info._replace(offset=start + info.offset) for name, info in relative.items()}
    for info in sorted(tensors.values(), key=lambda info: info.offset):
        if info.offset < end_of_last:
            raise cursor.error(f"tensors {last!r} and {info.name!r} overlap")
        end_of_last, last = info.offset + info.num_bytes, info.name
        if end_of_last > cursor.size:
            raise cursor.error(
                f"tensor {info.name!r} ends at byte {end_of_last:,} of {cursor.size:,}"
            )
    return tensors


def _read_tensor(cursor: _Cursor) -> TensorInfo:
    """One entry of the tensor list; its offset still counts from the start of the data."""
    name = cursor.string("a tensor name", MAX_NAME_BYTES)
    what = f"tensor {name!r}"
    num_dims = cursor.scalar("I", what)
    if not 1 <= num_dims <= MAX_DIMENSIONS:
        raise cursor.error(f"{what} has {num_dims} dimensions; from 1 to {MAX_DIMENSIONS}")
    dims = [cursor.scalar("Q", what) for _ in range(num_dims)]
    type_id = cursor.scalar("I", what)
    offset = cursor.scalar("Q", what)
    kind = GGML_TYPES.get(type_id)
    if kind is None:
        supported = ", ".join(known.name for known in GGML_TYPES.values())
        raise UnsupportedModelError(
            f"{cursor.path}: {what} has ggml type {_OTHER_TYPES.get(type_id, type_id)}; "
            f"supported: {supported}",
            hint="use a file with another quantisation, such as Q4_K_M or Q8_0",
        )
    if min(dims) < 1 or dims[0] % kind.block_size:
        raise cursor.error(
            f"{what} has dimensions {dims}; rows of {kind.name} are multiples of {kind.block_size}"
        )
    num_bytes = math.prod(dims) // kind.block_size * kind.block_bytes
    return TensorInfo(name, tuple(reversed(dims)), kind, offset, num_bytes)


# ---------------------------------------------------------------- metadata -> ModelShape

_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}

# Keys of config.json to GGUF's, without the architecture in front.
_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "vocab_size": "vocab_size",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "sliding_window": "attention.sliding_window",
}

_ROPE_KEYS = {
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}


def shape_of(file: GgufFile) -> ModelShape:
    """Translate a GGUF file's metadata.

    Raises ModelError naming the metadata key that is missing or not a sane value, and
    UnsupportedModelError for an architecture or feature that this engine does not run.
    """
    architecture = _single(file, "general.architecture")
    if architecture not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: general.architecture {architecture!r} is not supported",
            hint=f"supported: {', '.join(_ARCHITECTURES)}",
        )
    names = {key: f"{architecture}.{name}" for key, name in (_KEYS | _ROPE_KEYS).items()}
    names |= {key: f"tokenizer.ggml.{key}" for key in ("bos_token_id", "eos_token_id")}
    config = {key: _single(file, names[key]) for key in _KEYS}
    _refuse_unsupported(file, architecture, config)
    embedding = file.tensors.get("token_embd.weight")
    if config["vocab_size"] is None and embedding is not None:
        config["vocab_size"] = embedding.shape[0]
    special = ("eos", "eot", "eom")  # all three end an answer
    ends = [_single(file, f"tokenizer.ggml.{name}_token_id") for name in special]
    config |= {
        "model_type": _ARCHITECTURES[architecture],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "norm_topk_prob": True,
        "dtype": _dtype(file),
        "rope_parameters": _rope_parameters(file, names),
        "bos_token_id": _single(file, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": [end for end in ends if end is not None],
    }
    shape = from_hf_config(config, source=str(file.path), shown=names)
    if freqs := file.tensors.get("rope_freqs.weight"):
        scaling = _rope_factors(file, freqs, shape.head_dim)
        shape = dataclasses.replace(shape, rope_scaling=scaling)
    return shape


def _single(file: GgufFile, key: str) -> Any:
    """A value that is one number or text; an array of equal ones counts as one, because some
    files give head counts per layer. None when it is absent."""
    value = file.metadata.get(key)
    if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
        return value[0].item()
    if isinstance(value, np.ndarray | list):
        raise ModelError(f"{file.path}: {key} has {len(value)} values; one is needed")
    return value


def _refuse_unsupported(file: GgufFile, architecture: str, config: dict[str, Any]) -> None:
    def refuse(name: str, hint: str) -> UnsupportedModelError:
        key = f"{architecture}.{name}"
        return UnsupportedModelError(
            f"{file.path}: {key} {file.metadata.get(key)!r} is not supported", hint=hint
        )

    if architecture == "llama" and config["num_experts"]:
        raise refuse("expert_count", "Mixtral is not among the supported models")
    if config.pop("sliding_window") is not None:
        raise refuse(
            "attention.sliding_window",
            "only models that attend to their whole context are supported",
        )
    if (_single(file, "split.count") or 1) != 1:
        raise UnsupportedModelError(
            f"{file.path} is one of {file.metadata['split.count']} files of a split model",
            hint="merge them with llama-gguf-split --merge",
        )
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if config["head_dim"] is None and isinstance(hidden, int) and isinstance(heads, int) and heads:
        # Here, unlike in config.json, the default always follows from the other two.
        config["head_dim"] = hidden // heads
    for name in ("attention.value_length", "rope.dimension_count"):
        if _single(file, f"{architecture}.{name}") not in (None, config["head_dim"]):
            raise refuse(name, f"it must equal the head size, {config['head_dim']}")


def _rope_parameters(file: GgufFile, names: dict[str, str]) -> dict[str, Any]:
    rope = {key: _single(file, names[key]) for key in _ROPE_KEYS}
    if rope["rope_type"] in (None, "none"):
        return {}
    attention_factor = _single(file, f"{names['rope_type'].removesuffix('type')}attn_factor")
    if isinstance(attention_factor, float) and isinstance(rope["factor"], float):
        # llama.cpp multiplies YaRN's own factor by this one.
        rope["attention_factor"] = attention_factor * (0.1 * math.log(max(rope["factor"], 1)) + 1)
    return rope


def _rope_factors(file: GgufFile, freqs: TensorInfo, head_dim: int) -> RopeScaling:
    """What convert_hf_to_gguf.py stores in place of the parameters of llama3 scaling."""
    if freqs.kind.name != "F32" or freqs.shape != (head_dim // 2,):
        raise ModelError(
            f"{file.path}: {freqs.name} is {freqs.kind.name} {list(freqs.shape)}; "
            f"heads of {head_dim} need F32 [{head_dim // 2}]"
        )
    factors = file.bytes_of(freqs).view("<f4")
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ModelError(f"{file.path}: {freqs.name} holds a factor that is not positive")
    return RopeScaling("factors", factors=tuple(factors.tolist()))


def _dtype(file: GgufFile) -> str:
    """The type nearest to what is stored: that of plain matrices, bfloat16 for quantised ones."""
    kinds = {info.kind.name for info in file.tensors.values() if len(info.shape) > 1}
    return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(
        frozenset(kinds), "bfloat16"
    )
