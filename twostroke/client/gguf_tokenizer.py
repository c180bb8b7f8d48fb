"""A tokenizer rebuilt from the metadata of a GGUF file.

Two models of tokenizer are stored there: "gpt2" (byte-level BPE with merges, and the name of a
pre-tokenizer) and "llama" (SentencePiece BPE with scores). What each pre-tokenizer name means is
taken from llama.cpp's src/llama-vocab.cpp and, where it differs, from the tokenizer.json of the
models that it was made for. Building one of 49,000 tokens takes about 60 ms, so nothing is cached.
"""

import logging
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from twostroke.client.tokenizer import FastTokenizer
from twostroke.errors import ModelError, UnsupportedModelError
from twostroke.gguf_header import read_gguf

logger = logging.getLogger("twostroke")


class TokenType(IntEnum):
    """tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# ---------------------------------------------------------------- pre-tokenizers of "gpt2"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHER = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_OTHER}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_OTHER}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Pre(NamedTuple):
    """How a text is cut before BPE. `split` None is GPT-2's own expression."""

    split: str | None = None
    digits: bool = False  # each digit alone, before the split
    nfc: bool = False
    ignore_merges: bool = False  # a word that is a token is taken whole
    add_bos: bool = False  # unless the file says otherwise


_LLAMA_BPE = _Pre(_LLAMA3, ignore_merges=True, add_bos=True)
_PRE = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo", "mpt", "exaone4", "mellum"), _Pre()),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA_BPE),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Pre(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _Pre(_QWEN2, nfc=True)),
    "stablelm2": _Pre(_QWEN2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "codeshell", "command-r", "minerva-7b"),
        _Pre(digits=True),
    ),
    "tekken": _Pre(_TEKKEN, ignore_merges=True, add_bos=True),
}


def load_gguf_tokenizer(path: Path) -> FastTokenizer:
    """Raises ModelError for damaged metadata, UnsupportedModelError naming an unknown kind."""
    return build_gguf_tokenizer(read_gguf(path).metadata, str(path))


def build_gguf_tokenizer(metadata: dict[str, Any], source: str) -> FastTokenizer:
    """The tokenizer that `metadata` describes; `source` is for messages."""
    reader = _Reader(metadata, source)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend, add_bos = _byte_level(reader)
    elif kind == "llama":
        backend, add_bos = _sentencepiece(reader), True
    else:
        raise UnsupportedModelError(
            f"{source}: tokenizer.ggml.model {kind!r} is not supported",
            hint="supported are 'gpt2' and 'llama'; or give --tokenizer a directory",
        )
    backend.add_tokens(reader.added_tokens())
    adds_space = kind == "llama" and reader.flag("add_space_prefix", True)
    return FastTokenizer(
        backend,
        byte_level=kind == "gpt2",
        strips_leading_space=adds_space,
        bos_token=reader.special("bos_token_id"),
        eos_token=reader.special("eos_token_id"),
        add_bos=reader.flag("add_bos_token", add_bos),
        tokens=reader.tokens,
    )


class _Reader:
    """Checked access to tokenizer.ggml.*."""

    def __init__(self, metadata: dict[str, Any], source: str) -> None:
        self._metadata = metadata
        self._source = source
        self.tokens = self.strings("tokens")
        if not self.tokens:
            raise self.error("tokens", "is empty")

    def error(self, key: str, problem: str) -> ModelError:
        return ModelError(f"{self._source}: tokenizer.ggml.{key} {problem}")

    def get(self, key: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}")

    def strings(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, list) or (value and not isinstance(value[0], str)):
            raise self.error(key, "is missing or not a list of texts")
        return value

    def numbers(self, key: str) -> list[Any]:
        """One number per token; empty when the key is absent."""
        value = self.get(key)
        if value is None:
            return []
        if not hasattr(value, "tolist") or len(value) != len(self.tokens):
            raise self.error(key, f"does not hold {len(self.tokens):,} numbers, one per token")
        numbers: list[Any] = value.tolist()
        return numbers

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        return value if isinstance(value, bool) else default

    def special(self, key: str) -> str:
        token_id = self.get(key)
        if token_id is None:
            return ""
        if not isinstance(token_id, int) or not 0 <= token_id < len(self.tokens):
            raise self.error(key, f"is {token_id!r}; the vocabulary has {len(self.tokens):,} ids")
        return self.tokens[token_id]

    def added_tokens(self) -> list[AddedToken]:
        """Tokens that are matched as a whole: control ones are special, user-defined ones not."""
        kinds = self.numbers("token_type")
        return [
            AddedToken(token, normalized=False, special=kind == TokenType.CONTROL)
            for token, kind in zip(self.tokens, kinds, strict=bool(kinds))
            if kind in (TokenType.CONTROL, TokenType.USER_DEFINED) and token
        ]

    def build_bpe(self, merges: Sequence[tuple[str, str]], **options: Any) -> models.BPE:
        vocab = {token: i for i, token in enumerate(self.tokens)}
        try:
            return models.BPE(vocab, list(merges), **options)
        except Exception as error:  # the library raises plain Exceptions
            raise self.error("merges", f"does not fit the vocabulary: {error}") from None


def _byte_level(reader: _Reader) -> tuple[Tokenizer, bool]:
    """GPT-2's kind; also whether it puts BOS before plain prompts by default."""
    name = reader.get("pre") or "default"
    pre = _PRE.get(name) if isinstance(name, str) else None
    if pre is None:
        raise UnsupportedModelError(
            f"the pre-tokenizer tokenizer.ggml.pre {name!r} is not known",
            hint=f"known are {', '.join(_PRE)}; or give --tokenizer a directory",
        )
    if name == "default":
        logger.warning("the GGUF file names no pre-tokenizer; GPT-2's is used")
    # A merge is two tokens with a space between; a token may begin with one.
    merges = []
    for merge in reader.strings("merges"):
        cut = merge.find(" ", 1)
        if cut < 0:
            raise reader.error("merges", f"holds {merge!r}, which is not two tokens")
        merges.append((merge[:cut], merge[cut + 1 :]))
    backend = Tokenizer(reader.build_bpe(merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    parts: list[Any] = []
    if pre.digits:
        parts.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.split is not None:
        parts.append(pre_tokenizers.Split(Regex(pre.split), behavior="isolated"))
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentencepiece(reader: _Reader) -> Tokenizer:
    """Llama 2's kind: merges follow from the vocabulary and its scores."""
    scores = reader.numbers("scores")
    if not scores:
        raise reader.error("scores", "is missing")
    unknown = reader.special("unknown_token_id") or None
    model = reader.build_bpe(
        _merges_by_score(reader.tokens, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    steps: list[Any] = [normalizers.Replace(" ", "\u2581")]
    if reader.flag("add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("\u2581"))
    backend.normalizer = normalizers.Sequence(steps)
    return backend


def _merges_by_score(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose result scores best: every way to split each token into
    two others, best first (transformers' `generate_merges`)."""
    ids = {token: i for i, token in enumerate(tokens)}
    found = []
    for token, score in zip(tokens, scores, strict=True):
        pairs = []
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                pairs.append((ids[left], ids[right], left, right))
        pairs.sort()
        found += [(score, len(left), len(right), left, right) for _, _, left, right in pairs]
    found.sort(key=lambda pair: pair[:3], reverse=True)
    return [(left, right) for _, _, _, left, right in found]
