"""Texts into values of settings; what `config` does with them is in test_config.py."""

import pytest

from twostroke.config_values import parse_rate
from twostroke.errors import ConfigError


def test_rates_are_in_bytes_or_bits() -> None:
    assert parse_rate("50GB/s", "--link") == 50e9
    assert parse_rate("400Gb/s", "--link") == parse_rate("400Gbps", "--link") == 50e9
    assert parse_rate("12.5 MB/s", "--link") == 12.5e6


@pytest.mark.parametrize("text", ["50", "fast", "0GB/s", "-1GB/s", "50GB", "nanGB/s", "1e5e5GB/s"])
def test_wrong_rates_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--link is"):
        parse_rate(text, "--link")
