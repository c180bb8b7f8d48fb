"""Where a request runs when latency decides, under a cost that is known."""

import pytest

from tests.pure.router.engines import World, ask, outputs, stats
from twostroke.cost import LinearStepCost
from twostroke.kv_messages import KvLink
from twostroke.messages import StepSample

COST = LinearStepCost(base_s=0.01, token_s=1e-4, row_s=1e-4)


def world_of(*roles: str, bytes_per_s: float | None = 1e9, **settings) -> World:
    settings.setdefault("step_cost", COST)
    world = World(*roles, pd_policy="cost", num_blocks=1001, **settings)
    if bytes_per_s is not None:
        for reader in range(len(roles)):
            for source in range(len(roles)):
                link = KvLink(engine_id=world.ids[source], base_s=0.001, bytes_per_s=bytes_per_s)
                world.say(reader, outputs(kv_links=[link]))
    return world


def placed(world: World, request, **fields) -> tuple[int, str]:
    """The engine that a request was sent to, and the reason."""
    before = dict(world.dispatcher.counters.decisions)
    counts = {i: len(world.added(i)) for i in world.sent}
    world.submit(request, **fields)
    (reason,) = (
        where[1]
        for where, n in world.dispatcher.counters.decisions.items()
        if n != before.get(where, 0)
    )
    (engine,) = (i for i in world.sent if len(world.added(i)) > counts[i])
    return engine, reason


def busy(world: World, engine: int, num_running: int) -> None:
    world.say(engine, outputs(stats=stats(num_running=num_running, kv_usage=0.1)))


def test_an_idle_d_prefills_itself_and_a_busy_one_does_not():
    world = world_of("prefill", "decode")
    assert placed(world, ask(1, 400)) == (1, "cheaper")
    busy(world, 1, 64)
    assert placed(world, ask(2, 400)) == (0, "cheaper")


def test_a_slow_link_keeps_requests_on_d():
    world = world_of("prefill", "decode", bytes_per_s=1e4)
    busy(world, 1, 8)
    assert placed(world, ask(1, 1000)) == (1, "cheaper")


def test_a_queue_on_p_counts():
    world = world_of("prefill", "prefill", "decode")
    busy(world, 2, 16)
    first, _ = placed(world, ask(1, 4000))
    second, _ = placed(world, ask(2, 4000))
    assert sorted((first, second)) == [0, 1]
    for handle in range(3, 30):
        engine, _ = placed(world, ask(handle, 400))
        if engine == 2:
            break
    assert engine == 2  # by now it is better to wait for nobody


def test_the_next_turn_goes_where_its_history_is():
    world = world_of("prefill", "decode", "decode")
    for engine in (1, 2):
        busy(world, engine, 32)
    first = ask(1, 800)
    assert placed(world, first) == (0, "cheaper")
    world.prefilled(0, world.added(0)[0])
    (home,) = (i for i in (1, 2) if world.added(i))
    world.loaded(home, world.added(home)[0])
    world.finished(home, world.added(home)[0])
    answered = ask(9, 1200).prompt_token_ids  # prompt and answer, as the client knows them
    world.dispatcher.computed(home, answered)
    next_turn = ask(9, 1220)
    busy(world, home, 8)
    assert placed(world, next_turn) == (home, "cached")


@pytest.mark.parametrize("settings", [{"step_cost": None}, {"bytes_per_s": None}])
def test_what_is_not_known_is_handed_over(settings):
    world = world_of("prefill", "decode", **settings)
    assert placed(world, ask(1, 400)) == (0, "unknown_cost")


def test_steps_are_learned_from():
    world = world_of("prefill", "decode", step_cost=None)
    for i in range(200):
        tokens = 1 + 37 * (i % 50)
        step = StepSample(tokens, 1, 1, 0, tokens * tokens // 2, 0.01 + 1e-4 * tokens)
        world.say(0, outputs(step=step))
    assert placed(world, ask(1, 400)) == (1, "cheaper")
    busy(world, 1, 64)
    assert placed(world, ask(2, 400)) == (0, "cheaper")


def test_prefill_only_engines_have_nobody_to_delay():
    world = world_of("prefill", "decode")
    costs = world.dispatcher._placing.costs
    world.submit(ask(1, 400))
    job = world.dispatcher._jobs[1]
    busy(world, 0, 100)
    source, reader = (world.dispatcher.fleet[i] for i in (0, 1))
    apart_s = costs.apart_s(job, source, reader)
    busy(world, 0, 0)
    assert costs.apart_s(job, source, reader) == apart_s
