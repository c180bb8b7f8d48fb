"""Prompts as the twin makes them: columns of token ids that know the runs they are made of."""

from collections.abc import Sequence

import numpy as np

from twostroke.arrays import Int32s


class Prompt(np.ndarray[tuple[int], np.dtype[np.int32]]):
    """Token ids, counts[i] times values[i] each. A part of a prompt is a column like any other."""

    runs: tuple[list[int], list[int]] | None = None


def prompt_of(values: Int32s, counts: Int32s) -> Prompt:
    """The prompt that is made of these runs."""
    tokens = values.repeat(counts).view(Prompt)
    tokens.runs = values.tolist(), counts.tolist()
    return tokens


def runs_of(tokens: Int32s) -> tuple[Sequence[int], Sequence[int]]:
    """Token ids and how often each comes before another does; some may be cut in pieces."""
    if isinstance(tokens, Prompt) and tokens.runs is not None:
        return tokens.runs
    starts = np.concatenate(([0], (tokens[1:] != tokens[:-1]).nonzero()[0] + 1))
    counts = np.diff(starts, append=len(tokens))
    return tokens[starts].tolist(), counts.tolist()
