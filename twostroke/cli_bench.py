"""`twostroke bench`: load on a running server, or throughput of an engine without one.

Names of flags and results are vLLM's.
"""

import contextlib
import functools
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from twostroke.bench.options import ServeOptions, StepOptions, ThroughputOptions, TransferOptions
from twostroke.cli_flags import ONLINE_ONLY, EngineFlags, with_engine_flags, with_flags_of
from twostroke.errors import ConfigError

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


@bench_app.command("step")
@with_engine_flags(ONLINE_ONLY)
@with_flags_of(StepOptions)
def bench_step(flags: EngineFlags, options: StepOptions, json: Json = False) -> None:
    """Show where the time of a worker's step goes, kernel by kernel, beside the machine's limit."""
    import os
    import sys

    from twostroke.proc.start import CHILD_ENVIRONMENT

    if CHILD_ENVIRONMENT.keys() - os.environ.keys():  # read when a process begins, so begin again
        os.execve(sys.executable, sys.orig_argv, CHILD_ENVIRONMENT | os.environ)
    settings, _ = flags.resolve()
    from twostroke import checkpoint
    from twostroke.bench import report, step_report
    from twostroke.proc.step_timing import StepTimer

    with _progress_bar() as bar:
        task = bar.add_task("loading", total=len(options.rows))
        timer = StepTimer(settings, checkpoint.resolve(settings))
        ceilings, steps = timer.ceilings(), []
        for rows in options.rows:
            bar.update(task, description=f"{rows} requests")
            steps.append(timer.measure(rows, options.tokens, options.context))
            bar.advance(task)
    int8 = ceilings.int8_gflop_per_s
    print(
        f"memory gives {ceilings.read_gb_per_s:.1f} GB/s, large products reach "
        f"{ceilings.gflop_per_s:,.0f} GFLOP/s{f', in int8 {int8:,.0f}' if int8 else ''}\n"
    )
    print("\n\n".join(step_report.table_of(step, ceilings) for step in steps))
    if json:
        print(report.json_line(step_report.result_of(steps, ceilings)))


@bench_app.command("transfer")
@with_flags_of(TransferOptions)
def bench_transfer(options: TransferOptions) -> None:
    """Read scattered blocks from another process; report bandwidth by size of block."""
    import json
    import platform

    from twostroke.bench import transfer, transfer_report
    from twostroke.proc import transfer_link

    if options.serve:
        for address in transfer_link.serve(options):
            command = f"twostroke bench transfer --transport nixl --peer {address} --key FILE"
            print(f"on the other host: {command} --pool {options.pool}", flush=True)
            _wait_for_interrupt()
        return
    plan = transfer.Plan.of(options)
    results = []
    with _progress_bar() as bar:
        task = bar.add_task("memcpy", total=len(plan.cases) * len(plan.transports))
        if options.line_gbps:
            reference = transfer.reference_of(None, plan, options)
        else:
            with transfer_link.opened("memcpy", options) as memcpy:
                reference = transfer.reference_of(memcpy, plan, options)
        for name in plan.transports:
            bar.update(task, description=name)
            tick = functools.partial(bar.advance, task)
            with transfer_link.opened(name, options) as link:
                results.append(transfer.measure(link, reference, plan, options, tick))
    print("\n\n".join(transfer_report.text_of(result) for result in results))
    if options.json:
        found = transfer.result_of(results, options, platform.node())
        _write(options.json, json.dumps(found, indent=1) + "\n")
    if options.plot:
        _write(options.plot, transfer_report.svg_of(results))


def _wait_for_interrupt() -> None:
    import signal

    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    print(f"written to {path}")


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
