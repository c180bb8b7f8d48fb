"""`bench serve`: find the server's model, make the load, warm up, run, sum up, save."""

import datetime
import json
import math
from collections.abc import Callable
from pathlib import Path

import httpx

from twostroke.bench import load, stats, workload
from twostroke.bench.load import Outcome, Target
from twostroke.bench.options import ServeOptions
from twostroke.bench.stats import Result
from twostroke.bench.workload import Prompt
from twostroke.errors import ConfigError, TwostrokeError


async def measure(
    options: ServeOptions, on_done: Callable[[Outcome], None] = lambda outcome: None
) -> Result:
    """Run the load and return its figures, with what was asked for, under vLLM's keys.

    Raises ConfigError for wrong options or when no server answers, and TwostrokeError when the
    server refuses the warm-up: then no figure would mean anything.
    """
    goodput_ms = stats.parse_goodput(options.goodput)
    metrics = stats.parse_names(options.percentile_metrics)
    percentiles = stats.parse_percentiles(options.metric_percentiles)
    offsets_s = workload.arrival_offsets_s(
        options.num_prompts,
        request_rate=options.request_rate,
        burstiness=options.burstiness,
        seed=options.seed,
    )
    async with load.connect(options.base_url, options.api_key) as client:
        target = Target(
            model=options.model or await load.find_model(client),
            ignore_eos=options.ignore_eos,
            temperature=options.temperature,
        )
        vocab_size = options.vocab_size or await load.find_vocab_size(client)
        prompts = make_prompts(options, vocab_size)
        await _warm_up(client, target, options, vocab_size)
        outcomes, duration_s = await load.run(
            client,
            target,
            prompts,
            offsets_s[: len(prompts)],
            max_concurrency=options.max_concurrency,
            on_done=on_done,
        )
    figures = stats.summarise(
        outcomes, duration_s, metrics=metrics, percentiles=percentiles, goodput_ms=goodput_ms
    )
    first_error = next((outcome.error for outcome in outcomes if outcome.error), None)
    return {**_what_was_asked(options, target), **figures, "first_error": first_error}


def make_prompts(options: ServeOptions, vocab_size: int) -> list[Prompt]:
    """The prompts of the dataset that `options` names."""
    if options.dataset_name == "custom":
        if options.dataset_path is None:
            raise ConfigError("--dataset-name custom needs a file", hint="name it: --dataset-path")
        return workload.prompts_from_file(
            options.dataset_path, options.num_prompts, output_tokens=options.custom_output_len
        )
    if options.dataset_name != "random":
        raise ConfigError(f"--dataset-name is {options.dataset_name!r}; choices: random, custom")
    return _random(options, options.num_prompts, vocab_size, options.seed)


def _random(options: ServeOptions, count: int, vocab_size: int, seed: int) -> list[Prompt]:
    return workload.random_prompts(
        count,
        input_tokens=options.random_input_len,
        output_tokens=options.random_output_len,
        prefix_tokens=options.random_prefix_len,
        range_ratio=options.random_range_ratio,
        vocab_size=vocab_size,
        seed=seed,
    )


async def _warm_up(
    client: httpx.AsyncClient, target: Target, options: ServeOptions, vocab_size: int
) -> None:
    """Prompts of the same lengths, but others: they must leave no prefix behind for the run."""
    for prompt in _random(options, options.num_warmups, vocab_size, options.seed ^ 0x5EED):
        outcome = await load.send(client, target, prompt)
        if outcome.error:
            raise TwostrokeError(
                f"the server failed the warm-up request: {outcome.error}",
                hint="see its log; --random-input-len plus --random-output-len must fit the model",
            )


def _what_was_asked(options: ServeOptions, target: Target) -> Result:
    """JSON has no infinity, so an infinite rate is the text "inf", as in vLLM's files."""
    rate = options.request_rate
    return {
        "date": f"{datetime.datetime.now():%Y%m%d-%H%M%S}",
        "backend": "openai",
        "model_id": target.model,
        "num_prompts": options.num_prompts,
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "dataset_name": options.dataset_name,
        "seed": options.seed,
    }


def save(result: Result, options: ServeOptions) -> Path:
    """Write the result to a file, named as vLLM names it, and return its path."""
    model = str(result["model_id"]).rpartition("/")[2]
    busy = f"-concurrency{options.max_concurrency}" if options.max_concurrency else ""
    name = f"openai-{options.request_rate}qps{busy}-{model}-{result['date']}.json"
    path = options.result_dir / (options.result_filename or name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write the result to {path}: {error.strerror}") from None
    return path
