"""`twostroke plan`: which layout to run. `twostroke diagnose`: why a running one is slow."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from twostroke.cli_flags import one_shot

Json = Annotated[bool, typer.Option("--json", help="print nothing but one JSON object")]
Html = Annotated[Path | None, typer.Option("--html", help="also write a report to this file")]


@one_shot()
def plan(
    model: Annotated[
        str, typer.Option(help="a known name, a config.json, a model directory or a .gguf file")
    ] = "",
    gpu: Annotated[str, typer.Option(help="H100, H200, A100, B200, L40S, ...")] = "",
    workload: Annotated[
        str, typer.Option(help="a trace, or a spec: poisson:65/s,in=8192,out=1024,n=325")
    ] = "",
    slo: Annotated[str, typer.Option(help="ttft=2s,tpot=50ms; either or both")] = "",
    gpus: Annotated[int, typer.Option(help="at most so many; 0: as few as it takes", min=0)] = 0,
    link: Annotated[
        str, typer.Option(help="network of one GPU: 50GB/s or 400Gb/s; default: the GPU's usual")
    ] = "",
    dtype: Annotated[str, typer.Option(help="of weights: bfloat16, float16, float8")] = "bfloat16",
    kv_cache_dtype: Annotated[str, typer.Option(help="or float16, float8, int8")] = "bfloat16",
    max_num_seqs: Annotated[int, typer.Option(min=1)] = 512,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1)] = 8192,
    gpu_memory_utilization: Annotated[float, typer.Option()] = 0.9,
    block_size: Annotated[int, typer.Option(min=1)] = 16,
    kv_mode: Annotated[
        Literal["pull", "stream"],
        typer.Option(help="pull: D reads a whole prompt; stream: chunk by chunk"),
    ] = "pull",
    checks: Annotated[int, typer.Option(help="layouts that the twin runs", min=0)] = 6,
    seed: Annotated[int, typer.Option()] = 0,
    example: Annotated[str, typer.Option(help="article: a worked case, with a map")] = "",
    json: Json = False,
    html: Html = None,
) -> None:
    """Find the layout: prefill and decode apart or together, how many, and how parallel."""
    from twostroke.errors import ConfigError
    from twostroke.plan import report
    from twostroke.plan.question import Engines, ask
    from twostroke.plan.search import search

    if example:
        if example != "article":
            raise ConfigError(f"there is no example {example!r}; known: article")
        from twostroke.plan.article import run

        with _progress(quiet=json) as show:
            study = run(show)
        report.show(study.as_dict(), study.text, study.page, json=json, html=html, name="article")
        return
    engines = Engines(
        dtype=dtype,
        kv_dtype=kv_cache_dtype,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_mode=kv_mode,
    )
    question = ask(model, gpu, workload, slo, gpus=gpus, link=link, engines=engines, seed=seed)
    with _progress(quiet=json) as show:
        found = search(question, progress=show, checks=checks)
    report.show_plan(found, json=json, html=html)
    if not found.options:
        raise typer.Exit(1)


def diagnose(
    source: Annotated[
        Path | None,
        typer.Argument(help="a ledger of requests, a twin run or an observation (JSON)"),
    ] = None,
    url: Annotated[str, typer.Option(help="a running twostroke server")] = "",
    prefill: Annotated[
        list[str] | None, typer.Option(help="a prefill engine of vLLM; repeat for more")
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(help="a decode engine of vLLM; repeat for more")
    ] = None,
    for_: Annotated[
        str, typer.Option("--for", help="how long to watch a running one: 60s, 5min")
    ] = "60s",
    slo: Annotated[str, typer.Option(help="ttft=2s,tpot=50ms")] = "",
    link: Annotated[str, typer.Option(help="rate of one engine's link: 400GB/s")] = "",
    model: Annotated[str, typer.Option(help="tells how large a token's KV is")] = "",
    tensor_parallel_size: Annotated[int, typer.Option(help="of D", min=0)] = 0,
    max_num_seqs: Annotated[int, typer.Option(help="of D", min=0)] = 0,
    turn_tokens: Annotated[int, typer.Option(help="new tokens of a usual next turn", min=0)] = 0,
    prefix_tokens: Annotated[int, typer.Option(help="length of a usual prefix hit", min=0)] = 0,
    profile: Annotated[
        Path | None, typer.Option(help="what twostroke profile wrote: step and transfer costs")
    ] = None,
    json: Json = False,
) -> None:
    """Answer nine questions about a deployment: what binds, what waits, and what to change."""
    from twostroke.plan import diagnose as doctor
    from twostroke.plan import report

    facts = doctor.facts(
        slo=slo,
        link=link,
        model=model,
        tensor_parallel_size=tensor_parallel_size,
        max_num_seqs=max_num_seqs,
        turn_tokens=turn_tokens,
        prefix_tokens=prefix_tokens,
    )
    with _progress(quiet=json) as show:
        seen = doctor.observe(source, url, prefill or [], decode or [], for_, show)
    seen = seen.with_facts(**facts)
    if profile is not None:
        seen = doctor.with_profile(seen, profile)
    diagnosis = doctor.diagnose(seen)
    report.show(diagnosis.as_dict(), diagnosis.text, None, json=json, html=None, name="diagnosis")


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str, float], None]]:
    """A bar on stderr, where that is a terminal; it leaves nothing behind."""
    if quiet or not sys.stderr.isatty():
        yield lambda label, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    # What changes its length stands last, or the bar would jump to and fro.
    columns: list[Any] = [BarColumn(), TaskProgressColumn(), TextColumn("{task.description}")]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda label, share: bar.update(task, description=label, completed=share)
