"""Text to token ids and back, for the API process.

Every token is a piece of bytes: `token_bytes`. Decoding joins them and reads UTF-8, so the full
decode, the incremental one (`detokenizer.py`) and the `bytes` of log-probabilities cannot disagree.
Encoding is the `tokenizers` library's.
"""

import asyncio
import functools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostroke.errors import (
    ContextLengthError,
    ModelError,
    RequestError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    import tokenizers

    from twostroke.checkpoint import Checkpoint

_THREAD_CHARS = 2048  # longer texts take over 1 ms to encode: off the event loop


class Tokenizer(ABC):
    """What the client needs of a tokenizer. Implementations are immutable and thread-safe.

    `vocab_size` counts ids, added tokens included; a model may have more (padding), whose bytes are
    empty. `bos_token` and `eos_token` are "" and their ids None when the model has none.
    """

    vocab_size: int
    bos_token: str = ""
    eos_token: str = ""
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    special_ids: frozenset[int] = frozenset()
    strips_leading_space: bool = False  # SentencePiece: a text's first token brings a space

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        Special tokens written out in the text become their ids, as in vLLM. `add_special_tokens`
        adds what the tokenizer puts around a plain prompt (BOS); chat templates write their own.
        Raises RequestError when the text is not valid Unicode (an unpaired surrogate).
        """

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; empty for an id outside the vocabulary."""

    @functools.cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token, and so the most characters that a token can stand for."""
        return max(len(self.token_bytes(i)) for i in range(self.vocab_size))

    async def encode_async(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """`encode`, in a thread when the text is long, so that the event loop never stalls.

        Raises ContextLengthError, at once, for a text that cannot have `max_tokens` or fewer:
        megabytes would keep a core busy for seconds, just to be refused after that.
        """
        if max_tokens is not None and len(text) > max_tokens * self.longest_token:
            raise ContextLengthError(
                f"the prompt has {len(text):,} characters, and no token has more than "
                f"{self.longest_token}; at most {max_tokens:,} tokens fit",
                hint="shorten the prompt",
            )
        if len(text) <= _THREAD_CHARS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode, text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are not UTF-8 become U+FFFD."""
        skip = self.special_ids if skip_special_tokens else frozenset[int]()
        data = b"".join([self.token_bytes(i) for i in token_ids if i not in skip])
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        """One token as text; U+FFFD stands for the parts of a character cut in two."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


# ---------------------------------------------------------------- spellings of bytes


def byte_characters() -> list[str]:
    """GPT-2's printable stand-in of each byte: itself where it prints, else from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(moved)) for byte in range(256)]


_BYTE_OF = {character: byte for byte, character in enumerate(byte_characters())}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_bytes(token: str) -> bytes:
    """A token of a byte-level vocabulary: each character stands for one byte."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """A token of a SentencePiece vocabulary: U+2581 is a space, <0x0A> a byte."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes((int(match[1], 16),))
    return token.replace("\u2581", " ").encode()


class FastTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library, byte-level or SentencePiece-like.

    `tokens` overrides the spelling of ids (a GGUF vocabulary may hold one text twice, which the
    library cannot). `add_bos` forces BOS before plain prompts, or its absence; None leaves it to
    the tokenizer's own post-processor.
    """

    def __init__(
        self,
        backend: "tokenizers.Tokenizer",
        *,
        byte_level: bool,
        strips_leading_space: bool = False,
        bos_token: str = "",
        eos_token: str = "",
        add_bos: bool | None = None,
        tokens: Sequence[str] | None = None,
    ) -> None:
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._tokens = tokens
        self._to_bytes = byte_level_bytes if byte_level else sentencepiece_bytes
        self._added = {i: token.content.encode() for i, token in added.items()}
        self._bytes: dict[int, bytes] = {}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = max(
            backend.get_vocab_size(with_added_tokens=True),
            max(self._added, default=-1) + 1,
            len(tokens or ()),
        )
        self.strips_leading_space = strips_leading_space
        self.bos_token, self.bos_token_id = bos_token, self._id_of(bos_token)
        self.eos_token, self.eos_token_id = eos_token, self._id_of(eos_token)
        own = backend.encode("", add_special_tokens=True).ids
        adds_bos = self.bos_token_id is not None and self.bos_token_id in own
        self._post_process = not (adds_bos and add_bos is False)
        self._prefix: list[int] = []
        if add_bos and not adds_bos and self.bos_token_id is not None:
            self._prefix = [self.bos_token_id]

    def _id_of(self, token: str) -> int | None:
        return self._backend.token_to_id(token) if token else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            # Of a batch: the library's `encode` keeps the GIL, and with it the event loop's thread.
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens and self._post_process
            )
        except TypeError:  # what the library raises for an unpaired surrogate
            raise RequestError(
                "the text is not valid Unicode: it holds an unpaired surrogate", param="prompt"
            ) from None
        ids: list[int] = encoding.ids
        return self._prefix + ids if add_special_tokens and self._prefix else ids

    def token_bytes(self, token_id: int) -> bytes:
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._look_up(token_id)
        return data

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        if not 0 <= token_id < self.vocab_size:
            return b""
        if self._tokens is not None and token_id < len(self._tokens):
            return self._to_bytes(self._tokens[token_id])
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self._to_bytes(token)


# ---------------------------------------------------------------- loading


def load_tokenizer(checkpoint: "Checkpoint", tokenizer_path: str = "") -> Tokenizer:
    """The tokenizer of a checkpoint, or of the directory or .gguf file `tokenizer_path`.

    Raises ModelError when there is none or it is damaged, UnsupportedModelError for a kind that is
    not known.
    """
    path = Path(tokenizer_path).expanduser() if tokenizer_path else checkpoint.path
    if path.is_file() and path.suffix == ".gguf":
        from twostroke.client.gguf_tokenizer import load_gguf_tokenizer

        return load_gguf_tokenizer(path)
    if path.is_dir():
        return _load_directory(path)
    raise ModelError(
        f"no tokenizer at {path}", hint="--tokenizer takes a local directory or a .gguf file"
    )


def _load_directory(directory: Path) -> Tokenizer:
    """From tokenizer.json; tokenizer_config.json says which tokens are BOS and EOS."""
    import tokenizers

    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{directory} has no tokenizer.json",
            hint="save the tokenizer with transformers (save_pretrained) to get one",
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exceptions
        raise ModelError(f"{path} is not a tokenizer: {error}", hint="download it again") from None
    backend.no_truncation()
    backend.no_padding()
    byte_level, strips_leading_space = _decoder_kind(backend, path)
    config = _read_config(directory / "tokenizer_config.json")
    add_bos = config.get("add_bos_token")
    return FastTokenizer(
        backend,
        byte_level=byte_level,
        strips_leading_space=strips_leading_space,
        bos_token=_token_text(config.get("bos_token")),
        eos_token=_token_text(config.get("eos_token")),
        add_bos=add_bos if isinstance(add_bos, bool) else None,
    )


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    from twostroke.checkpoint import read_json

    return read_json(path)


def _token_text(value: object) -> str:
    """A special token of tokenizer_config.json: a text, or an object that holds one."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _decoder_kind(backend: "tokenizers.Tokenizer", path: Path) -> tuple[bool, bool]:
    """(byte-level, strips a leading space), from how the tokenizer itself would decode."""
    decoder = backend.decoder
    state: dict[str, Any] = {"type": "none"}
    if decoder is not None:
        state = json.loads(decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {part["type"]: part for part in parts}
    if "ByteLevel" in kinds:
        return True, False
    if "Metaspace" in kinds:
        return False, kinds["Metaspace"].get("prepend_scheme") != "never"
    if "ByteFallback" in kinds or "Replace" in kinds:
        return False, "Strip" in kinds
    raise UnsupportedModelError(
        f"{path} decodes with {', '.join(kinds)}; only byte-level and SentencePiece-like "
        "tokenizers are supported"
    )
