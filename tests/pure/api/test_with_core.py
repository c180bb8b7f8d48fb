"""Requests of every kind over the real core; clients leave at random, and all blocks come back."""

import asyncio
import json
import random

from tests.pure.api.conftest import make_state
from twostroke.api.app import create_app
from twostroke.clock import WallClock
from twostroke.config import SchedulerConfig
from twostroke.core.loop import EngineCore
from twostroke.messages import AbortRequests, EngineReady
from twostroke.testing.fake_engine import InProcessChannel
from twostroke.testing.fake_executor import FakeExecutor

CONFIG = SchedulerConfig(
    num_blocks=40, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128
)
READY = EngineReady(0, CONFIG.max_model_len, CONFIG.num_blocks, CONFIG.block_size)


def random_request(rng: random.Random) -> tuple[str, dict]:
    words = "lorem ipsum dolor sit amet " * rng.randint(1, 3)
    fields = {
        "n": rng.randint(1, 2),
        "max_tokens": rng.randint(1, 40),
        "stream": rng.random() < 0.5,
    }
    if rng.random() < 0.5:
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": words}], **fields}
    return "/v1/completions", {"prompt": [words] * rng.randint(1, 2), **fields}


async def visit(app, path: str, fields: dict, patience: int | None) -> str:
    """Send a request as a server would; hang up after `patience` turns of the loop."""
    body, answer = json.dumps(fields).encode(), b""
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if unread:
            return unread.pop()
        if patience is None:
            await asyncio.Event().wait()
        for _ in range(patience):
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(message):
        nonlocal answer
        answer += message.get("body", b"")

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
    await app(scope, receive, send)
    return answer.decode()


async def test_all_blocks_come_back():
    rng = random.Random(0)
    core = EngineCore(CONFIG, WallClock(), check=True)
    executor = FakeExecutor(token=lambda request_id, position: 97 + position % 26)
    channel = InProcessChannel(core, executor, READY)
    state = make_state(channel, max_model_len=CONFIG.max_model_len, max_num_queued_reqs=1000)
    app = create_app(state)
    state.engine.start()
    await state.engine.wait_ready()
    visits = [
        visit(app, *random_request(rng), rng.choice([None, rng.randint(0, 300)])) for _ in range(80)
    ]
    answers = await asyncio.gather(*visits)
    assert sum('"finish_reason":"length"' in answer for answer in answers) > 20
    assert sum(isinstance(message, AbortRequests) for message in channel.sent) > 20
    while core.has_work():
        await asyncio.sleep(0)
    assert state.engine.num_unfinished == 0
    assert core.slots() == []
    assert core.stats().kv_usage == 0
    core.check_integrity()
    await state.engine.close()
    channel.close()
