"""GGUF headers: sound ones, every kind of damage, and a fuzzer."""

import contextlib
import mmap
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.checkpoint import open_checkpoint
from twostroke.errors import ModelError, UnsupportedModelError
from twostroke.gguf_header import read_gguf, shape_of
from twostroke.shape import RopeScaling

# A header writer of our own: the gguf package refuses to write the files tested here.

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def typed(value: Any) -> bytes:
    """A metadata value with its type in front; bytes are taken as they are."""
    match value:
        case bytes():
            return value
        case bool():
            return struct.pack("<I?", BOOL, value)
        case int():
            return struct.pack("<II", U32, value)
        case float():
            return struct.pack("<If", F32, value)
        case str():
            return struct.pack("<I", STRING) + text(value)
        case [str(), *_]:
            return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(text, value))
        case list():
            packed = struct.pack(f"<{len(value)}I", *value)
            return struct.pack("<IIQ", ARRAY, U32, len(value)) + packed
    raise TypeError(value)


def tensor(name: str, dims: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    return (
        text(name)
        + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        + struct.pack("<IQ", kind, offset)
    )


def gguf(
    metadata: dict[str, Any] | None = None,
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    metadata = METADATA if metadata is None else metadata
    num_tensors, num_entries = counts or (len(tensors), len(metadata))
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries)
    head += b"".join(text(key) + typed(value) for key, value in metadata.items())
    head += b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


def entries(count: int, content: bytes) -> bytes:
    """A file of metadata only, `count` entries of it, written by hand."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, count) + content


METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500.0,
    "llama.vocab_size": 8,
    "tokenizer.ggml.tokens": ["a", "é", "", "<|x|>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.eos_token_id": 3,
    "tokenizer.chat_template": "{{ messages }}",
}

DATA = bytes(range(256))
EMBEDDING = tensor("token_embd.weight", [2, 4])
SOUND = gguf(tensors=[EMBEDDING, tensor("b", [4], offset=32)], data=DATA)


def write(directory: Path, content: bytes) -> Path:
    path = directory / "m.gguf"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_sound_file(tmp_path: Path, version: int) -> None:
    content = SOUND[:4] + struct.pack("<I", version) + SOUND[8:]
    file = read_gguf(write(tmp_path, content))
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "é", "", "<|x|>"]
    assert file.metadata["tokenizer.ggml.token_type"].tolist() == [1, 1, 1, 3]
    assert file.tensors["token_embd.weight"].shape == (4, 2)
    assert file.bytes_of(file.tensors["b"]).tobytes() == DATA[32:48]
    shape = shape_of(file)
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (2, 4, 2, 16)
    assert shape.rope_theta == 500
    assert shape.eos_token_ids == (3,)
    assert shape.tie_word_embeddings


def test_a_tensor_that_was_let_go_comes_back_when_it_is_read(tmp_path: Path) -> None:
    count = 3 * mmap.PAGESIZE // 4
    content = np.arange(count, dtype="<f4").tobytes()
    entry = tensor("a", [count])
    path = write(tmp_path, gguf(tensors=[entry], data=content))
    file = read_gguf(path)
    info = file.tensors["a"]
    file.let_go(info)
    assert file.bytes_of(info).tobytes() == content


def test_open_checkpoint(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, SOUND))
    assert (checkpoint.format, checkpoint.served_name) == ("gguf", "m")
    assert checkpoint.chat_template == "{{ messages }}"
    assert open_checkpoint(tmp_path).path == checkpoint.path
    assert open_checkpoint(checkpoint.path, load_format="dummy").format == "dummy"


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    last_tensor_ends = len(SOUND) - len(DATA) + 48
    for length in range(0, last_tensor_ends, 7):
        with pytest.raises(ModelError):
            read_gguf(write(tmp_path, SOUND[:length]))
    assert read_gguf(write(tmp_path, SOUND[:last_tensor_ends])).tensors


HUGE = (1 << 63) - 1


def strings(count: int) -> bytes:
    """The start of an array of strings."""
    return struct.pack("<IIQ", ARRAY, STRING, count)


DAMAGED = {
    "it starts with": b"GGML" + SOUND[4:],
    "version 1": gguf(version=1),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "metadata of 9,223": gguf(counts=(0, HUGE)),
    "list of 9,223": gguf(counts=(HUGE, len(METADATA))),
    "metadata key is 4,294": entries(1, struct.pack("<QQ", 1 << 32, 0)),
    "key is not UTF-8": entries(1, text(b"\xff") + typed(1)),
    "needs 9,223": gguf({"a": struct.pack("<IQ", STRING, HUGE)}, data=DATA),
    "is not UTF-8": gguf({"a": struct.pack("<I", STRING) + text(b"\xc3")}),
    "string of metadata 'a' is not": entries(1, text("a") + strings(1) + text(b"\xc3")),
    "string of metadata 'a' passes": entries(1, text("a") + strings(1) + struct.pack("<Q", HUGE)),
    "metadata 'a' passes": entries(1, text("a") + strings(2) + text("x" * 10)),
    "metadata 'a' needs": gguf({"a": struct.pack("<IIQ", ARRAY, U64, HUGE)}, data=DATA),
    "array of type 9": gguf({"a": struct.pack("<IIQ", ARRAY, ARRAY, 1)}, data=DATA),
    "unknown type 99": gguf({"a": struct.pack("<I", 99)}, data=DATA),
    "alignment is 0": gguf({"general.alignment": 0}),
    "alignment is 'x'": gguf({"general.alignment": "x"}),
    "has 0 dimensions": gguf(tensors=[tensor("t", [])], data=DATA),
    "has 9 dimensions": gguf(tensors=[tensor("t", [1] * 9)], data=DATA),
    "has dimensions [0, 4]": gguf(tensors=[tensor("t", [0, 4])], data=DATA),
    "multiples of 32": gguf(tensors=[tensor("t", [33, 4], 2)], data=DATA),
    "ggml type IQ2_XXS": gguf(tensors=[tensor("t", [256], 16)], data=DATA),
    "ends at byte": gguf(tensors=[tensor("t", [1 << 40, 1 << 40])], data=DATA),
    "'t' appears twice": gguf(tensors=[tensor("t", [4]), tensor("t", [4], 0, 32)], data=DATA),
    "not aligned": gguf(tensors=[tensor("t", [4], 0, 8)], data=DATA),
    "'t' and 'u' overlap": gguf(tensors=[tensor("t", [16]), tensor("u", [4], 0, 32)], data=DATA),
    "'a' appears twice": entries(2, (text("a") + typed(1)) * 2),
}


@pytest.mark.parametrize("problem", DAMAGED)
def test_damage_is_named(tmp_path: Path, problem: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_gguf(write(tmp_path, DAMAGED[problem]))
    assert problem in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is empty"):
        read_gguf(write(tmp_path, b""))
    with pytest.raises(ModelError, match="No such file"):
        read_gguf(tmp_path / "none.gguf")
    with pytest.raises(ModelError, match="directory"):
        read_gguf(tmp_path)


# ---------------------------------------------------------------- metadata to shape


def shape_with(directory: Path, **changes: Any) -> Any:
    """The shape of METADATA with changes; `__` in a name stands for a dot, None removes."""
    changed = METADATA | {name.replace("__", "."): value for name, value in changes.items()}
    kept = {key: value for key, value in changed.items() if value is not None}
    return shape_of(read_gguf(write(directory, gguf(kept, [EMBEDDING], DATA))))


def test_vocabulary_size_comes_from_the_embedding_when_not_given(tmp_path: Path) -> None:
    assert shape_with(tmp_path, llama__vocab_size=None).vocab_size == 4


def test_equal_head_counts_per_layer_count_as_one(tmp_path: Path) -> None:
    shape = shape_with(tmp_path, llama__attention__head_count_kv=[2, 2])
    assert shape.num_kv_heads == 2
    with pytest.raises(ModelError, match=r"head_count_kv has 2 values"):
        shape_with(tmp_path, llama__attention__head_count_kv=[2, 1])


def test_end_of_turn_ends_too(tmp_path: Path) -> None:
    assert shape_with(tmp_path, tokenizer__ggml__eot_token_id=2).eos_token_ids == (3, 2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"llama__block_count": None}, "llama.block_count is missing"),
        ({"llama__block_count": 1 << 31}, "llama.block_count is 2147483648"),
        ({"llama__embedding_length": "64"}, "llama.embedding_length is '64'"),
        ({"llama__attention__head_count": 0}, "llama.attention.head_count is 0"),
        ({"llama__rope__freq_base": float("nan")}, "llama.rope.freq_base is nan"),
        ({"llama__context_length": ["a", "b"]}, "llama.context_length has 2 values"),
        ({"general__architecture": None}, "general.architecture None"),
        ({"general__architecture": ["llama"]}, "general.architecture has 1 values"),
        ({"tokenizer__ggml__eos_token_id": 8}, "tokenizer.ggml.eos_token_id"),
        ({"llama__rope__scaling__type": "linear"}, "rope.scaling.factor is missing"),
    ],
)
def test_bad_metadata_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        shape_with(tmp_path, **changes)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general__architecture": "gemma3"}, "gemma3"),
        ({"llama__expert_count": 8}, "llama.expert_count 8"),
        ({"llama__attention__sliding_window": 4096}, "sliding_window 4096"),
        ({"llama__rope__dimension_count": 8}, "rope.dimension_count 8"),
        ({"llama__attention__value_length": 8}, "value_length 8"),
        ({"llama__rope__scaling__type": "longrope"}, "longrope"),
        ({"split__count": 3}, "one of 3 files"),
    ],
)
def test_unsupported_metadata_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        shape_with(tmp_path, **changes)


def test_yarn(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 512, "attn_factor": 2.0}
    changes = {f"llama__rope__scaling__{name}": value for name, value in scaling.items()}
    shape = shape_with(tmp_path, **changes)
    assert shape.max_position_embeddings == 2048
    assert shape.rope_scaling.kind == "yarn"
    assert shape.rope_scaling.parameters["attention_factor"] == pytest.approx(2 * 1.1386294)


def test_linear(tmp_path: Path) -> None:
    shape = shape_with(
        tmp_path, llama__rope__scaling__type="linear", llama__rope__scaling__factor=2.0
    )
    assert shape.rope_scaling == RopeScaling("linear", {"factor": 2.0})


def freqs_file(directory: Path, factors: list[float], dims: list[int] | None = None) -> Path:
    data = np.array(factors, "<f4").tobytes().ljust(256, b"\0")
    return write(directory, gguf(None, [tensor("rope_freqs.weight", dims or [8])], data))


def test_llama3_factors_are_read_from_their_tensor(tmp_path: Path) -> None:
    factors = [1.0, 1.0, 1.0, 1.5, 3.0, 8.0, 8.0, 8.0]
    shape = shape_of(read_gguf(freqs_file(tmp_path, factors)))
    assert shape.rope_scaling == RopeScaling("factors", factors=tuple(factors))


def test_bad_factors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"rope_freqs\.weight is F32 \[4\].*\[8\]"):
        shape_of(read_gguf(freqs_file(tmp_path, [1.0] * 4, [4])))
    with pytest.raises(ModelError, match="not positive"):
        shape_of(read_gguf(freqs_file(tmp_path, [1.0] * 7 + [0.0])))


# ---------------------------------------------------------------- fuzz

PATCHES = st.lists(
    st.tuples(
        st.integers(0, len(SOUND) - len(DATA)),
        st.binary(min_size=1, max_size=9) | st.sampled_from([b"\xff" * 8, b"\0" * 8]),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


@given(PATCHES)
@settings(max_examples=150)
def test_fuzzed_headers_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, patches: list[tuple[int, bytes, bool]]
) -> None:
    content = bytearray(SOUND)
    for place, patch, insert in patches:
        content[place : place if insert else place + len(patch)] = patch
    path = write(tmp_path_factory.getbasetemp(), bytes(content))
    with contextlib.suppress(ModelError):
        file = read_gguf(path)
        assert all(file.bytes_of(info).nbytes == info.num_bytes for info in file.tensors.values())
        shape_of(file)


@given(st.binary(max_size=300))
@settings(max_examples=100)
def test_noise_behind_the_magic_is_refused(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes
) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 2)
    with pytest.raises(ModelError):
        read_gguf(write(tmp_path_factory.getbasetemp(), head + noise))
