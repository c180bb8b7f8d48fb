"""What scores from 8 bits cost prompts in accuracy: the same texts with and without, in pairs.

    python benchmarks/int8_scores.py [--texts N]

The default model with `--quantization int8`, whose prompts have them, is compared with the same
model without, and both with float32: perplexity, how often the likeliest next token is float32's,
and how far the distribution of the next token is from float32's (KL, nats). Texts are this
repository's (accuracy.txt, then docs), cut into prompts of 1,024 tokens, each one chunk. Errors are
standard errors of the mean over tokens.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from twostroke.checkpoint import open_checkpoint
from twostroke.client.tokenizer import load_tokenizer
from twostroke.download import fetch_default_model
from twostroke.model.llama import DecoderModel
from twostroke.model.registry import load_model
from twostroke.worker.attention_numba import NumbaAttention

PROMPT_TOKENS, BLOCK_SIZE = 1024, 16
HERE = Path(__file__).parent
TEXTS = [HERE / "accuracy.txt", *sorted((HERE.parent / "docs").glob("*.md"))]


def attention_of(model: DecoderModel, *, int8_scores: bool) -> NumbaAttention:
    shape, blocks = model.shape, PROMPT_TOKENS // BLOCK_SIZE
    pool = torch.zeros(
        (blocks, shape.num_layers, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim),
        dtype=model.embedding.dtype,
    )
    attention = NumbaAttention(pool, shape.num_heads, shape.head_dim**-0.5, int8_scores=int8_scores)
    table = np.arange(blocks, dtype=np.int32)[None]
    attention.plan(np.array([0, PROMPT_TOKENS], np.int32), np.zeros(1, np.int32), table)
    return attention


def logprobs_of(model: DecoderModel, attention: NumbaAttention, tokens: Tensor) -> Tensor:
    """[tokens, vocab] of the next one."""
    hidden = model.forward(tokens, torch.arange(len(tokens)), attention)
    return torch.log_softmax(model.logits(hidden).float(), -1)


def compare(found: Tensor, exact: Tensor, tokens: Tensor) -> Tensor:
    """[tokens - 1, 3]: nats that the next token took, whether the likeliest is the same, KL."""
    nats = -found[:-1].gather(1, tokens[1:, None])[:, 0]
    same = (found.argmax(-1) == exact.argmax(-1)).double()[:-1]
    divergence = (exact.exp() * (exact - found)).sum(-1)[:-1]
    return torch.stack((nats.double(), same, divergence.double()), 1)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--texts", type=int, default=40, help="prompts, at most")
    options = parser.parse_args()

    checkpoint, cpu = open_checkpoint(fetch_default_model(offline=False)), torch.device("cpu")
    tokenizer = load_tokenizer(checkpoint)
    every = torch.tensor([t for path in TEXTS for t in tokenizer.encode(path.read_text())])
    prompts = every[: len(every) // PROMPT_TOKENS * PROMPT_TOKENS].view(-1, PROMPT_TOKENS)
    whole = load_model(checkpoint, dtype=torch.float32, device=cpu)
    model = load_model(
        checkpoint, dtype=torch.bfloat16, device=cpu, quantization="int8", keep_dequantised=False
    )
    exact = attention_of(whole, int8_scores=False)
    attentions = [attention_of(model, int8_scores=it) for it in (False, True)]
    rows: list[list[Tensor]] = [[], []]
    for tokens in prompts[: options.texts]:
        expected = logprobs_of(whole, exact, tokens)
        for one, attention in zip(rows, attentions, strict=True):
            one.append(compare(logprobs_of(model, attention, tokens), expected, tokens))
    without, with_them = (torch.cat(one) for one in rows)
    for name, one in (("16 bits", without), ("8 bits", with_them)):
        nats, same, divergence = one.mean(0).tolist()
        print(f"{name}: perplexity {math.exp(nats):.3f}, same {same:.2%}, KL {divergence:.5f}")
    difference = with_them - without
    errors = (difference.std(0) / len(difference) ** 0.5).tolist()
    nats, same, divergence = difference.mean(0).tolist()
    print(
        f"over {len(difference):,} tokens: perplexity {nats:+.3%} +- {errors[0]:.3%}, "
        f"same {same * 100:+.2f} +- {errors[1] * 100:.2f} points, "
        f"KL {divergence:+.5f} +- {errors[2]:.5f}"
    )


if __name__ == "__main__":
    main()
