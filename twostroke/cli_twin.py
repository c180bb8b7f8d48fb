"""`twostroke twin`: a deployment under a load, on a virtual clock."""

from typing import Annotated

import typer

from twostroke.cli_flags import one_shot, with_flags_of
from twostroke.twin.options import TwinOptions

Json = Annotated[bool, typer.Option("--json", help="one JSON object as the last line")]


@with_flags_of(TwinOptions)
@one_shot()
def twin(options: TwinOptions, json: Json = False) -> None:
    """Simulate a deployment under a load with the engine's own scheduler, and say what binds.

    For example: twostroke twin --model Qwen3-30B-A3B --gpu H100 --prefill 4xTP8 --decode 7xTP8
    --workload poisson:65/s,in=8192,out=1024,n=325
    """
    from twostroke.errors import ConfigError
    from twostroke.twin.deploy import scenario_of
    from twostroke.twin.figures import figures_of, recorded, summary, text_report
    from twostroke.twin.scenario import simulate

    result = simulate(scenario_of(options))
    figures = figures_of(result, goodput=options.goodput)
    print(text_report(result, figures))
    try:
        if options.html is not None:
            from twostroke.twin.page import write_page

            write_page(result, options.html)
            print(f"report: {options.html}")
        if options.trace is not None:
            from twostroke.twin.page import write_trace

            write_trace(result, options.trace)
        if options.save_ledger is not None:
            import msgspec

            lines = b"".join(msgspec.json.encode(row) + b"\n" for row in recorded(result))
            options.save_ledger.write_bytes(lines)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from None
    if json:
        from twostroke.bench.report import json_line
        from twostroke.plan.twin_observation import observe

        seen = observe(result).as_dict()  # what `twostroke diagnose` reads
        print(json_line(summary(result, figures) | {"observation": seen}))
    if not result.done.any():
        raise typer.Exit(1)
