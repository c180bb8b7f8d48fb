import stat

import pytest
import zmq

from twostroke.errors import ConfigError
from twostroke.keys import read_key, write_key


def test_a_key_is_made_for_one_user_and_read_back_as_two_pairs(tmp_path):
    path = tmp_path / "key"
    write_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = read_key(path)
    assert key == read_key(path)
    assert key.server != key.engine
    for pair in (key.server, key.engine):
        assert zmq.curve_public(pair.secret) == pair.public
    other = tmp_path / "other"
    write_key(other)
    assert read_key(other).server.public != key.server.public


def test_a_key_is_never_overwritten(tmp_path):
    path = tmp_path / "key"
    write_key(path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"key exists; remove it first"):
        write_key(path)
    assert path.read_bytes() == before
    with pytest.raises(ConfigError, match=r"cannot write the key .*: No such file"):
        write_key(tmp_path / "none" / "key")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_key_that_others_may_read_is_refused(tmp_path, mode):
    path = tmp_path / "key"
    write_key(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"open to others: mode {mode:04o}, .*; chmod 600"):
        read_key(path)


@pytest.mark.parametrize("text", [b"", b"00" * 31, b"00" * 33, b"zz" * 32, b"\xff" * 64])
def test_what_is_no_key(tmp_path, text):
    path = tmp_path / "key"
    write_key(path)
    path.write_bytes(text)
    with pytest.raises(ConfigError, match="is not a key: it must hold 64 hexadecimal digits"):
        read_key(path)
    with pytest.raises(ConfigError, match=r"cannot read the key .*; twostroke key FILE makes one"):
        read_key(tmp_path / "none")


def test_a_key_of_another_user_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "key"
    write_key(path)
    monkeypatch.setattr("os.geteuid", lambda: path.stat().st_uid + 1)
    if path.stat().st_uid == 0:  # root's files are trusted
        assert read_key(path)
    else:
        with pytest.raises(ConfigError, match="belongs to another user"):
            read_key(path)
