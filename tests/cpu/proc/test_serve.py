"""The processes as a whole: they start, serve, stop, and die as they should, and leave nothing."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.cpu.proc.serving import Served, serving

SMALL = ("--max-num-seqs", "8", "--max-model-len", "512", "--num-gpu-blocks-override", "129")


def leftovers(tmp: Path) -> list[str]:
    shm = [p.name for p in Path("/dev/shm").iterdir() if "twostroke" in p.name]
    return shm + [p.name for p in tmp.iterdir() if p.name.startswith("twostroke-")]


def complete(served: Served, prompt: str, **fields: object) -> dict:
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True} | fields
    with served.client() as client:
        reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serves_and_stops_cleanly(tiny_dir: Path, tmp_path: Path, number: signal.Signals) -> None:
    with serving(tiny_dir, *SMALL, TMPDIR=str(tmp_path)) as served:
        client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
        with client:
            answer = client.chat.completions.create(
                model="default", messages=[{"role": "user", "content": "hi"}], max_tokens=8
            )
        assert answer.usage is not None
        assert 1 <= answer.usage.completion_tokens <= 8
        children = served.descendants()
        assert children
        assert served.stop(number) == 0
    assert not psutil.wait_procs(children, timeout=0)[1]
    assert leftovers(tmp_path) == []
    assert "Traceback" not in served.output


def test_a_signal_lets_running_requests_finish(tiny_dir: Path) -> None:
    with serving(tiny_dir, *SMALL) as served:
        tokens = 0
        with (
            served.client() as client,
            client.stream(
                "POST",
                "/v1/completions",
                json={"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True},
            ) as reply,
        ):
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    if not tokens:
                        served.process.send_signal(signal.SIGTERM)
                    tokens += 1
        assert "[DONE]" in line or tokens
        assert served.wait() == 0
    assert tokens > 1


@pytest.mark.parametrize("stream", [True, False])
def test_signals_to_the_whole_group_end_requests_with_an_error(
    tiny_dir: Path, tmp_path: Path, stream: bool
) -> None:
    """As Ctrl-C in a terminal, `timeout` and systemd send them; also again and again."""
    body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": stream}
    answers = []
    with serving(tiny_dir, *SMALL, TMPDIR=str(tmp_path)) as served:

        def ask() -> None:
            with served.client() as client:
                answers.append(client.post("/v1/completions", json=body))

        asking = threading.Thread(target=ask)
        asking.start()
        with served.client() as client:
            while not any(slot["num_output_tokens"] > 1 for slot in client.get("/slots").json()):
                assert asking.is_alive(), answers
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.killpg(served.process.pid, number)
        asking.join(30)
        assert served.wait() == 0
    (answer,) = answers
    assert answer.status_code == (200 if stream else 503)
    assert "shut down" in answer.text.splitlines()[-2 if stream else 0]
    assert "Traceback" not in served.output
    assert "ERROR" not in served.output
    assert leftovers(tmp_path) == []


def test_the_core_is_killed(tiny_dir: Path) -> None:
    with serving(tiny_dir, *SMALL, "--max-model-len", "512") as served:
        errors: list[object] = []
        streaming = threading.Event()

        def wait_for_tokens() -> None:
            body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
            with (
                served.client() as client,
                client.stream("POST", "/v1/completions", json=body) as reply,
            ):
                for line in reply.iter_lines():
                    streaming.set()
                    if "error" in line:
                        errors.append(json.loads(line.removeprefix("data: "))["error"])

        waiting = threading.Thread(target=wait_for_tokens)
        waiting.start()
        assert streaming.wait(30)
        served.core().kill()
        killed_s = time.monotonic()
        with served.client() as client:
            while client.get("/health").status_code == 200:
                assert time.monotonic() < killed_s + 2, "health did not turn 503 within 2 s"
            assert client.get("/health").status_code == 503
            refused = client.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503
        waiting.join(10)
        assert not waiting.is_alive()
        assert served.wait() != 0
    assert len(errors) == 1


@pytest.mark.parametrize(
    "worker", [(), ("--worker-process",), ("--tensor-parallel-size", "2")], ids=str
)
def test_the_api_process_is_killed(tiny_dir: Path, tmp_path: Path, worker: tuple[str, ...]) -> None:
    with serving(tiny_dir, *SMALL, *worker, TMPDIR=str(tmp_path)) as served:
        children = served.descendants()
        num_workers = 2 if "2" in worker else len(worker)
        assert len(children) == 1 + num_workers
        served.process.kill()
        assert not psutil.wait_procs(children, timeout=5)[1], "children outlived their parent"
    assert leftovers(tmp_path) == []


def test_the_worker_process_is_killed(tiny_dir: Path) -> None:
    with serving(tiny_dir, *SMALL, "--worker-process") as served:
        complete(served, "a")
        worker = next(
            p for p in served.descendants() if "twostroke.proc.worker_main" in p.cmdline()
        )
        worker.kill()
        with served.client() as client:
            reply = client.post("/v1/completions", json={"prompt": "b"})
            assert reply.status_code == 503
        assert served.wait() != 0


def test_port_in_use(tiny_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "twostroke.cli", "serve", str(tiny_dir), "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=30,
        )
    assert done.returncode == 2
    assert f"port {port}" in done.stderr
    assert "in use" in done.stderr
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_cannot_load_ends_the_server(tiny_dir: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_dir.iterdir():
        data = file.read_bytes()
        (broken / file.name).write_bytes(data[:-100] if file.suffix == ".safetensors" else data)
    done = subprocess.run(
        [sys.executable, "-m", "twostroke.cli", "serve", str(broken), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3
    assert "safetensors" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [("--no-async-scheduling",), ("--worker-process",), ("--no-enable-prefix-caching",)],
)
def test_same_tokens_in_every_arrangement(tiny_dir: Path, arguments: tuple[str, ...]) -> None:
    prompts = ["one", "another prompt, a little longer", "one"]
    texts = []
    for extra in ((), arguments):
        with serving(tiny_dir, *SMALL, "--dtype", "float32", *extra) as served:
            texts.append([complete(served, prompt)["choices"][0]["text"] for prompt in prompts])
            assert served.stop() == 0
    assert texts[0] == texts[1]
    assert all(texts[0])


def test_trace_shows_three_threads_and_the_worker_overlapping(
    tiny_dir: Path, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    with serving(tiny_dir, *SMALL, "--trace", str(path)) as served:
        complete(served, "a", max_tokens=64)
        assert served.stop() == 0
    everything = json.loads(path.read_text())
    processes = {e["args"]["name"]: e["pid"] for e in everything if e["name"] == "process_name"}
    assert set(processes) == {"engine core 0", "requests"}
    events = [e for e in everything if e["pid"] == processes["requests"]]
    life = [e["name"] for e in events if e["ph"] == "X"]
    assert life[:2] == ["frontend", "queue"]
    assert life[-3:] == ["prefill", "decode", "egress"]
    events = [e for e in everything if e["pid"] == processes["engine core 0"]]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(tracks.values()) == {"input", "main", "output", "worker"}
    spans = {
        (tracks[e["tid"]], e["name"]): (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e["ph"] == "X"
    }
    steps = {name: span for (track, name), span in spans.items() if track == "worker"}
    planned_ahead = 0
    for name, (_, step_end) in steps.items():
        number = int(name.split()[1])
        plan = spans.get(("main", f"plan {number + 1}"))
        planned_ahead += plan is not None and plan[1] <= step_end
    assert planned_ahead > len(steps) // 2, "steps were not planned ahead of the device"


def test_a_thousand_requests_with_random_aborts_leak_nothing(tiny_dir: Path) -> None:
    """Clients that go away at any moment: every block comes back and memory stays."""
    import asyncio
    import random

    rng = random.Random(0)

    async def one(client: httpx.AsyncClient, index: int) -> None:
        body = {
            "prompt": "x" * rng.randint(1, 200),
            "max_tokens": rng.randint(1, 40),
            "stream": rng.random() < 0.7,
            "n": rng.choice([1, 1, 2]),
            "temperature": rng.choice([0, 1]),
        }
        patience_s = rng.choice([0.001, 0.01, 0.05, 0.2, 60])
        try:
            async with asyncio.timeout(patience_s):
                async with client.stream("POST", "/v1/completions", json=body) as reply:
                    async for _ in reply.aiter_bytes():
                        pass
                assert reply.status_code in (200, 429)
        except TimeoutError:
            pass

    async def storm(url: str, count: int) -> None:
        limits = httpx.Limits(max_connections=32)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as client:
            await asyncio.gather(*(one(client, i) for i in range(count)))

    def idle_blocks(served: Served) -> None:
        with served.client() as client:
            deadline_s = time.monotonic() + 20
            while client.get("/slots").json() != []:
                assert time.monotonic() < deadline_s, client.get("/slots").text
            metrics = client.get("/metrics").text
        usage = [line for line in metrics.splitlines() if "kv_cache_usage_perc{" in line]
        assert len(usage) == 1
        assert float(usage[0].split()[-1]) == 0.0

    with serving(tiny_dir, *SMALL, "--check") as served:
        asyncio.run(storm(served.url, 200))
        idle_blocks(served)
        core = served.core()
        before = core.memory_info().rss
        asyncio.run(storm(served.url, 800))
        idle_blocks(served)
        grown = core.memory_info().rss - before
        assert grown < 32 << 20, f"the engine core grew by {grown >> 20} MiB"
        complete(served, "still well")
        assert served.stop() == 0
    assert "Traceback" not in served.output
