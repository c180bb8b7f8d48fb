"""What msgpack itself cannot carry: arrays, and nothing else."""

import msgspec
import numpy as np
import pytest

from twostroke.messages import decoder_for, encode


class Message(msgspec.Struct):
    what: object


class Wrong(msgspec.Struct):
    what: complex


class Arrays(msgspec.Struct):
    what: np.ndarray


def test_arrays_travel_and_come_out_read_only() -> None:
    found = decoder_for(Arrays).decode(encode(Arrays(np.arange(3, dtype=np.int32)))).what
    assert found.dtype == np.int32
    assert found.tolist() == [0, 1, 2]
    assert not found.flags.writeable


def test_other_things_are_refused_by_their_type() -> None:
    with pytest.raises(TypeError, match=r"a message holds <class 'object'>.*arrays alone"):
        encode(Message(object()))
    with pytest.raises(msgspec.DecodeError, match=r"a field of type <class 'complex'>"):
        decoder_for(Wrong).decode(encode(Message(1)))


@pytest.mark.parametrize("what", [["<c8", b"12345678"], ["<i4", b"123"], ["<i4"], 1])
def test_what_is_no_array_is_a_decode_error(what: object) -> None:
    with pytest.raises(msgspec.DecodeError):
        decoder_for(Arrays).decode(encode(Message(what)))
