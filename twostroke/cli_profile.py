"""`twostroke profile`: what a step costs here, measured or read from what was recorded."""

import signal
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twostroke.cli_flags import ENGINE_ONLY, EngineFlags, with_engine_flags
from twostroke.errors import ConfigError

if TYPE_CHECKING:
    from twostroke.config import EngineConfig
    from twostroke.cost import LinkCost
    from twostroke.cost_fit import FitError
    from twostroke.cost_profile import Profile
    from twostroke.trace_steps import TracedLoad

# What decides how long a step takes, of all the settings.
_DECIDING = (
    "dtype",
    "device",
    "cpu_threads",
    "tensor_parallel_size",
    "data_parallel_size",
    "prefill",
    "decode",
    "max_num_batched_tokens",
    "async_scheduling",
)


@with_engine_flags(without=ENGINE_ONLY)
def profile(
    flags: EngineFlags,
    seconds: Annotated[
        float, typer.Option(help="how long to measure, beside starting", min=5.0)
    ] = 60.0,
    recorded: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            help="in place of measuring: traces of serve --trace (repeatable), or the directory of "
            "a recorded vLLM run",
        ),
    ] = None,
    gpu: Annotated[
        str, typer.Option(help="of a recorded vLLM run; default: as its directory's name begins")
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="file to write; default: in the cache, by model and device")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="the profile alone, as JSON")] = False,
) -> None:
    """Measure what a step costs, and what the processes around it add; write a profile.

    Starts the server that `serve` would with the same flags, sends it prompts of many sizes, fits,
    and checks the fit on a load of another kind. `serve --profile`, `twin --cost` and
    `diagnose --profile` read the file.
    """
    from twostroke.cost_profile import default_path

    settings, _ = flags.resolve()
    if recorded and recorded[0].is_dir():
        found = _read_vllm(recorded, gpu)
    elif recorded:
        found = _read(settings, recorded)
    else:
        found = _measure(settings, seconds, show=not json)

    path = out or default_path(found.model, found.device)
    found.save(path)
    if json:
        print(path.read_text())
    else:
        print(_summary(found))
        print(f"saved to {path}")


def _measure(settings: "EngineConfig", seconds: float, *, show: bool) -> "Profile":
    from twostroke.checkpoint import resolve
    from twostroke.cost_host import error_on, fit_costs
    from twostroke.cost_profile import Profile
    from twostroke.proc.bars import StageBars
    from twostroke.proc.profiling import device_name, device_peaks, measure

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server must not outlive us
    with StageBars() as bars:
        checkpoint = resolve(settings, bars.show)
    with _progress_bar(show) as bar:
        task = bar.add_task("measuring", total=1.0)
        seen = measure(
            settings,
            seconds=seconds,
            on_progress=lambda share: bar.update(task, completed=share),
        )
        peaks = device_peaks()
    cost, host, error = fit_costs(seen.trace, seen.waves, seen.relay_s)
    link, link_error = _link(seen.trace.loads)
    return Profile(
        model=checkpoint.served_name,
        device=device_name(),
        step=cost,
        step_error=error,
        held_out=error_on(cost, host, seen.held_out, seen.trace.inputs_s)
        if seen.held_out
        else None,
        host=host,
        link=link,
        link_error=link_error,
        peaks=peaks,
        settings={name: str(getattr(settings, name)) for name in _DECIDING},
    )


def _read(settings: "EngineConfig", paths: list[Path]) -> "Profile":
    """Fit to what was recorded: no client's times are known, so ingress and egress are 0."""
    from twostroke.cost_host import fit_costs
    from twostroke.cost_profile import Profile
    from twostroke.trace_steps import Trace, read_trace

    traces = [read_trace(path) for path in paths]
    steps = [step for trace in traces for step in trace.steps]
    link, link_error = _link([load for trace in traces for load in trace.loads])
    try:
        cost, host, error = fit_costs(Trace(steps, [], []), [])
    except ValueError as problem:
        raise ConfigError(f"{paths[0]}: {problem}") from None
    return Profile(
        model=settings.served_model_name or settings.model or "recorded",
        device=paths[0].stem,
        step=cost,
        step_error=error,
        host=host,
        link=link,
        link_error=link_error,
        settings={"recorded": ", ".join(map(str, paths))},
    )


def _read_vllm(paths: list[Path], gpu: str) -> "Profile":
    from twostroke.twin.hardware import find_gpu
    from twostroke.twin.models import find_shape
    from twostroke.twin.vllm_run import profile_of, read_run

    if len(paths) > 1:
        raise ConfigError(
            f"--from names {len(paths)} paths and the first is a directory",
            hint="give one recorded vLLM run at a time",
        )
    run = read_run(paths[0])
    return profile_of(run, find_shape(run.model), find_gpu(gpu or run.name.split("__")[0]))


def _link(loads: "list[TracedLoad]") -> "tuple[LinkCost | None, FitError | None]":
    """The link that KV went over, if any did."""
    from twostroke.cost_fit import fit_link_cost

    try:
        return fit_link_cost(
            [load.num_messages for load in loads],
            [load.num_bytes for load in loads],
            [load.end_s - load.start_s for load in loads],
        )
    except ValueError:  # there was none, or nothing can be told of it
        return None, None


def _summary(found: "Profile") -> str:
    """One line a share, then how far off it all is."""
    step, host = found.step, found.host
    tokens = [("a step", step.base_s * 1e3, "ms"), ("each token", step.token_s * 1e6, "us")]
    for it in step.regimes:
        tokens.append((f"one of over {it.beyond:.0f} tokens", it.jump_s * 1e3, "ms more"))
        tokens.append((f"each token beyond {it.beyond:.0f}", it.token_s * 1e6, "us"))
    rows = [
        ("each row", step.row_s * 1e6, "us"),
        ("each row that samples", step.sampled_s * 1e6, "us"),
        ("1,000 tokens of context", step.context_s * 1e9, "us"),
        ("of steps of few tokens", step.few_context_s * 1e9, "us more"),
        ("1,000,000 query-key pairs", step.attended_s * 1e12, "us"),
        ("between two steps", host.gap_s * 1e6, "us"),
        ("from P to D, beside transfers", host.handoff_s * 1e3, "ms"),
        ("with other rows than before", host.changed_s * 1e3, "ms more"),
        ("while a request comes", host.arrival_s * 1e3, "ms more"),
        ("and for each further one", host.arrivals_s * 1e3, "ms more"),
        ("after a pause", host.cold_s * 1e3, "ms more"),
        ("while another engine computes", host.beside_s * 1e3, "ms more"),
        ("for each step of its meanwhile", host.interrupted_s * 1e3, "ms more"),
        ("client to engine", (host.frontend_s + host.ingress_s) * 1e3, "ms"),
        ("engine to client", (host.egress_s + host.deliver_s) * 1e3, "ms"),
        ("of the first piece of an answer", host.deliver_first_s * 1e3, "ms more"),
    ]
    lines = [f"{found.model} on {found.device}"]
    rows = [*tokens, *(row for row in rows if row[1])]
    lines += [f"  {name:32}{value:12.2f} {unit}" for name, value, unit in rows]
    if found.link is not None:
        link = found.link
        rate = f"{link.bytes_per_s / 1e9:.2f} GB/s after {link.base_s * 1e3:.2f} ms"
        lines.append(f"  KV from engine to engine: {rate}; error: {found.link_error}")
    lines.append(f"error: {found.step_error}")
    if found.held_out is not None:
        lines.append(f"error on a load that was not fitted to: {found.held_out}")
    return "\n".join(lines)


def _progress_bar(show: bool) -> AbstractContextManager[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not show)
