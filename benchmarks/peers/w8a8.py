"""A Hugging Face directory in 8 bits on both sides (W8A8) from one in bf16, for vLLM.

The form is compressed-tensors' "int-quantized": weights inside the layers rounded symmetrically
with a scale for each output, activations rounded by the engine for each token. Rounded to the
nearest, as ours rounds; ours turns inputs first (`model.int8_rows`), which the form does not know.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_EIGHT_BITS, "strategy": "channel", "dynamic": False},
            "input_activations": {**_EIGHT_BITS, "strategy": "token", "dynamic": True},
        }
    },
}


def write_w8a8(bf16: Path, directory: Path) -> None:
    """`directory` with all that `bf16` has, its matrices inside the layers rounded."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in bf16.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, directory / file.name)
    weights: dict[str, Tensor] = {}
    for name, weight in load_file(bf16 / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            weights[name], weights[f"{name}_scale"] = rounded(weight)
        else:
            weights[name] = weight
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((bf16 / "config.json").read_text()) | {"quantization_config": QUANTIZATION}
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [out, in] and the scales, float32 [out, 1]."""
    scales = weight.float().abs().amax(1, keepdim=True) / 127
    return (weight.float() / scales).nan_to_num(0.0).round().to(torch.int8), scales
