"""Fixtures for tests that run a model: one tiny random checkpoint for the whole run."""

from pathlib import Path

import pytest

from twostroke.testing.tiny_model import write_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-llama")
