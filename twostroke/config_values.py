"""Texts, TOML and JSON into typed values of settings, or the words that say what would be right."""

import difflib
import ipaddress
import json
import math
import re
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, Literal

from twostroke.errors import ConfigError


def read_toml(path: Path) -> dict[str, Any]:
    """The settings of a file by name."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


# vLLM's keys of --speculative-config, and our settings.
_SPECULATIVE_KEYS = {
    "method": "speculative_method",
    "model": "speculative_model",
    "num_speculative_tokens": "num_speculative_tokens",
    "prompt_lookup_min": "prompt_lookup_min",
    "prompt_lookup_max": "prompt_lookup_max",
}


def speculative_settings(text: str) -> dict[str, Any]:
    """Settings by name out of the JSON object of `speculative_config`."""
    try:
        given = json.loads(text)
        if not isinstance(given, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise ConfigError(
            f"--speculative-config is not a JSON object: {error}",
            hint='for example {"method": "ngram", "num_speculative_tokens": 4}',
        ) from None
    if unknown := sorted(set(given) - set(_SPECULATIVE_KEYS)):
        raise ConfigError(
            f"--speculative-config has the key {unknown[0]!r}; "
            f"known are {', '.join(_SPECULATIVE_KEYS)}"
        )
    if "model" in given:
        given.setdefault("method", "draft_model")
    # As in vLLM, one bound alone stands for both.
    bounds = {"prompt_lookup_min", "prompt_lookup_max"} & set(given)
    if len(bounds) == 1:
        one = given[bounds.pop()]
        given |= {"prompt_lookup_min": one, "prompt_lookup_max": one}
    return {_SPECULATIVE_KEYS[key]: value for key, value in given.items()}


_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


def coerce(kind: Any, value: Any, shown: str, minimum: float | None) -> Any:
    """Turn a flag, TOML value or environment text into `kind`, or say what would be right."""
    if isinstance(kind, types.UnionType):
        raise TypeError(f"setting of type {kind} is not supported")
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            near = difflib.get_close_matches(str(value), choices, n=1)
            hint = f"did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{shown} is {value!r}; choices: {', '.join(choices)}", hint=hint)
        return value
    if kind is bool:
        if isinstance(value, bool):
            return value
        text = str(value).lower()
        if text not in _TRUE | _FALSE:
            raise ConfigError(f"{shown} is {value!r}; it must be true or false")
        return text in _TRUE
    if kind in (int, float):
        try:
            if isinstance(value, bool) or (kind is int and isinstance(value, float)):
                raise ValueError
            number = kind(value)
        except (TypeError, ValueError):
            wanted = "a whole number" if kind is int else "a number"
            raise ConfigError(f"{shown} is {value!r}; it must be {wanted}") from None
        if minimum is not None and number < minimum:
            raise ConfigError(f"{shown} is {number}; it must be at least {minimum}")
        return number
    if not isinstance(value, str):
        raise ConfigError(f"{shown} is {value!r}; it must be text")
    return value


def parse_address(text: str, shown: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`; an IPv6 host stands in brackets. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    bracketed = host.startswith("[") and host.endswith("]")
    sound = colon and bare and bracketed == (":" in bare) and port.isascii() and port.isdigit()
    if not sound or int(port) > 65535:
        raise ConfigError(
            f"{shown} is {text!r}; it must be HOST:PORT",
            hint="for example 127.0.0.1:8100 or [::1]:8100",
        )
    return bare, int(port)


def is_loopback(host: str) -> bool:
    """Whether only processes of this host can reach that address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_BYTES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_BITS = {"Mb": 1e6 / 8, "Gb": 1e9 / 8, "Tb": 1e12 / 8}


def parse_rate(text: str, name: str) -> float:
    """Bytes per second of 50GB/s, 400Gb/s or 400Gbps; B is for bytes and b for bits."""
    match = re.fullmatch(r"([0-9.eE+-]+)\s*([KMGT]?[Bb])(?:/s|ps)", text.strip())
    unit = (_BYTES | _BITS).get(match[2]) if match else None
    try:
        value = float(match[1]) if match else math.nan
    except ValueError:
        value = math.nan
    if unit is None or not 0 < value < math.inf:
        raise ConfigError(
            f"{name} is {text!r}; it must be a rate over 0 with its unit",
            hint="as 50GB/s or 400Gb/s",
        )
    return value * unit
