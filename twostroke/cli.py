"""The command line. Sub-commands import what they need inside functions, so that help is instant.

Errors meant for users end as one red line and an exit code, never as a traceback: 2 for settings,
3 for models, 1 for the rest.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from twostroke import __version__
from twostroke.cli_bench import bench_app
from twostroke.cli_chat import API_KEY, URL, chat
from twostroke.cli_flags import ENGINE_ONLY, SERVER_ONLY, EngineFlags, with_engine_flags
from twostroke.cli_plan import diagnose, plan
from twostroke.cli_profile import profile
from twostroke.cli_twin import twin
from twostroke.config import SECRET_FIELDS
from twostroke.errors import ConfigError, ModelError, TwostrokeError

app = typer.Typer(
    name="twostroke",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: boxes cut off long flags at 80 columns
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"twostroke {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """An LLM serving engine: OpenAI's API on the machine at hand."""


def main() -> None:
    """Entry point of the `twostroke` command."""
    try:
        app()
    except TwostrokeError as error:
        from rich.console import Console

        console = Console(stderr=True, soft_wrap=True)
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        sys.exit(exit_code(error))


def exit_code(error: TwostrokeError) -> int:
    """2 for a setting that cannot work, 3 for a model, 1 for anything else."""
    if isinstance(error, ConfigError):
        return 2
    return 3 if isinstance(error, ModelError) else 1


@app.command()
@with_engine_flags(without=ENGINE_ONLY)
def serve(flags: EngineFlags) -> None:
    """Serve a model over OpenAI's API. Without MODEL a small one that is fetched once."""
    settings, explained = flags.resolve()

    from twostroke.proc.start import serve as run_server

    raise typer.Exit(run_server(settings, explained))


@app.command()
@with_engine_flags(without=SERVER_ONLY)
def engine(flags: EngineFlags) -> None:
    """Run one engine for a server elsewhere (--join), which was started with --engines-listen."""
    settings, _ = flags.resolve()

    from twostroke.proc.engine_main import run

    raise typer.Exit(run(settings))


@app.command()
def key(file: Annotated[Path, typer.Argument(help="where to write it; must not exist")]) -> None:
    """Make a key, which a server and the engines that join it share."""
    from twostroke.keys import write_key

    write_key(file)
    print(f"{file} holds a new key; copy it, unread by others, to each host of an engine")


app.command()(chat)
app.command()(profile)
app.command()(plan)
app.command()(diagnose)
app.command()(twin)
app.add_typer(bench_app, name="bench")


@app.command("config")
@with_engine_flags()
def show_config(
    flags: EngineFlags,
    explain: Annotated[
        bool, typer.Option("--explain", help="also each value's source, and its meaning")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="as one JSON object")] = False,
) -> None:
    """Print the settings as a file for --config.

    They are what flags, --config and the environment (TWOSTROKE_MAX_NUM_SEQS=8) give together. What
    only a running engine knows, as the size of the KV pool, it tells at start and under /props.
    """
    _, explained = flags.resolve()
    if json:
        from dataclasses import asdict
        from json import dumps

        rows = [asdict(setting) for setting in explained]
        print(dumps(rows if explain else {row["name"]: row["value"] for row in rows}))
    elif explain:
        lines = [[it.name, _toml(it.value), it.source, it.reason] for it in explained]
        changed = [it.source != "default" for it in explained]
        _print_table(["setting", "value", "source", "why"], lines, bold=changed)
    else:
        for it in explained:
            secret = it.name in SECRET_FIELDS and it.value
            print(f"# {it.name} is set" if secret else f"{it.name} = {_toml(it.value)}")


@app.command()
def ps(url: URL = "http://127.0.0.1:8000", api_key: API_KEY = "") -> None:
    """What a running server works on: one line a request."""
    from twostroke.cli_chat import connect, get_json

    with connect(url, api_key) as client:
        slots = get_json(client, "/slots")
    if not slots:
        print("no requests")
        return
    lines = [
        [f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in slot.values()]
        for slot in slots
    ]
    _print_table(list(slots[0]), lines)


def _toml(value: Any) -> str:
    from json import dumps

    return dumps(value)  # text, numbers and booleans are written alike in both


def _print_table(
    headers: list[str], rows: list[list[str]], bold: Sequence[bool] | None = None
) -> None:
    """Columns padded to their widest cell. Lines are never cut: in a pipe they stay whole."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    for index, cells in enumerate([headers, *rows]):
        line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        strong = index == 0 or (bold is not None and bold[index - 1])
        typer.secho(line.rstrip(), bold=strong)


if __name__ == "__main__":
    main()
