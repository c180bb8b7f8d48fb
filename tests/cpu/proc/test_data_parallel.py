"""Several engine processes behind one server: spread, affinity, one engine's death, the end."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.cpu.proc.serving import Served, serving
from tests.cpu.proc.test_serve import SMALL, complete, leftovers
from twostroke import LLM, SamplingParams
from twostroke.testing.tiny_model import write_tiny_checkpoint

TWO = (*SMALL, "--dtype", "float32", "--data-parallel-size", "2")
PROMPTS = [f"{i} is the number of this prompt" for i in range(8)]


def served_by(served: Served) -> list[int]:
    """Ended requests of each engine."""
    with served.client() as client:
        text = client.get("/metrics").text
    counts = [
        (int(sample.labels["engine"]), int(sample.value))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "twostroke:e2e_request_latency_seconds_count"
    ]
    return [count for _, count in sorted(counts)]


def test_two_engines_serve_as_one(tiny_dir: Path, tmp_path: Path) -> None:
    with LLM(str(tiny_dir), dtype="float32", max_num_seqs=8, max_model_len=512) as llm:
        params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
        alone = [r.outputs[0].text for r in llm.generate(PROMPTS, params, use_tqdm=False)]
    with serving(tiny_dir, *TWO, TMPDIR=str(tmp_path)) as served:
        assert served.output.count("KV pool") == 1
        assert "2, each with the whole model" in served.output
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda prompt: complete(served, prompt), PROMPTS))
        assert [answer["choices"][0]["text"] for answer in answers] == alone
        assert sum(served_by(served)) == 8
        assert min(served_by(served)) >= 2

        before = served_by(served)
        long = "a prompt that is long enough to fill several blocks of the cache " * 4
        cached = []
        for i in range(4):
            usage = complete(served, f"{long}{i}", max_tokens=2)["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert cached[0] == 0
        assert all(count > 0 for count in cached[1:])
        grown = [now - then for now, then in zip(served_by(served), before, strict=True)]
        assert sorted(grown) == [0, 4]

        children = served.descendants()
        assert len(served.cores()) == 2
        assert served.stop() == 0
    assert not psutil.wait_procs(children, timeout=0)[1]
    assert leftovers(tmp_path) == []
    assert "Traceback" not in served.output


def test_one_engine_is_killed(tmp_path: Path) -> None:
    """Its client gets the error; the other engine's finishes; nothing new; exit code not 0."""
    ends: dict[str, list[str]] = {}
    model = write_tiny_checkpoint(tmp_path / "tiny", max_position_embeddings=8192)
    # Answers long enough to be running meanwhile.
    settings = (*TWO, "--max-model-len", "8192", "--num-gpu-blocks-override", "513")
    with serving(model, *settings, TMPDIR=str(tmp_path)) as served:
        cores, children = served.cores(), served.descendants()
        streaming = threading.Barrier(3, timeout=30)

        def stream(name: str) -> None:
            body = {"prompt": name, "max_tokens": 4000, "ignore_eos": True, "stream": True}
            ends[name] = []
            with (
                served.client() as client,
                client.stream("POST", "/v1/completions", json=body) as reply,
            ):
                for line in reply.iter_lines():
                    if not ends[name]:
                        streaming.wait()
                    if line:
                        ends[name].append(line.removeprefix("data: "))

        threads = [threading.Thread(target=stream, args=(name,)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        streaming.wait()
        cores[1].kill()
        with served.client() as client:
            while client.get("/health").status_code == 200:
                pass
            reply = client.post("/v1/completions", json={"prompt": "c"})
            assert reply.status_code == 503
            assert "engine 1: the engine-core process was killed by signal 9" in reply.text
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        assert served.wait() == 1
    finished, lost = sorted(ends.values(), key=lambda lines: "error" in lines[-1])
    assert finished[-1] == "[DONE]"
    assert json.loads(finished[-2])["choices"][0]["finish_reason"] == "length"
    assert "engine 1" in json.loads(lost[-1])["error"]["message"]
    assert not psutil.wait_procs(children, timeout=0)[1]
    assert leftovers(tmp_path) == []
