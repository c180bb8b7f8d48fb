"""Fixtures for tests that run a model: one tiny random checkpoint for the whole run."""

from pathlib import Path

import pytest

from twostroke.download import fetch_default_model
from twostroke.errors import ModelError
from twostroke.testing.tiny_model import write_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file, fetched when it is not cached yet."""
    try:
        return fetch_default_model(offline=False)
    except ModelError as error:
        pytest.skip(f"the default model cannot be had: {error}")
