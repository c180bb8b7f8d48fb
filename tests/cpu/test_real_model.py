"""The real SmolLM2-135M against transformers: the same weights, the same greedy tokens.

Needs the default model's file, which `make serve` fetches; without it and without a network these
tests are skipped with the reason.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cpu.reference import reference_smollm2
from twostroke import LLM, SamplingParams

NUM_TOKENS = 64


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(str(smollm2_path), dtype="float32", max_model_len=1024, max_num_seqs=24) as llm:
        yield llm


def prompts() -> list[str]:
    subjects = ["the sea", "a small dog", "prime numbers", "Paris", "rain", "an old clock"]
    shapes = ["Tell me about {}.", "Write a poem on {}:\n", "{} is", "Q: What is {}?\nA:"]
    texts = [shape.format(subject) for subject in subjects for shape in shapes]
    random.Random(0).shuffle(texts)
    return [*texts[:18], "def fibonacci(n):\n", "早上好"]


@pytest.mark.timeout(400)  # 135M parameters, twice, on a machine that may be busy
def test_greedy_tokens_equal_those_of_transformers(llm: LLM, smollm2_path: Path) -> None:
    texts = prompts()
    assert len(texts) == 20
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    ours = llm.generate(texts, params, use_tqdm=False)
    model = reference_smollm2(smollm2_path)
    for text, result in zip(texts, ours, strict=True):
        prompt = torch.tensor([list(result.prompt_token_ids)])
        # One forward pass over prompt + our tokens gives the reference's choice at each of them.
        tokens = list(result.outputs[0].token_ids)
        with torch.inference_mode():
            logits = model(torch.cat([prompt, torch.tensor([tokens])], dim=1)).logits[0]
        theirs = logits[prompt.shape[1] - 1 : -1].argmax(-1).tolist()
        assert tokens == theirs, f"prompt {text!r}"
        assert len(tokens) == NUM_TOKENS
