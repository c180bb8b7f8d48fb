"""One prefix hasher for all engines of a world.

Its secret takes long to draw and decides nothing, and a prompt that goes to two engines need not be
hashed twice: the keys are those of the first time.
"""

from twostroke.kv.prefix import PrefixHasher, UInt64s
from twostroke.messages import Int32s

_SECRET = b"a twin has nothing to hide" + bytes(6)
_MAX_PROMPTS = 1024  # on their way to a second engine


class PromptHasher(PrefixHasher):
    """Remembers the keys of prompts until they are asked for once more."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size, secret=_SECRET)
        # By the identity of the array, which is kept alive here.
        self._prompts: dict[int, tuple[Int32s, list[bytes], UInt64s]] = {}

    def extend_one(
        self, sums: UInt64s, first_block: int, tokens: Int32s
    ) -> tuple[list[bytes], UInt64s]:
        prompt = tokens.base
        if first_block or prompt is None or len(prompt) != len(tokens):
            return super().extend_one(sums, first_block, tokens)
        known = self._prompts.pop(id(prompt), None)
        if known is not None and known[0] is prompt:
            return known[1], known[2]
        keys, ends = super().extend_one(sums, first_block, tokens)
        if len(self._prompts) == _MAX_PROMPTS:
            del self._prompts[next(iter(self._prompts))]
        self._prompts[id(prompt)] = (prompt, keys, ends)
        return keys, ends
