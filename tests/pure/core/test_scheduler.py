"""Every recorded decision of vLLM 0.22.1's scheduler, step by step."""

from pathlib import Path

import pytest

from tests.replay import Replay, first_difference, load_directory

DATA = Path(__file__).parents[2] / "data"
WORKLOADS = dict(load_directory(DATA / "scheduler_workloads.tar.xz"))


@pytest.fixture(scope="module")
def traces():
    return dict(load_directory(DATA / "scheduler_traces.tar.xz"))


@pytest.mark.parametrize("name", WORKLOADS)
def test_decisions_equal_recorded(name, traces):
    assert first_difference(Replay(WORKLOADS[name]).run(), traces[name]) is None
