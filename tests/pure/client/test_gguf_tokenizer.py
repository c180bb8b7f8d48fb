import logging

import numpy as np
import pytest
import tokenizers

from twostroke.client.gguf_tokenizer import build_gguf_tokenizer
from twostroke.client.tokenizer import byte_characters
from twostroke.errors import ModelError, UnsupportedModelError

G = "\u0120"  # a space, in GPT-2's spelling


def gpt2(pre: str | None = "smollm", extra: tuple[str, ...] = (), **changes: object) -> dict:
    """Metadata of a byte-level vocabulary: two specials, the bytes, and some merges."""
    merged = ["ab", f"{G}ab", "12", *extra]
    tokens = ["<|end|>", "<think>", *byte_characters(), *merged]
    kinds = [3, 4] + [1] * (len(tokens) - 2)
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": np.array(kinds, np.int32),
        "merges": ["a b", f"{G} ab", "1 2"],
        "bos_token_id": 0,
        "eos_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in fields.items() if v is not None}


def llama(**changes: object) -> dict:
    """Metadata of a SentencePiece vocabulary in which scores decide between merges."""
    words = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    pieces = {
        "\u2581": -9,
        "a": -9,
        "b": -9,
        "c": -9,
        "bc": -1,
        "ab": -2,
        "\u2581ab": -3,
        "\u2581a": -4,
    }
    fields = {
        "model": "llama",
        "tokens": [*words, *byte_tokens, *pieces],
        "scores": np.array([0.0] * 259 + list(pieces.values()), np.float32),
        "token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(pieces), np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in fields.items() if v is not None}


def pieces(tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, add_special_tokens=False)]


def test_byte_level_with_merges_and_added_tokens():
    tokenizer = build_gguf_tokenizer(gpt2(), "f")
    assert pieces(tokenizer, "ab ab<|end|>é") == ["ab", " ab", "<|end|>", "\ufffd", "\ufffd"]
    ids = tokenizer.encode("a<think>é 😀")
    assert tokenizer.decode(ids) == "a<think>é 😀"
    assert tokenizer.decode(tokenizer.encode("a<|end|>")) == "a"
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|end|>", 0)
    assert tokenizer.special_ids == {0}


@pytest.mark.parametrize(
    ("pre", "digits"),
    [
        ("smollm", ["1", "2", "1"]),
        ("gpt-2", ["12", "1"]),
        ("llama-bpe", ["12", "1"]),
        ("qwen2", ["1", "2", "1"]),
        ("tekken", ["1", "2", "1"]),
    ],
)
def test_pre_tokenizers_differ_in_digits(pre, digits):
    assert pieces(build_gguf_tokenizer(gpt2(pre), "f"), "121") == digits


def test_bos_is_added_where_the_model_expects_it():
    for pre, flag, added in (
        ("smollm", None, False),
        ("smollm", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ):
        tokenizer = build_gguf_tokenizer(gpt2(pre, add_bos_token=flag), "f")
        assert (tokenizer.encode("a")[0] == 0) == added


def test_llama_3_takes_a_word_that_is_a_token_whole():
    extra = ("ba",)  # no merge makes it
    assert pieces(build_gguf_tokenizer(gpt2("llama-bpe", extra), "f"), "ba") == ["ba"]
    assert pieces(build_gguf_tokenizer(gpt2("qwen2", extra), "f"), "ba") == ["b", "a"]


def test_qwen_normalises_what_looks_the_same():
    qwen = build_gguf_tokenizer(gpt2("qwen2"), "f")
    assert qwen.decode(qwen.encode("e\u0301")) == "\u00e9"


def test_sentencepiece_merges_best_score_first():
    tokenizer = build_gguf_tokenizer(llama(), "f")
    assert pieces(tokenizer, "abc") == [" a", "bc"]
    assert pieces(tokenizer, "ab") == [" ab"]
    assert tokenizer.encode("ab")[0] == 1
    assert tokenizer.decode(tokenizer.encode("ab é\n")) == "ab é\n"
    assert pieces(tokenizer, "é")[-2:] == ["\ufffd", "\ufffd"]
    bare = build_gguf_tokenizer(llama(add_space_prefix=False), "f")
    assert pieces(bare, "ab") == ["ab"]
    assert bare.decode(bare.encode(" ab")) == " ab"


def test_a_text_that_stands_twice_keeps_both_ids():
    metadata = gpt2(extra=("ab",))
    tokenizer = build_gguf_tokenizer(metadata, "f")
    tokens = metadata["tokenizer.ggml.tokens"]
    assert [tokenizer.token_text(i) for i, t in enumerate(tokens) if t == "ab"] == ["ab", "ab"]
    assert tokenizer.vocab_size == len(tokens)


def test_no_pre_tokenizer_is_gpt2s_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "twostroke"):
        assert pieces(build_gguf_tokenizer(gpt2(None), "f"), "12") == ["12"]
    assert "no pre-tokenizer" in caplog.text


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"tokenizer.ggml.model": "gpt2"}, "tokens is missing"),
        (gpt2(tokens=[]), "tokens is empty"),
        (gpt2(merges=None), "merges is missing"),
        (gpt2(merges=["ab"]), "not two tokens"),
        (gpt2(merges=["x y z"]), "does not fit the vocabulary"),
        (gpt2(token_type=np.array([1], np.int32)), "token_type does not hold"),
        (gpt2(eos_token_id=10**6), "eos_token_id is 1000000"),
        (llama(scores=None), "scores is missing"),
    ],
)
def test_damaged_metadata_is_named(metadata, words):
    with pytest.raises(ModelError, match=words):
        build_gguf_tokenizer(metadata, "f")


def test_unknown_kinds_are_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="'bert'"):
        build_gguf_tokenizer(gpt2(model="bert"), "f")
    with pytest.raises(UnsupportedModelError, match="'weird'"):
        build_gguf_tokenizer(gpt2("weird"), "f")


def test_the_split_of_llama_3_is_the_one_of_its_tokenizer():
    backend = build_gguf_tokenizer(gpt2("llama-bpe"), "f")._backend
    cut = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("I'LL go, 12345\n\n  x")]
    assert [p.replace(G, " ").replace("\u010a", "\n") for p in cut] == [
        "I", "'LL", " go", ",", " ", "123", "45", "\n\n", " ", " x",
    ]  # fmt: skip
    assert isinstance(backend, tokenizers.Tokenizer)
