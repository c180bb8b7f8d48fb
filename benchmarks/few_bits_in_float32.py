"""The float32 engine with products of few bits: what differs from float32 is the product alone.

Weights are multiplied as a GGUF file has them, in 4 or 8 bits, in steps of any size; KV, norms,
attention and what goes from one to the next stay float32, where the engine has bfloat16. Run as a
program this is an engine-core process, which `launch` starts for `LLM(..., dtype="float32")`.
"""

import subprocess
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from twostroke.checkpoint import Checkpoint
from twostroke.config import EngineConfig
from twostroke.model import layers, registry
from twostroke.model.few_rows_quantised import QuantisedRows
from twostroke.model.quantised import QuantisedWeight
from twostroke.model.registry import Quantiser
from twostroke.model.weights import WeightSource
from twostroke.proc.launch import EngineGroup
from twostroke.worker import runner


class Float32Rows(QuantisedRows):
    """Products of few bits that give float32."""

    __slots__ = ("_bias",)

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None) -> None:
        super().__init__(weight, None)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return self.into(torch.empty((len(x), self.out)), x)

    def into(self, y: Tensor, x: Tensor) -> Tensor:
        super().into(y, x)
        return y if self._bias is None else y.add_(self._bias)


def use_few_bits(set_attribute: Callable[[object, str, object], None] = setattr) -> None:
    """In models of float32 that are loaded from now on."""

    def quantiser(source: WeightSource, _kind: str, _keep_dequantised: bool) -> Quantiser:
        return Quantiser(source, "auto", keep_dequantised=False)

    set_attribute(layers, "QuantisedRows", Float32Rows)
    set_attribute(registry, "Quantiser", quantiser)
    set_attribute(runner, "whole_steps", lambda _model, _attention: None)  # are of bfloat16


def launch(config: EngineConfig, checkpoint: Checkpoint) -> EngineGroup:
    """For `LLM`."""
    command = (sys.executable, __file__)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)
    return EngineGroup(config, checkpoint, [process])


if __name__ == "__main__":
    from twostroke.proc.core_main import main

    use_few_bits()
    main()
