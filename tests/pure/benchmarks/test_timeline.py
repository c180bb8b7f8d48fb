"""What spans of time have in common, and where a picture puts them."""

import importlib.util
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

PATH = Path(__file__).parents[3] / "benchmarks" / "timeline.py"


def load_timeline() -> ModuleType:
    spec = importlib.util.spec_from_file_location("timeline", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


timeline = load_timeline()
spans = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda it: (it[0], it[0] + it[1])),
    max_size=8,
)


def ticks_of(some):
    return {tick for start, end in some for tick in range(start, end)}


def test_spans_that_touch_are_one():
    assert timeline.merged([(4, 6), (0, 2), (2, 3), (1, 2)]) == [(0, 3), (4, 6)]
    assert timeline.merged([]) == []


def test_overlap_counts_each_moment_once():
    steps = [(0.0, 1.0), (1.5, 2.5), (2.0, 3.0)]
    assert timeline.overlap([(0.5, 2.25), (2.0, 2.5)], steps) == 0.5 + 1.0
    assert timeline.overlap([(1.0, 1.5)], steps) == 0


@given(some=spans, others=spans)
def test_overlap_is_that_of_single_moments(some, others):
    assert timeline.length(some) == len(ticks_of(some))
    assert timeline.overlap(some, others) == len(ticks_of(some) & ticks_of(others))
    assert timeline.overlap(some, others) == timeline.overlap(others, some)


def test_a_picture_clips_spans_to_its_axis():
    picture = timeline.Picture()
    axis = timeline.Axis(picture, 10.0, 20.0, left=50)
    axis.bar((5.0, 15.0), 0, "#123456", "early & late")
    axis.bar((21.0, 22.0), 0, "#abcdef", "outside")
    axis.bar((12.0, 12.01), 0, "#123456", "", label="no room for this")
    axis.draw(40, [(10.0, "0 ms")])
    root = ElementTree.fromstring(picture.svg(60))
    name = "{http://www.w3.org/2000/svg}rect"
    _, first, narrow = root.iter(name)
    middle = 50 + (timeline.WIDTH - timeline.RIGHT - 50) / 2
    assert (float(first.get("x")), float(first.get("width"))) == (50, middle - 50)
    assert float(narrow.get("width")) == 1.5
    assert [it.text for it in root.iter(name.replace("rect", "text"))] == ["0 ms"]
