"""The checkpoint in 8 bits that vLLM is given."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from twostroke.testing.tiny_model import write_tiny_checkpoint

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_matrices_inside_the_layers_are_rounded_and_the_rest_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from peers.w8a8 import write_w8a8

    write_tiny_checkpoint(tmp_path / "whole")
    write_w8a8(tmp_path / "whole", tmp_path / "w8a8")
    whole, rounded = (
        load_file(tmp_path / name / "model.safetensors") for name in ("whole", "w8a8")
    )
    assert set(whole) <= set(rounded)
    for name, weight in whole.items():
        scales = rounded.get(f"{name}_scale")
        if scales is None:
            assert torch.equal(rounded[name], weight)
            continue
        assert rounded[name].dtype == torch.int8
        error = (rounded[name] * scales - weight).abs()
        assert (error <= 0.501 * scales).all()
    assert sum(name.endswith("_scale") for name in rounded) == 2 * 7  # layers, projections
    config = json.loads((tmp_path / "w8a8" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    assert (tmp_path / "w8a8" / "tokenizer.json").exists()
