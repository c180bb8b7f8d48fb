"""Memory for weights, cut from chunks."""

import torch

from twostroke.model.memory import HugePages


def test_parts_do_not_overlap_and_outlive_their_maker() -> None:
    pages = HugePages()
    sizes = [1, 64, 1000, HugePages.CHUNK_BYTES - 4096, HugePages.CHUNK_BYTES + 1, 100]
    parts = [pages.empty(size) for size in sizes]
    del pages
    for value, part in enumerate(parts):
        part.fill_(value)
    for value, (size, part) in enumerate(zip(sizes, parts, strict=True)):
        assert part.shape == (size,)
        assert part.data_ptr() % 64 == 0
        assert torch.equal(part.unique(), torch.tensor([value], dtype=torch.uint8))
