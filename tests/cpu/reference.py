"""transformers' SmolLM2-135M on the weights of the default model's GGUF file: the reference.

Nothing of ours but the file's header is used: the published configuration, the weights by the gguf
package, q and k put back in order by the inverse of the converter's formula.
"""

from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.quants import dequantize
from transformers import LlamaConfig, LlamaForCausalLM

from twostroke.gguf_header import read_gguf

SMOLLM2: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


def reference_smollm2(path: Path) -> LlamaForCausalLM:
    """The model in float32, ready to run."""
    reference = LlamaForCausalLM(LlamaConfig(**SMOLLM2)).eval()
    file = read_gguf(path)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, SMOLLM2["num_hidden_layers"])
    weights = {}
    for name in reference.state_dict():
        info = file.tensors.get(names.get_name(name, try_suffixes=(".weight",)))
        if info is None:
            assert name == "lm_head.weight"  # tied
            continue
        stored = file.bytes_of(info).reshape(info.shape[0], -1)
        kind = gguf.GGMLQuantizationType[info.kind.name]
        values = dequantize(stored, kind).reshape(info.shape)
        if "q_proj" in name or "k_proj" in name:
            values = values.reshape(-1, 32, 2, 576).swapaxes(1, 2).reshape(info.shape)
        weights[name] = torch.from_numpy(values)
    reference.load_state_dict(weights, strict=False)
    reference.tie_weights()
    return reference
