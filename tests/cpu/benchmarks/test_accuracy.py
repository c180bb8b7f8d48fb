"""The gate of weights in few bits: in products alone they give float32's text."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cpu.model.test_gguf import Quant, write_gguf
from tests.cpu.worker.driving import Driver, Request, small_config
from twostroke.checkpoint import open_checkpoint
from twostroke.client.tokenizer import load_tokenizer
from twostroke.messages import SamplingParams
from twostroke.model.few_rows_quantised import works
from twostroke.testing.tiny_model import write_tiny_checkpoint
from twostroke.worker.runner import ModelRunner

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
GREEDY = SamplingParams(temperature=0.0, logprobs=5)

pytestmark = pytest.mark.skipif(
    not works(), reason="the processor has neither AVX512-VNNI nor AVX2, or torch no GNU OpenMP"
)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def agreement(path: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of the float32 engine, and the same with products of few bits."""
    from accuracy import compare
    from few_bits_in_float32 import use_few_bits

    answers = []
    for few_bits in (False, True):
        with monkeypatch.context() as patch:
            if few_bits:
                use_few_bits(patch.setattr)
            runner = ModelRunner(small_config(), open_checkpoint(path))
        assert {it.quantised is not None for it in runner.model.linears} == {few_bits}
        requests = [Request(list(prompt), 16, GREEDY) for prompt in prompts]
        Driver(runner.run).serve(requests, chunk=8)
        answers.append(
            [SimpleNamespace(token_ids=it.outputs, logprobs=it.logprobs) for it in requests]
        )
    return compare(*answers)


@pytest.mark.timeout(200)  # 135M parameters in float32, on a machine that may be busy
def test_the_real_models_text_is_that_of_float32(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(open_checkpoint(smollm2_path))
    tokens = tokenizer.encode((BENCHMARKS / "accuracy.txt").read_text())
    prompts = [tokens[i * 200 : i * 200 + 16] for i in range(8)]
    found = agreement(smollm2_path, prompts, monkeypatch)
    assert found["equal_tokens"] >= 0.95
    assert found["near_ties"] == found["parted"]


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", [Quant.Q8_0, Quant.Q4_0, Quant.Q4_1])
def test_a_tiny_models_text_is_that_of_float32(
    architecture: str, kind: Quant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_tiny_checkpoint(tmp_path, architecture, vocab_size=320)
    path = write_gguf(tmp_path / "model.gguf", directory, kind)
    prompts = [[(7 * i + 31 * j) % 256 for j in range(24)] for i in range(8)]
    found = agreement(path, prompts, monkeypatch)
    assert found["equal_tokens"] >= 0.95
    assert found["near_ties"] == found["parted"]
