"""What the tests of kernels share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Torch runs as many threads, which the kernels take over."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
