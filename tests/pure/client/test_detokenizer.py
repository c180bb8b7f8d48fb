from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.client.detokenizer import Detokenizer
from twostroke.messages import SamplingParams
from twostroke.testing.byte_tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
TEXTS = ("plain", "😀 emoji 👩‍👩‍👧", "中文字符,测试", "e\u0301a\u0308 combining", "\u0000\n\t")


def truncated(text: str, stops: tuple[str, ...], include: bool) -> str:
    """The plain definition: read character by character until a stop is complete."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[:end] if include else text[: end - max(map(len, found))]
    return text


def run(data: bytes, cuts: list[int], params: SamplingParams) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(TOKENIZER, params)
    deltas, start = [], 0
    for end in [*sorted(set(cuts)), len(data)]:
        deltas.append(detokenizer.push(list(data[start:end])))
        start = end
        if detokenizer.stop is not None:
            break
    deltas.append(detokenizer.flush())
    return deltas, detokenizer


def test_every_cut_of_every_text_gives_the_whole_text():
    for text in TEXTS:
        data = text.encode()
        for cut in range(len(data) + 1):
            deltas, _ = run(data, [cut], SamplingParams())
            assert "".join(deltas) == text
            assert "\ufffd" not in "".join(deltas)


@settings(max_examples=100, deadline=None)
@given(
    data=st.one_of(st.binary(max_size=40), st.text(max_size=20).map(str.encode)),
    cuts=st.lists(st.integers(0, 40), max_size=8),
    stops=st.lists(st.text("ab😀é\ufffd", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_deltas_join_to_the_text_up_to_the_first_stop(data, cuts, stops, include):
    params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include)
    deltas, _ = run(data, [min(cut, len(data)) for cut in cuts], params)
    assert "".join(deltas) == truncated(data.decode("utf-8", "replace"), params.stop, include)


@settings(max_examples=100, deadline=None)
@given(text=st.text("ab", max_size=24), stops=st.lists(st.text("ab", min_size=1, max_size=5)))
def test_a_stop_string_is_found_wherever_the_text_is_cut(text, stops):
    for cut in range(len(text) + 1):
        deltas, detokenizer = run(text.encode(), [cut], SamplingParams(stop=tuple(stops)))
        assert "".join(deltas) == truncated(text, tuple(stops), include=False)
        assert (detokenizer.stop is None) == (not any(stop in text for stop in stops))


def test_only_what_may_become_a_stop_is_held_back():
    detokenizer = Detokenizer(TOKENIZER, SamplingParams(stop=("STOP", "TO!")))
    assert detokenizer.push(list(b"xST")) == "x"
    assert detokenizer.push(list(b"O")) == ""  # STO may become STOP, TO may become TO!
    assert detokenizer.push(list(b"?")) == "STO?"
    assert detokenizer.push(list(b"aSTO!b")) == "aS"
    assert (detokenizer.stop, detokenizer.num_tokens) == ("TO!", 10)
    assert detokenizer.flush() == ""


def test_what_is_held_back_comes_out_at_the_end():
    detokenizer = Detokenizer(TOKENIZER, SamplingParams(stop=("STOP",)))
    assert detokenizer.push(list("STé".encode()[:-1])) == ""
    assert detokenizer.flush() == "ST\ufffd"


def test_stop_strings_count_only_after_min_tokens():
    params = SamplingParams(stop=("ab",), min_tokens=3)
    for token_by_token in (True, False):
        detokenizer = Detokenizer(TOKENIZER, params)
        ids = list(b"abcabx")
        pieces = [[i] for i in ids] if token_by_token else [ids]
        assert "".join(detokenizer.push(piece) for piece in pieces) == "abc"
        assert (detokenizer.stop, detokenizer.num_tokens) == ("ab", 5)


def test_special_tokens_are_skipped_or_kept():
    for skip, text in ((True, "é!"), (False, "\ufffd</s>\ufffd!")):
        detokenizer = Detokenizer(TOKENIZER, SamplingParams(skip_special_tokens=skip))
        first, second = "é".encode()
        assert detokenizer.push([first, 257, second, ord("!")]) == text
