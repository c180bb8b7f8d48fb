"""Advice in a running router: what engines did and requests took becomes gauges on the page."""

import asyncio
import math

from tests.pure.client.apart import deployed
from tests.pure.client.test_apart import ask
from tests.pure.test_metrics import samples
from twostroke.advice.verdict import NAMES


async def test_verdicts_are_gauges_of_a_deployment_with_roles():
    async with deployed("prefill", "decode") as it:
        fleet = it.engine._fleet
        await asyncio.gather(*(ask(it, [i] * 20, name=f"r{i}", max_tokens=8) for i in range(5)))
        assert fleet.advisor is not None
        seen = fleet.advisor.observe(it.engine._clock.now())
        assert (seen.num_prefill, seen.num_decode) == (1, 1)
        assert seen.prompt_tokens == 20
        assert seen.output_tokens == 8
        assert seen.decode_s > 0
        assert seen.decode_pool_tokens > 0
        fleet.advisor._every_s = 0.0  # do not wait for its time
        page = samples(it.engine.metrics)
        gauges = {name: page[f"twostroke:advice|{name}"] for name in NAMES}
        assert gauges["prefill_blocked"] == 0.0
        assert math.isnan(gauges["append_on_decode"])
        assert page["twostroke:observed|prompt_tokens"] == 20
        assert page["twostroke:advised_prefill_engines"] == 1
        assert page["twostroke:advised_decode_engines"] == 1


async def test_roles_that_change_are_heard_of():
    async with deployed("prefill", "decode", "decode") as it:
        it.engine.set_role(2, "prefill")
        advice = it.engine._fleet.advice()
        assert advice is None  # too early to say
        assert it.engine._fleet.advisor is not None
        seen = it.engine._fleet.advisor.observe(it.engine._clock.now())
        assert (seen.num_prefill, seen.num_decode) == (2, 1)


async def test_plain_deployments_have_none():
    async with deployed("both") as it:
        fleet = it.engine._fleet
        assert fleet.has_roles or fleet.advice() is None
