import asyncio
import dataclasses
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from twostroke.client.detokenizer import Detokenizer
from twostroke.client.tokenizer import (
    byte_characters,
    byte_level_bytes,
    load_tokenizer,
    sentencepiece_bytes,
)
from twostroke.errors import (
    ContextLengthError,
    ModelError,
    RequestError,
    UnsupportedModelError,
)
from twostroke.messages import SamplingParams
from twostroke.testing.byte_tokenizer import ByteTokenizer
from twostroke.testing.tiny_model import byte_tokenizer_json


@dataclasses.dataclass
class At:
    """As much of a checkpoint as the loader looks at."""

    path: Path


def write(directory: Path, content: object, **config: object) -> At:
    (directory / "tokenizer.json").write_text(json.dumps(content))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return At(directory)


@pytest.fixture
def tiny(tmp_path):
    content = byte_tokenizer_json()
    names = [token["content"] for token in content["added_tokens"]]
    return load_tokenizer(
        write(tmp_path, content, bos_token=names[0], eos_token={"content": names[-1]})
    )


def sentencepiece_json() -> dict:
    """A Llama-2-like tokenizer: a few words, then every byte."""
    words = ["<unk>", "<s>", "</s>", "\u2581", "h", "i"]
    vocab = {word: i for i, word in enumerate([*words, *(f"<0x{b:02X}>" for b in range(256))])}
    model = tokenizers.models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
    )
    decoders = tokenizers.decoders
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return json.loads(backend.to_str())


def test_a_byte_level_tokenizer_round_trips_any_text(tiny):
    for text in ("plain", "é 😀 中文", "\x00\x7f\xad", "  two  "):
        ids = tiny.encode(text)
        assert tiny.decode(ids) == text
        assert b"".join(map(tiny.token_bytes, ids)) == text.encode()


def test_special_tokens_in_a_text_are_recognised(tiny):
    ids = tiny.encode(f"a{tiny.eos_token}b")
    assert ids == [97, tiny.eos_token_id, 98]
    assert tiny.decode(ids) == "ab"
    assert tiny.decode(ids, skip_special_tokens=False) == f"a{tiny.eos_token}b"
    assert tiny.token_text(tiny.eos_token_id) == tiny.eos_token
    assert tiny.eos_token_id in tiny.special_ids


def test_ids_outside_the_vocabulary_have_no_bytes(tiny):
    assert tiny.token_bytes(tiny.vocab_size) == b""
    assert tiny.token_bytes(-1) == b""
    assert tiny.decode([97, 10**9]) == "a"


def test_an_unpaired_surrogate_is_an_error_of_the_request(tiny):
    with pytest.raises(RequestError, match="surrogate"):
        tiny.encode("a\ud800b")


async def test_long_texts_are_encoded_in_a_thread(tiny):
    for text in ("short", "long " * 2000):
        assert await tiny.encode_async(text) == tiny.encode(text)


def test_bos_follows_the_configuration(tmp_path):
    content = byte_tokenizer_json()
    bos = content["added_tokens"][0]["content"]
    for add_bos, start in ((True, [256]), (False, []), (None, [])):
        tokenizer = load_tokenizer(write(tmp_path, content, bos_token=bos, add_bos_token=add_bos))
        assert tokenizer.encode("a") == [*start, 97]
        assert tokenizer.encode("a", add_special_tokens=False) == [97]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": bos, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {bos: {"id": bos, "ids": [256], "tokens": [bos]}},
    }
    for add_bos, start in ((True, [256]), (False, []), (None, [256])):
        tokenizer = load_tokenizer(write(tmp_path, content, bos_token=bos, add_bos_token=add_bos))
        assert tokenizer.encode("a") == [*start, 97]


def test_sentencepiece_decodes_as_the_library_does(tmp_path):
    at = write(tmp_path, sentencepiece_json(), bos_token="<s>", eos_token="</s>")
    tokenizer = load_tokenizer(at)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("hi hi", "é😀", " hi", ""):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == library.decode(ids) == text
    # An answer goes on where the prompt ended: its first space stays.
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    assert detokenizer.push(tokenizer.encode("hi")) == " hi"
    assert [tokenizer.token_bytes(i) for i in (3, 6 + 0xE9)] == [b" ", b"\xe9"]


def test_spellings_of_bytes():
    assert len(set(byte_characters())) == 256
    for byte, character in enumerate(byte_characters()):
        assert byte_level_bytes(character) == bytes([byte])
    assert byte_level_bytes("a\uff5cb") == "a\uff5cb".encode()  # an added token, written as it is
    assert sentencepiece_bytes("\u2581a\u2581") == b" a "
    assert sentencepiece_bytes("<0x0A>") == b"\n"
    assert sentencepiece_bytes("<0x0AB>") == b"<0x0AB>"


@given(st.lists(st.integers(0, 260)), st.booleans())
def test_the_full_decode_equals_the_joined_deltas(ids, skip):
    tokenizer = ByteTokenizer()
    detokenizer = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=skip))
    text = "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)


def test_a_directory_that_cannot_work_is_named(tmp_path):
    with pytest.raises(ModelError, match="no tokenizer at"):
        load_tokenizer(At(tmp_path), str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_tokenizer(At(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ModelError, match="is not a tokenizer"):
        load_tokenizer(At(tmp_path))
    content = byte_tokenizer_json() | {
        "decoder": {"type": "WordPiece", "prefix": "#", "cleanup": True}
    }
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        load_tokenizer(write(tmp_path, content))


def test_the_byte_tokenizer():
    tokenizer = ByteTokenizer(add_bos=True)
    assert tokenizer.encode("é</s>") == [256, 0xC3, 0xA9, 257]
    assert tokenizer.encode("<s>a", add_special_tokens=False) == [256, 97]
    assert tokenizer.token_bytes(258) == b""


async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(tiny, monkeypatch):
    longest = tiny.longest_token
    assert longest == max(len(tiny.token_bytes(i)) for i in range(tiny.vocab_size))
    text = "x" * 10 * longest
    assert await tiny.encode_async(text, max_tokens=10) == tiny.encode(text)  # it may fit
    monkeypatch.setattr(tiny, "encode", None)
    with pytest.raises(ContextLengthError, match=r"characters.*at most 10 tokens fit"):
        await tiny.encode_async(text + "x", max_tokens=10)


async def test_a_long_text_leaves_the_event_loop_free(tiny):
    """Encoding lets go of the GIL, so the loop turns many times meanwhile."""
    encoding = asyncio.create_task(tiny.encode_async("hello " * 100_000))
    turns = 0
    while not encoding.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 100
    assert len(await encoding) >= 100_000
