"""Engines with roles as HTTP shows them, and tickets that no client may bring."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.pure.api.conftest import Api, make_state
from tests.pure.api.fake_core import FakeCore
from twostroke.client.engine import AsyncEngine
from twostroke.metrics import Metrics
from twostroke.testing.byte_tokenizer import ByteTokenizer

CHAT = {"messages": [{"role": "user", "content": "x"}]}


class Apart(Api):
    """A server with two engines that decode and one that prefills; the cores know nothing of it."""

    def __init__(self, cores: list[FakeCore]) -> None:
        metrics = Metrics(model_name="m", num_engines=3)
        engine = AsyncEngine(
            cores,
            ByteTokenizer(),
            model_name="m",
            max_model_len=512,
            eos_token_ids=(257,),
            max_num_queued_reqs=64,
            metrics=metrics,
            roles=["prefill", "decode", "decode"],
            status_interval_s=0,
        )
        self.cores = cores
        super().__init__(cores[0], make_state(cores[0], engine=engine, metrics=metrics))


@pytest.fixture
async def apart() -> AsyncIterator[Apart]:
    api = Apart([FakeCore() for _ in range(3)])
    for core in api.cores:
        core.become_ready()
    api.state.engine.start()
    await api.state.engine.wait_ready()
    yield api
    await api.http.aclose()
    await api.state.engine.close()


async def _death_of(api: Apart, engine: int) -> None:
    api.cores[engine].die()
    for _ in range(50):
        await asyncio.sleep(0)
    assert engine in api.state.engine.gone


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    "name", ["kv_transfer_params", "kv_receive", "kv_send", "ticket", "transfer_id"]
)
async def test_a_ticket_of_a_clients_is_refused(api: Api, path, name):
    body = CHAT if "chat" in path else {"prompt": "x"}
    ticket = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [1, 2]}
    error = await api.refuse(path, **body, **{name: ticket})
    assert error["param"] == name
    error = await api.refuse(path, **body, vllm_xargs={name: ticket})
    assert error["param"] == "vllm_xargs"
    assert api.core.added == []


async def test_engines_are_listed(apart: Apart):
    engines = (await apart.get("/engines"))["engines"]
    assert [(it["engine"], it["role"], it["state"]) for it in engines] == [
        (0, "prefill", "ready"),
        (1, "decode", "ready"),
        (2, "decode", "ready"),
    ]
    assert engines[1]["stats"]["num_running"] == 0
    plain = Api(FakeCore(), apart.state)
    assert (await plain.get("/engines"))["engines"][0]["error"] is None


async def test_roles_are_switched(apart: Apart):
    answer = await apart.post("/engines/2/role", role="prefill")
    assert (answer["engine"], answer["role"], answer["state"]) == (2, "prefill", "ready")
    error = await apart.refuse("/engines/1/role", role="prefill")
    assert (error["param"], "last one that decodes" in error["message"]) == ("role", True)
    assert (await apart.refuse("/engines/9/role", role="both"))["param"] == "engine"
    assert (await apart.refuse("/engines/1/role", role="cook"))["param"] == "role"
    assert (await apart.refuse("/engines/1/role", role="both", drain=1))["param"] == "drain"
    await apart.post("/engines/x/role", status=404, role="both")


async def test_engines_without_roles_have_none_to_switch(api: Api):
    error = await api.refuse("/engines/0/role", role="decode")
    assert "have no roles" in error["message"]
    assert (await api.get("/engines"))["engines"][0]["role"] == "both"


async def test_health_tells_what_is_gone(apart: Apart):
    assert await apart.get("/health") == {"status": "ok"}
    await _death_of(apart, 0)
    health = await apart.get("/health")
    assert health["status"] == "degraded"
    assert list(health["gone"]) == ["0"]
    assert "code 9" in health["gone"]["0"]
    assert (await apart.get("/props"))["status"] == "degraded"
    answer = await apart.post("/v1/completions", prompt="abc")
    assert answer["choices"][0]["text"] == "abc"
    await _death_of(apart, 1)
    assert (await apart.get("/health"))["status"] == "degraded"
    await _death_of(apart, 2)
    await apart.get("/health", 503)
    await apart.post("/v1/completions", 503, prompt="abc")


async def test_ready_needs_one_answer_and_slots_name_roles(apart: Apart):
    apart.cores[0].calls_answered = apart.cores[1].calls_answered = False
    assert await apart.get("/ready") == {"status": "ready"}
    await _death_of(apart, 2)
    apart.state.call_timeout_s = 0.01
    await apart.get("/ready", 503)
    apart.cores[0].calls_answered = apart.cores[1].calls_answered = True
    await apart.post("/v1/completions", prompt="abc")
    (slot,) = await apart.get("/slots")
    assert (slot["engine"], slot["role"]) == (1, "decode")


async def test_metrics_of_roles_and_decisions(apart: Apart):
    await apart.post("/v1/completions", prompt="abc")
    text = (await apart.http.get("/metrics")).text
    for line in (
        'routing_decisions_total{model_name="m",reason="no_prefill_engine",where="whole"} 1.0',
        'twostroke:engine_role{engine="0",model_name="m",role="prefill",state="ready"} 1.0',
        'twostroke:handoff_queue_depth{model_name="m"} 0.0',
        'twostroke:kv_expired_leases_total{engine="1",model_name="m"} 0.0',
    ):
        assert line in text, line
