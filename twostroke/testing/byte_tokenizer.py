"""A tokenizer without a vocabulary file: one token per byte."""

from twostroke.client.tokenizer import Tokenizer


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are bytes; BOS and EOS follow, and special tokens in a text are recognised.

    `add_bos` puts BOS before plain prompts, as Llama's tokenizers do.
    """

    def __init__(self, *, add_bos: bool = False) -> None:
        self.vocab_size = 258
        self.bos_token, self.bos_token_id = "<s>", 256
        self.eos_token, self.eos_token_id = "</s>", 257
        self.special_ids = frozenset((256, 257))
        self._add_bos = add_bos

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [256] if self._add_bos and add_special_tokens else []
        for position, piece in enumerate(text.split(self.eos_token)):
            ids += [257] if position else []
            for inner, plain in enumerate(piece.split(self.bos_token)):
                ids += [256] if inner else []
                ids += plain.encode("utf-8", "replace")
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        if 0 <= token_id < 256:
            return bytes((token_id,))
        return {256: b"<s>", 257: b"</s>"}.get(token_id, b"")
