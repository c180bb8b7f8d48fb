"""Logging of every process: coloured on a terminal, one plain line an event otherwise.

Only our own loggers follow `--log-level`; libraries are heard from WARNING up. What a line about a
finished request says is decided where it is written, not here.
"""

import logging
import sys

PLAIN_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"


def setup(level: str) -> None:
    """Send log records to standard error. Calling it again replaces what was set up before.

    `level` is one of debug, info, warning, error.
    """
    handler = _terminal_handler() if sys.stderr.isatty() else _plain_handler()
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("twostroke").setLevel(level.upper())


def _plain_handler() -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(PLAIN_FORMAT))
    return handler


def _terminal_handler() -> logging.Handler:
    from rich.console import Console
    from rich.highlighter import NullHighlighter
    from rich.logging import RichHandler

    handler = RichHandler(
        console=Console(stderr=True),
        show_path=False,
        log_time_format="%H:%M:%S",
        highlighter=NullHighlighter(),
        keywords=[],
        rich_tracebacks=False,
    )
    handler.setFormatter(logging.Formatter("%(message)s"))
    return handler
