"""What n-gram drafts bring where answers repeat their prompts: summaries, quotations, corrections.

    python benchmarks/speculative.py [MODEL] [--quantization auto] [--pairs 5] [--tokens 7] [--json]

Two engines, with and without drafts, answer the same prompts in turn, greedily; a pair of runs is
made back to back, so that a busy machine slows both, and the median of the pairs' ratios counts.
`decode` is the ratio of the time after first tokens, which drafts have no part in. CPU time is that
of the engine processes, which other processes disturb least. Without MODEL, the default one.
`--json` prints one JSON object as the last line. `--matches` tells instead how often guesses held
beside the chance that the rule gives them, at every token of answers without drafts.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import psutil

from twostroke import LLM, SamplingParams
from twostroke.bench import report
from twostroke.worker.draft_rows import guess

TEXTS = (
    """The town of Varn lies where the river Ost leaves the hills. Until 1874 it had no bridge, \
and carts crossed by a ferry that ran only when the water was low. In that year the \
merchant Elias Dorn paid for a bridge of seven stone arches, on the condition that no \
toll would ever be asked of anyone on foot. The bridge was opened on the third of May, \
and within ten years the number of inhabitants rose from two thousand to nine thousand. \
A flood in 1911 carried away the two middle arches. They were replaced by a single span \
of steel, which is still in use and gives the bridge its odd shape. Every year on the \
third of May the people of Varn walk across the bridge in a long line, without paying, \
and the mayor reads out the contract that Elias Dorn signed.""",
    """Bees that find a good meadow tell the others by dancing. On the dark surface of the comb \
the returning bee runs in a straight line while it shakes its body, turns back in a half \
circle, and runs the line again. The angle between the line and the vertical is the \
angle between the meadow and the sun. The length of the run gives the distance: about \
one second for each kilometre. Other bees follow the dancer closely and feel the \
movement with their antennae, because it is dark in the hive. When the sun moves, the \
dancer turns its line a little, although it cannot see the sky. If the meadow is closer \
than fifty metres, the bee runs in small circles and gives no direction at all. The \
followers then search around the hive until they find the smell that the dancer carried \
home.""",
    """The committee met on Tuesday at nine o'clock in the small hall. Mrs. Okafor reported \
that the repair of the roof would cost 48,000 euros, which is 6,000 more than planned, \
because the beams on the north side must be replaced. Mr. Lind proposed to use the money \
that was set aside for new chairs. Mrs. Okafor agreed, but asked that the chairs be \
bought next year without further debate. The proposal was accepted with seven votes to \
two. Mr. Haas then asked why the heating had been off during the concert of 12 March. \
The caretaker explained that a valve had been stuck and that it has been replaced since. \
The committee will meet again on 4 June. Until then Mr. Lind will collect three offers \
for the roof and send them to all members by the end of April.""",
)

TASKS = {
    "summarise": "Summarize the following text in a few sentences.",
    "quote": "Quote the three most important sentences of the following text, word for word.",
    "correct": "Correct all spelling mistakes in the following text and repeat the whole text.",
}


@dataclass
class Side:
    """One engine and its runs of one task."""

    llm: LLM
    process: psutil.Process
    times_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)  # of these, after first tokens
    cpu_s: list[float] = field(default_factory=list)
    num_tokens: int = 0

    def run(self, conversations: list[list[dict[str, str]]], batch: int, tokens: int) -> list:
        params = SamplingParams(temperature=0.0, max_tokens=tokens)
        self.llm.reset_prefix_cache()
        start_s, start_cpu_s = time.perf_counter(), self._cpu_s()
        results = []
        for i in range(0, len(conversations), batch):
            results += self.llm.chat(conversations[i : i + batch], params, use_tqdm=False)
        self.times_s.append(time.perf_counter() - start_s)
        self.cpu_s.append(self._cpu_s() - start_cpu_s)
        of_answers = [result.metrics for result in results]
        self.decode_s.append(sum(it.latency_s - (it.first_token_s or 0) for it in of_answers))
        answers = [result.outputs[0].token_ids for result in results]
        self.num_tokens = sum(map(len, answers))
        return answers

    def drafts(self) -> tuple[float, float]:
        """Draft tokens verified, and accepted, since start."""
        totals = {
            family.name.partition(":")[2]: family.samples[0].value
            for family in self.llm.engine.metrics.collect()
            if "spec_decode" in family.name
        }
        names = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
        verified, accepted = (totals.get(name, 0.0) for name in names)
        return verified, accepted

    def _cpu_s(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system


def started(make: Callable[[], LLM]) -> Side:
    before = set(psutil.Process().children())
    llm = make()
    return Side(llm, next(iter(set(psutil.Process().children()) - before)))


def measure(plain: Side, drafting: Side, task: str, options: argparse.Namespace) -> dict:
    conversations = [[{"role": "user", "content": f"{TASKS[task]}\n\n{text}"}] for text in TEXTS]
    sides = (plain, drafting)
    for side in sides:
        side.run(conversations, options.batch, 8)
        side.times_s.clear()
        side.decode_s.clear()
        side.cpu_s.clear()
    before = drafting.drafts()
    for pair in range(options.pairs):
        answers = [
            side.run(conversations, options.batch, options.length)
            for side in (sides if pair % 2 == 0 else sides[::-1])
        ]
    verified, accepted = (now - then for now, then in zip(drafting.drafts(), before, strict=True))
    return {
        "tokens_per_s": plain.num_tokens / statistics.median(plain.times_s),
        "tokens_per_s_drafts": drafting.num_tokens / statistics.median(drafting.times_s),
        "speed_up": _ratio(plain.times_s, drafting.times_s),
        "decode_speed_up": _ratio(plain.decode_s, drafting.decode_s),
        "cpu_speed_up": _ratio(plain.cpu_s, drafting.cpu_s),
        "accepted": accepted / verified if verified else 0.0,
        "accepted_per_token": accepted / options.pairs / drafting.num_tokens,
        "equal_answers": sum(a == b for a, b in zip(*answers, strict=True)),
        "output_tokens": drafting.num_tokens,
    }


def matches(llm: LLM, length: int, longest: int = 32) -> list[tuple[float, bool]]:
    """For each token of the answers for which there is a guess: its chance, and whether it held."""
    found, chances = [], np.zeros(1)
    params = SamplingParams(temperature=0.0, max_tokens=length)
    for task in TASKS.values():
        for text in TEXTS:
            message = {"role": "user", "content": f"{task}\n\n{text}"}
            result = llm.chat([message], params, use_tqdm=False)[0]
            tokens = np.array(result.prompt_token_ids + result.outputs[0].token_ids, np.int32)
            for end in range(len(result.prompt_token_ids), len(tokens)):
                known = np.append(tokens[:end], np.int32(-1))
                if guess(known, end, 1, longest, 1, 1.0, chances):
                    found.append((float(chances[0]), bool(known[end] == tokens[end])))
    return found


def print_matches(llm: LLM, length: int) -> None:
    print(f"{'chance':14}{'guesses':>10}{'rule':>10}{'held':>10}")
    found = matches(llm, length)
    bounds = (0.0, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 1.0)
    for low, high in itertools.pairwise(bounds):
        within = [(chance, held) for chance, held in found if low <= chance < high]
        if within:
            rule, held = (statistics.mean(column) for column in zip(*within, strict=True))
            print(f"{low:.2f} to {high:.2f}{len(within):12}{rule:10.1%}{held:10.1%}")


def _ratio(plain: list[float], drafting: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(plain, drafting, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=7, help="most drafts a step")
    parser.add_argument("--lookup", type=int, nargs=2, default=(1, 32), metavar=("MIN", "MAX"))
    parser.add_argument("--batch", type=int, default=1, help="prompts at once")
    parser.add_argument("--length", type=int, default=160, help="tokens of an answer")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto", help="none: all weights in --dtype")
    parser.add_argument("--threads", type=int, default=0, help="of the model; 0: all cores")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--matches", action="store_true", help="how often look-up is right")
    options = parser.parse_args()

    common = {
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "dtype": options.dtype,
        "quantization": options.quantization,
        "cpu_threads": options.threads,
    }
    plain = started(lambda: LLM(options.model, **common))
    if options.matches:
        with plain.llm:
            print_matches(plain.llm, options.length)
        return
    drafting = started(
        lambda: LLM(
            options.model,
            speculative_method="ngram",
            num_speculative_tokens=options.tokens,
            prompt_lookup_min=options.lookup[0],
            prompt_lookup_max=options.lookup[1],
            **common,
        )
    )
    with plain.llm, drafting.llm:
        results = {task: measure(plain, drafting, task, options) for task in TASKS}
        name = plain.llm.engine.model_name
    print(f"{name}, at most {options.tokens} drafts a step, medians of {options.pairs} pairs")
    titles = ("tok/s", "drafts", "ratio", "decode", "CPU ratio", "accepted", "equal")
    print(f"{'':12}" + "".join(f"{title:>10}" for title in titles))
    for task, row in results.items():
        print(
            f"{task:12}{row['tokens_per_s']:10.1f}{row['tokens_per_s_drafts']:10.1f}"
            f"{row['speed_up']:10.2f}{row['decode_speed_up']:10.2f}{row['cpu_speed_up']:10.2f}"
            f"{row['accepted']:10.1%}"
            f"{row['equal_answers']:6} of {len(TEXTS)}"
        )
    if options.json:
        settings = {key: value for key, value in vars(options).items() if key != "json"}
        print(report.json_line({**settings, "model": name, "tasks": results}))


if __name__ == "__main__":
    main()
