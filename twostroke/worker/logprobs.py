"""Log-probabilities for clients, from raw logits (before penalties, bias and temperature), as vLLM
reports them by default. Shapes: R rows, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from twostroke.messages import TokenLogprobs


def token_logprobs(
    logprobs: Tensor, token_ids: Tensor, num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """For row i: the token `token_ids[i]`, its rank, and the `num_top[i]` most likely tokens.

    `logprobs` [R, V] float32, `token_ids` [R] int64. Rank 1 is the most likely; tokens that tie
    share the better rank.
    """
    if not len(num_top):
        return []
    chosen = logprobs.gather(-1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    top_logprobs, top_ids = logprobs.topk(min(max(num_top), logprobs.shape[-1]), -1)
    columns = (
        torch.cat((token_ids[:, None], top_ids), -1).tolist(),
        torch.cat((chosen, top_logprobs), -1).tolist(),
        ranks.tolist(),
        num_top,
    )
    return [
        TokenLogprobs(ids[: 1 + top], values[: 1 + top], rank)
        for ids, values, rank, top in zip(*columns, strict=True)
    ]
