"""The article's own figures, and the map on few requests."""

import pytest

from twostroke.plan import article
from twostroke.plan.candidates import kv_layout


@pytest.fixture(scope="module")
def study() -> article.Study:
    return article.run(kv_gib=(0.25, 54.0), links=(4e9, 400e9), count=24)


def test_what_fits() -> None:
    layout = kv_layout(article.question(), article.TP)
    assert layout.token_bytes == 24 * 1024
    assert layout.block_bytes == 384 * 1024
    assert article.prompts_in_kv(layout, 0) == 288
    assert article.prompts_in_kv(layout, article.OUTPUT) == 256
    assert article.BUDGET // article.PROMPT == 8


def test_the_ratio_that_carries_it(study: article.Study) -> None:
    assert study.advised == (4, 7)
    assert study.one.binding.name == "decode KV"
    assert study.one.capacity_per_s == pytest.approx(10.0, rel=0.05)
    low, high = study.interval
    assert low < study.ratio < high
    assert study.ratio == pytest.approx(4 / 7, rel=0.1)


def test_small_pools_are_serial_and_large_ones_overlap(study: article.Study) -> None:
    by_place = {(it.kv_gib, it.link_bytes_per_s): it for it in study.cells}
    assert by_place[0.25, 4e9].slots == 1
    assert by_place[0.25, 4e9].overlap < 0.1
    assert by_place[54.0, 400e9].overlap > 0.5
    assert all(0 <= it.overlap <= 1 for it in study.cells)


def test_the_report(study: article.Study) -> None:
    text = study.text
    assert text.startswith("4P:7D of TP8 carries 65 req/s, up to ")
    assert "--kv-gib 54" in text
    for figure in ("24 KiB", "384 KiB", "288 prompts of 8k", "256 with", "8 prompts a batch"):
        assert figure in text
    assert max(map(len, text.splitlines())) <= 100
    assert study.as_dict()["requests_in_kv"] == 256


def test_the_page_stands_alone(study: article.Study) -> None:
    page = study.page()
    assert "<script" in page
    assert "src=" not in page.split("<body>")[1][:2000]
    assert "4P:7D" in page
    assert "{json}" not in page
