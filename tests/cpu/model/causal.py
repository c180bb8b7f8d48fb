"""What the tests of the model share: attention over one sequence, and a way to load and run."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.checkpoint import open_checkpoint
from twostroke.model.llama import DecoderModel
from twostroke.model.registry import load_model

CPU = torch.device("cpu")


class CausalAttention:
    """`model.layers.Attention` for one sequence given whole: no cache."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (heads.transpose(0, 1)[None] for heads in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return attended[0].transpose(0, 1).flatten(1)


def load(path: Path, dtype: torch.dtype = torch.float32) -> DecoderModel:
    return load_model(open_checkpoint(path), dtype=dtype, device=CPU)


def logits(model: DecoderModel, token_ids: Tensor) -> Tensor:
    positions = torch.arange(len(token_ids))
    return model.logits(model.forward(token_ids, positions, CausalAttention()))


def random_tokens(count: int, vocab_size: int = 259) -> Tensor:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(1))
