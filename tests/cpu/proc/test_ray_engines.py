"""`twostroke serve --ray`: the engines of a server on two nodes, which are both of this machine."""

import contextlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cpu.proc.serving import Served
from tests.cpu.proc.test_serve import SMALL, complete
from twostroke.keys import write_key

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install ray"
)


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """That of a cluster with two nodes of one CPU each."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    one = {"num_cpus": 1, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=one | {"include_dashboard": False})
    try:
        cluster.add_node(**one)
        yield cluster.address
    finally:
        cluster.shutdown()


def engines() -> list[psutil.Process]:
    """Those that Ray's actors run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "twostroke.proc.engine_main" in process.cmdline():
                found.append(process)
    return found


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_engines_run_on_the_nodes_of_a_cluster(
    address: str, tiny_dir: Path, tmp_path: Path
) -> None:
    write_key(tmp_path / "key")
    before = {process.pid for process in engines()}
    where = ("--ray", address, "--engines-listen", "127.0.0.1:0", "--key", str(tmp_path / "key"))
    roles = ("--prefill", "1", "--decode", "1", "--kv-transport", "shm", "--pd-policy", "always")
    options = (*SMALL, "--dtype", "float32", "--cpu-threads", "1")
    server = Served([str(tiny_dir), "--port", "0", *where, *roles, *options], {})
    try:
        server.wait_started()
        assert len(set(re.findall(r"starting an engine \((\w+)\) on node", server.output))) == 2
        prompt = "a prompt of several blocks, so that there is some KV to be read"
        text = complete(server, prompt, max_tokens=16)["choices"][0]["text"]
        ours = [process for process in engines() if process.pid not in before]
        assert len(ours) == 2
        for process in ours:  # no key in sight
            assert (tmp_path / "key").read_text().strip() not in " ".join(process.cmdline())
        (core,) = ours[0].children()
        core.kill()
        server.wait_for(r"an engine \(\w+\) on the Ray cluster has ended: it exited")
        server.wait_for(r"engine \d \(\w+\) is ready", times=3)
        assert complete(server, prompt, max_tokens=16)["choices"][0]["text"] == text
        assert server.stop() == 0
        assert {process.pid for process in engines()} == before
    finally:
        server.end()
