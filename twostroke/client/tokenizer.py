"""Text to token ids and back, for the API process.

Every token is a piece of bytes: `token_bytes`. Decoding joins them and reads UTF-8, so the full
decode, the incremental one (`detokenizer.py`) and the `bytes` of log-probabilities cannot disagree.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twostroke.checkpoint import Checkpoint

_THREAD_CHARS = 4096  # longer texts take over 1 ms to encode: off the event loop


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
        """

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; empty for an id outside the vocabulary."""

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """`encode`, in a thread when the text is long, so that the event loop never stalls."""
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


def load_tokenizer(checkpoint: "Checkpoint", tokenizer_path: str = "") -> Tokenizer:
    """The tokenizer of a checkpoint (or of the directory or .gguf file `tokenizer_path`).

    Raises ModelError when there is none or it is damaged, UnsupportedModelError for a kind that is
    not known.
    """
    raise NotImplementedError
