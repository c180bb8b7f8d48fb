"""The key that a server and the engines that join it share: a file of 32 random bytes, in hex.

It is all that has to be brought to another host. The CURVE key pairs of both sides are derived
from it, so each side knows the other's public key beforehand and speaks to nobody else. Whoever
can read the file can join as an engine, or stand in for the server: it belongs to one user, and
`read_key` refuses one that others can read.
"""

import hashlib
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from twostroke.errors import ConfigError

KEY_BYTES = 32
MADE_BY = "twostroke key FILE makes one"


@dataclass(frozen=True)
class CurvePair:
    """A CURVE key pair, in Z85 as ZMQ takes it."""

    secret: bytes
    public: bytes


@dataclass(frozen=True)
class SharedKey:
    """The pairs of both sides."""

    server: CurvePair
    engine: CurvePair


def write_key(path: Path) -> None:
    """Make a new key, readable by this user alone. Raises ConfigError; never overwrites."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists", hint="remove it first if no server or engine uses it any more"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot write the key {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(KEY_BYTES) + "\n")


def read_key(path: Path) -> SharedKey:
    """The key in a file. Raises ConfigError, also when others than its owner may read it."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(4 * KEY_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read the key {path}: {error.strerror}", hint=MADE_BY) from None
    if others := stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"the key {path} is open to others: mode {stat.S_IMODE(status.st_mode):04o}, of which "
            f"{others:04o} is too much",
            hint=f"chmod 600 {path}, and make a new key if others may have read it",
        )
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"the key {path} belongs to another user: uid {status.st_uid}")
    try:
        key = bytes.fromhex(text.decode("ascii"))
        if len(key) != KEY_BYTES:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"{path} is not a key: it must hold {2 * KEY_BYTES} hexadecimal digits", hint=MADE_BY
        ) from None
    return SharedKey(server=_pair(key, b"twostroke-server"), engine=_pair(key, b"twostroke-engine"))


def _pair(key: bytes, person: bytes) -> CurvePair:
    """A pair of its own for each side. BLAKE2's `person` keeps the two apart."""
    secret = z85.encode(hashlib.blake2b(key=key, digest_size=32, person=person).digest())
    return CurvePair(secret, zmq.curve_public(secret))
