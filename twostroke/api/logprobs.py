"""Log-probabilities in the three shapes that clients read: chat's, completions' and vLLM's."""

import codecs
from collections.abc import Sequence

from twostroke.api.protocol import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from twostroke.client.tokenizer import Tokenizer
from twostroke.messages import TokenLogprobs

# JSON has no infinity; OpenAI and vLLM write this for a token that cannot be.
_LEAST_LOGPROB = -9999.0


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as text; one that is only a part of a character as OpenAI writes it, by its bytes.

    Parts must not all become U+FFFD: completions' top_logprobs are keyed by this name.
    """
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join([f"\\x{byte:02x}" for byte in data])


def chat_logprobs(
    tokenizer: Tokenizer, positions: Sequence[TokenLogprobs], num_top: int
) -> ChatLogprobs:
    """Chat's shape: the chosen token, and the `num_top` most likely ones beside it."""

    def entry(token_id: int, logprob: float) -> TopLogprob:
        data = list(tokenizer.token_bytes(token_id))
        return TopLogprob(token_name(tokenizer, token_id), max(logprob, _LEAST_LOGPROB), data)

    content = []
    for position in positions:
        entries = [entry(*pair) for pair in zip(position.token_ids, position.logprobs, strict=True)]
        chosen = entries[0]
        content.append(
            ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, entries[1 : 1 + num_top])
        )
    return ChatLogprobs(content)


def prompt_logprobs(
    tokenizer: Tokenizer, positions: Sequence[TokenLogprobs | None]
) -> PromptLogprobs:
    """vLLM's shape of `prompt_logprobs`: a dict by token id for each position, None first."""
    answer: PromptLogprobs = []
    for position in positions:
        if position is None:
            answer.append(None)
            continue
        ranks = [position.rank, *range(1, len(position.token_ids))]
        candidates: dict[int, PromptLogprob] = {}
        for token_id, logprob, rank in zip(
            position.token_ids, position.logprobs, ranks, strict=True
        ):
            name = token_name(tokenizer, token_id)
            candidates.setdefault(token_id, PromptLogprob(max(logprob, _LEAST_LOGPROB), rank, name))
        answer.append(candidates)
    return answer


class CompletionColumns:
    """Completions' columns for one sample, piece by piece; keeps count of the text offsets.

    An offset is where a token's text begins in the sample's text (prompt included when echoed), in
    characters; a token that only continues a character begins where the character does.
    """

    def __init__(
        self, tokenizer: Tokenizer, num_top: int, *, skip_special_tokens: bool, is_text_start: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._silent = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips = is_text_start and tokenizer.strips_leading_space
        self._offset = 0

    def take(
        self, token_ids: Sequence[int], positions: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobs:
        """The columns of the next tokens; a position that has no log-probabilities is None."""
        columns = CompletionLogprobs()
        for token_id, position in zip(token_ids, positions, strict=True):
            columns.tokens.append(token_name(self._tokenizer, token_id))
            columns.text_offset.append(self._advance(token_id))
            if position is None:
                columns.token_logprobs.append(None)
                columns.top_logprobs.append(None)
                continue
            logprobs = [max(logprob, _LEAST_LOGPROB) for logprob in position.logprobs]
            columns.token_logprobs.append(logprobs[0])
            columns.top_logprobs.append(
                {
                    token_name(self._tokenizer, candidate): logprob
                    for candidate, logprob in zip(
                        position.token_ids[: 1 + self._num_top], logprobs, strict=False
                    )
                }
            )
        return columns

    def _advance(self, token_id: int) -> int:
        offset = self._offset
        if token_id not in self._silent:
            data = self._tokenizer.token_bytes(token_id)
            if self._strips and data:
                data, self._strips = data.removeprefix(b" "), False
            self._offset += len(self._decoder.decode(data))
        return offset
