"""Nine verdicts on deployments whose trouble is known: said where it is so, and only there."""

from collections import Counter

import pytest

from tests.cpu.plan.scenarios import KNOWN, Known
from twostroke.advice.verdict import NAMES
from twostroke.advice.verdicts import judge

FEWEST = 3  # of either kind, for each verdict
QUIET = {"nothing", "good", "keep", "far", "no", "neither", "recompute", "prefill", "fits"}


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.name)
def test_the_cause_is_named(known: Known) -> None:
    found = {it.name: it for it in judge(known.observe())}
    wrong = {
        name: (found[name].answer, found[name].evidence)
        for name, answer in known.expects.items()
        if found[name].answer != answer
    }
    assert not wrong
    for name, answer in known.expects.items():
        assert found[name].calls_for_action == (answer not in QUIET)
        assert found[name].confidence != "none"


def test_the_table_has_enough_of_both_kinds() -> None:
    table = Counter(
        (name, answer not in QUIET) for known in KNOWN for name, answer in known.expects.items()
    )
    lacking = [
        (name, kind) for name in NAMES for kind in (True, False) if table[name, kind] < FEWEST
    ]
    assert not lacking
