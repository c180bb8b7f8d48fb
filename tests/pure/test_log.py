import logging
import sys

import pytest

from twostroke import log


@pytest.fixture(autouse=True)
def root_logger():
    """The root logger as it was, afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("twostroke").setLevel(logging.NOTSET)


def test_our_level_is_ours_and_libraries_are_heard_from_warning_up(capsys):
    log.setup("info")
    logging.getLogger("twostroke.core").info("loaded %d", 3)
    logging.getLogger("twostroke.core").debug("detail")
    logging.getLogger("library").info("chatter")
    logging.getLogger("library").warning("trouble")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2] for line in lines] == ["loaded 3", "trouble"]
    assert " INFO " in lines[0]
    assert "twostroke.core" in lines[0]


def test_a_second_set_up_replaces_the_first(capsys):
    log.setup("error")
    log.setup("debug")
    logging.getLogger("twostroke").debug("once")
    assert capsys.readouterr().err.count("once") == 1


def test_on_a_terminal_lines_are_short_and_markup_is_text(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    log.setup("info")
    logging.getLogger("twostroke").info("GET [b]/x[/b]")
    shown = capsys.readouterr().err
    assert "GET [b]/x[/b]" in shown
    assert "twostroke:" not in shown
