"""What each number format costs in accuracy and brings in speed, side by side.

    python benchmarks/accuracy.py [MODEL] [--formats NAME,...] [--json]

Perplexity is over accuracy.txt, in steps of at most 4 tokens, so that weights of few bits are used
throughout (larger steps multiply in bfloat16; with int8, steps of any size are in 8 bits). 20
pieces of the text are continued greedily by 64 tokens, and compared with float32, which has the
weights as they are stored, dequantised to their last bit.

`few-bits` is the float32 engine with products of few bits, and shows what these alone change.
`as-stored` is what is served: the same products, with KV, attention and what goes through it in
bfloat16. `int8` and `int4` round the weights once more, and `int8` what they are multiplied with.

Two comparisons: answers as they came, of which tokens count up to where they part, so that one near
tie can cost 64 (parting is a near tie if float32 preferred its own token by less than 0.1 nats);
and token by token, whether float32, given the same text before, takes the same one. Speed is one
stream's, the median of 5 answers. Without MODEL, the default one.
"""

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

import few_bits_in_float32
from rich.progress import track

from twostroke import LLM, SamplingParams
from twostroke.bench import report

TEXT = Path(__file__).with_name("accuracy.txt")
STEP_TOKENS = 4
NUM_PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 20, 64, 64
NUM_TIMED = 5
NEAR_TIE = 0.1  # nats

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "quantization": "none"},
    "few-bits": {"dtype": "float32", "launch": few_bits_in_float32.launch},
    "bfloat16": {"dtype": "bfloat16", "quantization": "none"},
    "as-stored": {"dtype": "bfloat16", "quantization": "auto"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int8-kv": {"dtype": "bfloat16", "quantization": "none", "kv_cache_dtype": "int8"},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()

    names = options.formats.split(",")
    found = {name: measure(options.model, FORMATS[name]) for name in track(names, "formats")}
    reference = found.get("float32")
    choices = same_choices(options.model, found) if reference else {}
    rows = []
    for name, one in found.items():
        agreement = compare(reference["answers"], one["answers"]) if reference else {}
        one |= agreement | choices.get(name, {})
        rows.append(
            [
                name,
                f"{one['perplexity']:.3f}",
                f"{one['tokens_per_s']:.0f}",
                f"{one['weight_bytes'] / 1e6:.0f}",
                f"{one['equal']} of {NUM_PROMPTS}" if agreement else "-",
                f"{one['equal_tokens']:.1%}" if agreement else "-",
                f"{one['near_ties']} of {one['parted']}" if agreement else "-",
                f"{one['same_choices']:.2%}" if agreement else "-",
                f"{one['largest_loss']:.3f}" if agreement else "-",
            ]
        )
    heads = ["format", "perplexity", "tok/s", "weights MB", "equal answers", "tokens", "near ties"]
    heads += ["same text: tokens", "largest loss, nats"]
    print(report.table(heads, rows))
    if options.json:
        for one in found.values():
            del one["answers"], one["pieces"]
        print(report.json_line(found))


def measure(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    with LLM(model, max_num_seqs=1, max_num_batched_tokens=STEP_TOKENS, **settings) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        scored = engine.generate([TEXT.read_text()], params, use_tqdm=False)[0]
        logprobs = [entry.logprobs[0] for entry in scored.prompt_logprobs or [] if entry]
        tokens = scored.prompt_token_ids
        step = (len(tokens) - PROMPT_TOKENS) // NUM_PROMPTS
        pieces = [tokens[i * step : i * step + PROMPT_TOKENS] for i in range(NUM_PROMPTS)]
        answers = [
            engine.generate([piece], GREEDY, use_tqdm=False)[0].outputs[0] for piece in pieces
        ]
        speeds = [tokens_per_s(engine, pieces[i]) for i in range(NUM_TIMED)]
        facts = {name: value for name, value, _ in engine.engine.ready.facts}
    return {
        "perplexity": math.exp(-sum(logprobs) / len(logprobs)),
        "tokens_per_s": statistics.median(speeds),
        "weight_bytes": bytes_of(facts["Weights"]),
        "answers": answers,
        "pieces": pieces,
    }


def tokens_per_s(engine: LLM, piece: list[int]) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    start_s = time.perf_counter()
    engine.generate([piece[:32]], params, use_tqdm=False)
    return OUTPUT_TOKENS / (time.perf_counter() - start_s)


def same_choices(model: str, found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """How often float32, given what each format had before it, takes the token that it took, and
    how much more likely float32's own was at most."""
    score = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    out: dict[str, dict[str, float]] = {}
    with LLM(model, **FORMATS["float32"]) as engine:
        for name, one in found.items():
            losses = []
            for piece, answer in zip(one["pieces"], one["answers"], strict=True):
                text = [*piece, *answer.token_ids]
                entries = engine.generate([text], score, use_tqdm=False)[0].prompt_logprobs or []
                losses += [loss_of(entry) for entry in entries[len(piece) :]]
            same = sum(loss == 0 for loss in losses) / len(losses)
            out[name] = {"same_choices": same, "largest_loss": max(losses)}
    return out


def loss_of(entry: Any) -> float:
    """By how many nats the likeliest token is likelier than the one that was taken."""
    return max(entry.logprobs) - entry.logprobs[0]


def bytes_of(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]


def compare(expected: list[Any], found: list[Any]) -> dict[str, Any]:
    """Answers that are equal, and why the others part."""
    equal = parted = near_ties = equal_tokens = num_tokens = 0
    for mine, theirs in zip(expected, found, strict=True):
        num_tokens += len(mine.token_ids)
        pairs = zip(mine.token_ids, theirs.token_ids, strict=True)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if place is None:
            equal += 1
            equal_tokens += len(mine.token_ids)
            continue
        parted += 1
        equal_tokens += place
        entry = mine.logprobs[place]
        known = dict(zip(entry.token_ids, entry.logprobs, strict=True))
        gap = known[mine.token_ids[place]] - known.get(theirs.token_ids[place], -math.inf)
        near_ties += gap < NEAR_TIE
    return {
        "equal": equal,
        "parted": parted,
        "near_ties": near_ties,
        "equal_tokens": equal_tokens / num_tokens,
    }


if __name__ == "__main__":
    main()
