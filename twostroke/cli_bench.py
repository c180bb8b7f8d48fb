"""`twostroke bench`: load on a running server, or throughput of an engine without one.

Names of flags and results are vLLM's.
"""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from twostroke.bench.options import ServeOptions, ThroughputOptions
from twostroke.cli_flags import ONLINE_ONLY, EngineFlags, with_engine_flags, with_flags_of

bench_app = typer.Typer(
    help="Measure a server or an engine.", no_args_is_help=True, rich_markup_mode=None
)

Json = Annotated[bool, typer.Option("--json", help="one JSON object as the last line")]


@bench_app.command("serve")
@with_flags_of(ServeOptions)
def bench_serve(options: ServeOptions, json: Json = False) -> None:
    """Send requests to a running server; report its latencies and throughput."""
    import asyncio

    from twostroke.bench import report, serving

    with _progress_bar() as bar:
        task = bar.add_task("requests", total=options.num_prompts)
        result = asyncio.run(serving.measure(options, lambda outcome: bar.advance(task)))
    print(report.serving_block(result))
    for note in report.notes(result):
        print(note)
    if options.save_result:
        print(f"saved to {serving.save(result, options)}")
    if json:
        print(report.json_line(result))
    if not result["completed"]:
        raise typer.Exit(1)


@bench_app.command("throughput")
@with_engine_flags(ONLINE_ONLY)
@with_flags_of(ThroughputOptions)
def bench_throughput(flags: EngineFlags, options: ThroughputOptions, json: Json = False) -> None:
    """Run prompts through an engine in this process; report tokens per second."""
    from twostroke import LLM
    from twostroke.bench import offline, report

    settings, _ = flags.resolve()
    with LLM(**asdict(settings)) as engine, _progress_bar() as bar:
        case = offline.random_case(options, seed=settings.seed)
        bar.add_task(case.label, total=None)
        measured = offline.measure(engine, case, runs=options.runs)
    print(offline.table_of([measured]))
    if json:
        print(report.json_line(offline.result_of(measured)))


def _progress_bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=Console(stderr=True),
        transient=True,
    )
