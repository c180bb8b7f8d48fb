"""Other engines beside ours on this machine: the same model, the same prompts, ratios in one run.

    python benchmarks/vs_peers.py [MODEL.gguf] --python llama.cpp=PATH --python vllm=PATH ...
        [--peers llama.cpp vllm openvino transformers] [--cases a,b,c,d,drafts,serve,start,memory]
        [--formats q4_1,bf16,int8] [--rounds 3] [--json]

A peer runs in an environment of its own, whose Python is named by --python; docs/peers.md says how
each is installed. Ours and theirs alternate, and what counts is the median of the ratios of the
pairs: how many times better ours is, so a busy machine slows both. Missing forms of the model are
written from the GGUF file once, into --models. int8: ours with --quantization int8, vLLM on a
checkpoint in W8A8, the others in bf16.
"""

import argparse
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from peers import serving
from peers.catalogue import OUR_FLAGS, OURS_FORMS, PEERS, Peer, command_of, our_command
from peers.forms import Forms
from peers.sides import Command, Side, SideError, running

from twostroke.bench import report
from twostroke.bench.offline import Case, peer_cases

THROUGHPUT = ("a", "b", "c", "d")
CASES = (*THROUGHPUT, "drafts", "serve", "start", "memory")
KV_BYTES_PER_TOKEN = 23_040  # SmolLM2-135M: 30 layers, 3 heads of 64, K and V, bf16
MEMORY_CASE = "c"
DISTURBED = 0.1  # share of the machine in other processes from which figures are doubtful


@dataclass
class Row:
    """One line of the result. `ours` and `theirs` hold a figure a round, in `unit`.

    `lower_is_better` tells which way the ratio goes: it is always how many times better ours is.
    `cpu_ratios` compares CPU time. `foreign` is the largest share of the machine that other
    processes had in a round: engines whose threads spin at barriers suffer from it many times over.
    """

    case: str
    peer: str
    weights: str
    unit: str
    lower_is_better: bool
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    cpu_ratios: list[float] = field(default_factory=list)
    foreign: float = 0.0

    def ratio(self) -> float:
        pairs = zip(self.ours, self.theirs, strict=True)
        return statistics.median(b / a if self.lower_is_better else a / b for a, b in pairs)

    def cells(self) -> list[str]:
        def shown(value: float) -> str:
            return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"

        cpu = f"{statistics.median(self.cpu_ratios):.2f}" if self.cpu_ratios else ""
        ours, theirs = (shown(statistics.median(side)) for side in (self.ours, self.theirs))
        label = f"{self.case}, {self.unit}"
        ratio, foreign = f"{self.ratio():.2f}", f"{self.foreign:.0%}" if cpu else ""
        return [label, self.peer, self.weights, ours, theirs, ratio, cpu, foreign]

    def result(self) -> dict[str, object]:
        return {**vars(self), "ratio": self.ratio()}


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


class Comparison:
    """What is compared with what, and the rows so far."""

    def __init__(self, options: argparse.Namespace, forms: Forms, logs: Path) -> None:
        self.options, self.forms, self.logs = options, forms, logs
        self.rows: list[Row] = []
        self.failures: list[str] = []
        self.versions: dict[str, str] = {}
        self.cases = [case for case in peer_cases() if case.name in options.cases]

    def run(self, peer: Peer, python: str) -> None:
        """All cases against one peer; a failure ends one weight format, not the comparison."""
        for weights, form in peer.model_forms.items():
            if weights not in self.options.formats:
                continue
            commands = (
                our_command(sys.executable, self.forms.path(OURS_FORMS[weights]), weights),
                command_of(peer, python, self.forms.path(form), weights),
            )
            for measure in (self.throughput, self.start, self.memory):
                with self._noting_failures():
                    measure(peer.name, weights, commands)
            if peer.name == "vllm" and "serve" in self.options.cases:
                with self._noting_failures():
                    self.serve(python, weights, form)

    def throughput(self, peer: str, weights: str, commands: tuple[Command, Command]) -> None:
        if not self.cases:
            return
        with self._sides(commands) as sides:
            for side in sides:
                for case in self.cases:
                    with running(side.processes):
                        side.warm_up(case)
            for case in self.cases:
                row = Row(case.name, peer, weights, "tok/s", lower_is_better=False)
                for number in range(self.options.rounds):
                    self._pair(row, case, sides, number)
                self.rows.append(row)

    def _pair(self, row: Row, case: Case, sides: list[Side], number: int) -> None:
        runs = []
        for side in sides:
            with running(side.processes):
                runs.append(side.run(case))
        # The rate that matters to a case's user: answers of a stream, else all tokens.
        tokens = case.num_output_tokens
        if case.name != "a":
            tokens += case.num_input_tokens
        row.ours.append(tokens / runs[0].elapsed_s)
        row.theirs.append(tokens / runs[1].elapsed_s)
        row.cpu_ratios.append(runs[1].cpu_s / max(runs[0].cpu_s, 1e-3))
        row.foreign = max(row.foreign, *(run.foreign for run in runs))
        self._say(f"{case.name} {row.weights}", row, number)

    def start(self, peer: str, weights: str, commands: tuple[Command, Command]) -> None:
        """From the command to the first token, in fresh processes."""
        if "start" not in self.options.cases:
            return
        row = Row("start", peer, weights, "s", lower_is_better=True)
        prompt = peer_cases()[0].prompts
        for number in range(-1, self.options.rounds):  # the first round fills caches
            times_s = []
            for command in commands:
                with self._sides((command,), paused=False) as (side,):
                    side.ask(prompt, 1)
                    times_s.append(time.perf_counter() - side.processes.start_s)
            if number >= 0:
                row.ours.append(times_s[0])
                row.theirs.append(times_s[1])
                self._say(f"start {weights}", row, number)
        self.rows.append(row)

    def memory(self, peer: str, weights: str, commands: tuple[Command, Command]) -> None:
        """Peak over what the work cannot do without: the weights' file, and the KV it writes."""
        if "memory" not in self.options.cases:
            return
        case = next(case for case in peer_cases() if case.name == MEMORY_CASE)
        tokens = case.num_input_tokens + case.num_output_tokens
        row = Row("memory", peer, weights, "MB over weights and KV", lower_is_better=True)
        for command, figures in zip(commands, (row.ours, row.theirs), strict=True):
            with self._sides((command,), paused=False) as (side,):
                side.run(case)
                needed = self.forms.weights_bytes(weights) + tokens * KV_BYTES_PER_TOKEN
                figures.append((side.processes.peak_bytes() - needed) / 1e6)
        self.rows.append(row)
        self._say(f"memory {weights}", row, 0)

    def serve(self, python: str, weights: str, form: str) -> None:
        units = ("mean TTFT, ms", "P99 TTFT, ms", "mean TPOT, ms", "P99 TPOT, ms")
        models = self.forms.path(OURS_FORMS[weights]), self.forms.path(form)
        say("starting both servers")
        with serving.servers(python, models, OUR_FLAGS.get(weights, ()), self.logs) as both:
            for index, rate in enumerate(serving.RATES):
                name = f"serve at {rate:.0f}/s"
                rows = [Row(name, "vllm", weights, unit, lower_is_better=True) for unit in units]
                for number in range(self.options.rounds):
                    seed = self.options.seed + len(serving.RATES) * number + index
                    count = max(4, round(rate * self.options.serve_s))
                    ours, theirs = (serving.measured(one, rate, count, seed) for one in both)
                    for row, metric in zip(rows, serving.METRICS, strict=True):
                        row.ours.append(ours[metric])
                        row.theirs.append(theirs[metric])
                    self._say(name, rows[0], number)
                self.rows += rows

    def drafts(self) -> None:
        """Ours with n-gram drafts beside ours without, on texts that repeat their prompts."""
        words = [sys.executable, str(Path(__file__).with_name("speculative.py"))]
        words += [str(self.forms.gguf), "--pairs", str(self.options.rounds)]
        say("drafts: ours with and without")
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            self.failures.append(f"drafts: speculative.py ended with {done.returncode}")
        print(done.stdout)

    @contextmanager
    def _sides(self, commands: tuple[Command, ...], *, paused: bool = True) -> Iterator[list[Side]]:
        with ExitStack() as stack:
            sides = []
            for command in commands:
                if paused:
                    say(f"starting {command.name}")
                log = self.logs / f"{command.name.replace(' ', '-')}.log"
                side = Side(command, log)
                stack.callback(side.close)
                self.versions[command.name.partition(" ")[0]] = side.version
                if paused:
                    side.processes.pause()
                sides.append(side)
            yield sides

    @contextmanager
    def _noting_failures(self) -> Iterator[None]:
        try:
            yield
        except SideError as error:
            self.failures.append(str(error))
            say(str(error))

    def _say(self, what: str, row: Row, number: int) -> None:
        pair = f"ours {row.ours[-1]:,.1f}, {row.peer} {row.theirs[-1]:,.1f}"
        say(f"{what}, round {number + 1} of {self.options.rounds}: {pair} {row.unit}")


def installed(options: argparse.Namespace) -> dict[str, str]:
    """The Python of each peer that can be measured; says how to install the others."""
    given = dict(pair.split("=", 1) for pair in options.python)
    found = {}
    for name in options.peers:
        python = given.get(name, sys.executable)
        if PEERS[name].is_in(python):
            found[name] = python
        else:
            print(PEERS[name].advice(), file=sys.stderr)
    return found


def parsed() -> argparse.Namespace:
    def chosen(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="", help="a .gguf file; default: SmolLM2")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS)
    parser.add_argument("--cases", type=chosen, default=list(CASES), help="separated by commas")
    parser.add_argument("--formats", type=chosen, default=["q4_1", "bf16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PATH")
    parser.add_argument(
        "--models", type=Path, default=Path("peers/models"), help="of the forms that are written"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the servers' prompts")
    parser.add_argument("--serve-s", type=float, default=30.0, help="seconds of load a rate")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    for case in options.cases:
        if case not in CASES:
            parser.error(f"unknown case: {case}; known: {', '.join(CASES)}")
    for weights in options.formats:
        if weights not in OURS_FORMS:
            parser.error(f"unknown format: {weights}; known: {', '.join(OURS_FORMS)}")
    for pair in options.python:
        name, equals, _ = pair.partition("=")
        if not equals or name not in PEERS:
            parser.error(f"--python {pair}: PEER=PATH expected, with one of {', '.join(PEERS)}")
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    return options


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # and end the sides
    options = parsed()
    pythons = installed(options)
    if not pythons and options.cases != ["drafts"]:
        sys.exit("no peer to compare with")
    forms = Forms.of(options.model, options.models, pythons.get("llama.cpp", ""))
    comparison = Comparison(options, forms, options.models)
    for name, python in pythons.items():
        comparison.run(PEERS[name], python)
    if "drafts" in options.cases:
        comparison.drafts()
    headers = ("case", "peer", "weights", "ours", "theirs", "ratio", "CPU ratio", "foreign")
    print(report.table(headers, [row.cells() for row in comparison.rows]))
    print("ratio: how many times better ours is, the median of", options.rounds, "pairs")
    print("versions:", ", ".join(f"{name} {one}" for name, one in comparison.versions.items()))
    disturbed = [row for row in comparison.rows if row.foreign > DISTURBED]
    if disturbed:
        print("other processes took much of the machine: repeat when it is quiet")
    for failure in comparison.failures:
        print(f"failed: {failure}")
    if options.json:
        rows = [row.result() for row in comparison.rows]
        print(report.json_line({"versions": comparison.versions, "rows": rows}))
    if comparison.failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
