"""Tokens to text as they come, never half a character, never past a stop string.

    bytes of tokens ──▶ UTF-8 decoder (keeps partial characters) ──▶ held back ──▶ text
                                                                      the longest suffix that
                                                                      could still become a stop

The stop that counts is the one completed first, reading character by character (of two completed
by the same character, the longer); so it does not depend on where tokens were cut.
"""

import codecs
from collections.abc import Sequence

from twostroke.client.tokenizer import Tokenizer
from twostroke.messages import SamplingParams


class Detokenizer:
    """The text of one sample.

    After each `push` or `flush`, `stop` is the stop string that was found, if any; then all text up
    to it (with it, under `include_stop_str_in_output`) has been returned, and `num_tokens` counts
    the tokens up to the one that completed it. Later tokens are not looked at.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.stop: str | None = None
        self.num_tokens = 0
        self._token_bytes = tokenizer.token_bytes
        self._skip = tokenizer.special_ids if params.skip_special_tokens else frozenset[int]()
        self._stops = params.stop
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._partial = b""  # the beginning of a character whose end has not come
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that is now certain."""
        if not self._stops:
            self.num_tokens += len(token_ids)
            skip = self._skip
            pieces = [self._token_bytes(i) for i in token_ids if i not in skip]
            return self._decode(b"".join(pieces))
        texts = []
        for token_id in token_ids:
            if self.stop is not None:
                break
            self.num_tokens += 1
            if token_id not in self._skip:
                texts.append(self._release(self._decode(self._token_bytes(token_id))))
        return "".join(texts)

    def flush(self) -> str:
        """The sample has ended: return what was held back. A partial character becomes U+FFFD."""
        if self.stop is not None:
            return ""
        text = self._release(self._decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        """What codecs' incremental decoder does, without its layers: this runs for every token."""
        if self._partial:
            data = self._partial + data
        text, num_read = codecs.utf_8_decode(data, "replace", final)
        self._partial = data[num_read:]
        return text

    def _release(self, new_text: str) -> str:
        """Look for a stop that ends in `new_text`; hold back what may become one."""
        text = self._held + new_text
        if self.num_tokens > self._min_tokens:
            ends = []
            for stop in self._stops:
                start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
                if start >= 0:
                    ends.append((start + len(stop), start, stop))
            if ends:
                end, start, self.stop = min(ends)
                self._held = ""
                return text[:end] if self._include_stop else text[:start]
        cut = len(text) - self._num_to_hold(text)
        self._held = text[cut:]
        return text[:cut]

    def _num_to_hold(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a proper prefix of a stop."""
        longest = 0
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while at >= 0 and len(text) - at > longest:
                if stop.startswith(text[at:]):
                    longest = len(text) - at
                    break
                at = text.find(stop[0], at + 1)
        return longest
