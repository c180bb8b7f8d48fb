"""Weights from a GGUF file, dequantised, under the names and in the order of Hugging Face."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from twostroke.gguf_header import TensorInfo, read_gguf
from twostroke.model.dequantise import dequantise
from twostroke.model.few_rows_quantised import can_multiply
from twostroke.model.quantised import QuantisedWeight, from_ggml, is_kept
from twostroke.model.weights import ALL, Part
from twostroke.shape import ModelShape

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}

# The experts of a layer lie in one tensor [expert, out, in].
_EXPERTS = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}

_JOINED = re.compile("(?<=attn.)[qkv]_proj|(?<=mlp.)(gate|up)_proj")

# Belongs to the shape: read with the header.
_NOT_WEIGHTS = {"rope_freqs.weight"}


class _Weight(NamedTuple):
    """A weight within a stored tensor: all of it, or one expert's slice."""

    info: TensorInfo
    shape: tuple[int, ...]
    expert: int | None


class GgufSource:
    """The tensors of a GGUF file as float tensors (see `weights.WeightSource`)."""

    def __init__(self, path: Path, shape: ModelShape, dtype: torch.dtype) -> None:
        self._file = read_gguf(path)
        self._shape = shape
        self._dtype = dtype
        self._weights: dict[str, _Weight] = {}
        for info in self._file.tensors.values():
            if info.name not in _NOT_WEIGHTS:
                self._weights.update(_weights(info))
        self._shapes = {name: weight.shape for name, weight in self._weights.items()}
        self.total_bytes = sum(info.num_bytes for info in self._file.tensors.values())

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read_quantised(self, name: str) -> QuantisedWeight | None:
        """A matrix as it is stored, its rows as `read` has them; None when it is not in a format
        that is multiplied as it is."""
        info, shape, _ = self._weights[name]
        blocks = self._stored(name).view(-1, info.kind.block_bytes)
        weight = from_ggml(blocks, info.kind, shape[-1]) if len(shape) == 2 else None
        if weight is not None and self._is_in_pairs(name):
            weight = weight.rows(_out_of_pairs(torch.arange(shape[0]), self._shape.head_dim))
        return weight

    def is_in_few_bits(self) -> bool:
        """Whether all matrices that rows are multiplied with can be as they are stored, those that
        become one (see `registry`) together."""
        joined: dict[str, list[_Weight]] = {}
        for name, weight in self._weights.items():
            if len(weight.shape) == 2:
                joined.setdefault(_JOINED.sub("", name), []).append(weight)
        if "lm_head.weight" in joined:  # then rows of the embedding are only looked up
            del joined[f"{_TOP['token_embd']}.weight"]
        return all(
            can_multiply(sum(weight.shape[0] for weight in weights), weights[0].shape[1])
            and is_kept(weights[0].info.kind)
            and len({weight.info.kind for weight in weights}) == 1
            for weights in joined.values()
        )

    def _stored(self, name: str) -> Tensor:
        info, _, expert = self._weights[name]
        stored = torch.from_numpy(self._file.bytes_of(info))
        return stored if expert is None else stored.view(info.shape[0], -1)[expert]

    def _is_in_pairs(self, name: str) -> bool:
        """convert_hf_to_gguf.py stores the q and k rows of Llama and Mistral in pairs, those of
        Qwen as they are."""
        of_heads = ".q_proj." in name or ".k_proj." in name
        return self._shape.architecture == "llama" and of_heads

    def read(self, name: str, part: Part = ALL) -> tuple[Tensor, int]:
        info, shape, _ = self._weights[name]
        stored = self._stored(name)
        # Blocks lie within rows, the last dimension; those that the part touches are converted.
        kind = info.kind
        columns = part[-1] if len(part) == len(shape) else slice(0, shape[-1])
        first, last = columns.start // kind.block_size, -(-columns.stop // kind.block_size)
        blocks = stored.view(*shape[:-1], -1, kind.block_bytes)
        blocks = blocks[part[: len(shape) - 1]][..., first:last, :]
        stored = blocks.flatten()
        values = dequantise(stored, kind, self._dtype).view(*blocks.shape[:-2], -1)
        start = first * kind.block_size
        values = values[..., columns.start - start : columns.stop - start]
        if self._is_in_pairs(name):
            values = _out_of_pairs(values, self._shape.head_dim)
        self._file.let_go(info)
        return values, stored.nbytes

    def is_mapped(self, name: str) -> bool:
        return self._weights[name].info.kind.block_size == 1  # blocks are converted

    def close(self) -> None:
        """The mapping ends with the last tensor that shares it."""
        self._weights.clear()


def _weights(info: TensorInfo) -> Iterator[tuple[str, _Weight]]:
    """Hugging Face names of what a GGUF tensor holds; an unknown one keeps its own name."""
    base, _, kind = info.name.rpartition(".")
    pieces = base.split(".", 2)
    if base in _TOP:
        yield f"{_TOP[base]}.{kind}", _Weight(info, info.shape, None)
    elif len(pieces) == 3 and pieces[0] == "blk" and pieces[2] in _LAYER:
        name = f"model.layers.{pieces[1]}.{_LAYER[pieces[2]]}.{kind}"
        yield name, _Weight(info, info.shape, None)
    elif len(pieces) == 3 and pieces[0] == "blk" and pieces[2] in _EXPERTS and len(info.shape) == 3:
        prefix = f"model.layers.{pieces[1]}.mlp.experts"
        for expert in range(info.shape[0]):
            name = f"{prefix}.{expert}.{_EXPERTS[pieces[2]]}.{kind}"
            yield name, _Weight(info, info.shape[1:], expert)
    else:
        yield info.name, _Weight(info, info.shape, None)


def _out_of_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """Undo the converter's reordering of the rows of heads [heads * D, ...]."""
    heads = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)
