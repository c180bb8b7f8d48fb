"""Each rule rejects a plan that breaks it."""

from array import array

import numpy as np
import pytest

from tests.pure.core.driver import SMALL, make_request
from twostroke.clock import VirtualClock
from twostroke.config import SchedulerConfig
from twostroke.core.loop import EngineCore
from twostroke.core.request import Status
from twostroke.core.spec import PlanRules
from twostroke.kv.manager import IntegrityError
from twostroke.messages import StepResult


def start(prompts=(6, 6), **settings):
    """A core that runs two requests, rules that saw its first plan, and its second plan."""
    config = SchedulerConfig(**(SMALL | {"async_scheduling": False} | settings))
    core = EngineCore(config, VirtualClock())
    rules = PlanRules(core.state)
    for handle, prompt in enumerate(prompts):
        core.add(make_request(handle, prompt, max_tokens=20))
    plan = core.begin()
    rules.check(plan)
    sampled = plan.samples.astype(np.int32)
    core.finish(StepResult(step=0, num_sampled=sampled, token_ids=sampled + 7))
    return core, rules, core.begin()


def change(name, value):
    def apply(core, plan):
        setattr(plan, name, value(getattr(plan, name)) if callable(value) else value)

    return apply


def int32s(*values):
    return np.array(values, np.int32)


def other_owner(core, plan):
    one, two = (core.state.request_at(slot) for slot in plan.slots.tolist())
    two.table.blocks[0] = one.table.blocks[0]


def loading(core, plan):
    core.state.request_at(int(plan.slots[0])).status = Status.WAITING_FOR_REMOTE_KVS


def set_blocks(blocks):
    def apply(core, plan):
        core.state.request_at(int(plan.slots[0])).table.blocks[:] = array("q", blocks)

    return apply


def empty_seat(core, plan):
    core.state.seats.request_of[int(plan.slots[0])] = None


def same_last_block(core, plan):
    one, two = (core.state.request_at(slot) for slot in plan.slots.tolist())
    two.table.blocks[-1] = one.table.blocks[-1]


BREAKS = [
    (1, change("num_scheduled", int32s(1, 40)), "41 tokens of 16"),
    (1, change("num_scheduled", int32s(1, 0)), "r1 has a row without tokens"),
    (2, change("slots", int32s(0, 0)), "a seat has two rows"),
    (2, change("slots", int32s(0, 3)), "seat 3 runs but is empty"),
    (2, empty_seat, "seat 0 runs but is empty"),
    (2, change("freed_slots", int32s(3)), "seat 3 is vacated but is empty"),
    (2, change("freed_slots", int32s(0)), "seat 0 runs but is empty"),
    (3, change("num_computed", int32s(5, 6)), "r0 starts at 5, ended at 6"),
    (3, change("num_computed", int32s(7, 6)), "r0 starts at 7, ended at 6"),
    (4, set_blocks([1]), "r0 has 1 blocks; its worker was told of 2"),
    (4, change("num_scheduled", int32s(9, 1)), "r0 reaches 15 with 2 blocks"),
    (4, set_blocks([1, 0]), "r0 writes into block 0"),
    (4, same_last_block, "two rows write into block 2"),
    (5, other_owner, "share block 1 but differ there"),
    (6, loading, "r0 is WAITING_FOR_REMOTE_KVS"),
    (7, change("samples", np.array([False, True])), "r0 reaches 7 of 7; samples: False"),
    (8, change("num_drafts", int32s(1, 0)), "r0 verifies 1 drafts in 1 tokens"),
]


@pytest.mark.parametrize(("rule", "breaks", "words"), BREAKS)
def test_a_broken_plan_is_named(rule, breaks, words):
    core, rules, plan = start()
    breaks(core, plan)
    with pytest.raises(IntegrityError, match=f"breaks rule {rule}: .*{words}"):
        rules.check(plan)


def test_a_sound_plan_passes():
    _, rules, plan = start()
    rules.check(plan)


def test_new_requests_need_an_empty_seat_and_a_row():
    core, rules, _ = start(prompts=(6,))
    core.add(make_request(5, 6))
    core.finish(StepResult(step=1, num_sampled=int32s(1), token_ids=int32s(9)))
    plan = core.begin()
    plan.new[0].slot = 0
    with pytest.raises(IntegrityError, match="seat 0 is taken"):
        rules.check(plan)
    plan.new[0].slot = 3
    with pytest.raises(IntegrityError, match="r5 sits without a row"):
        rules.check(plan)


def test_growth_needs_somebody_there():
    _, rules, plan = start()
    plan.grown_slots, plan.grown_counts = int32s(3), int32s(1)
    with pytest.raises(IntegrityError, match="seat 3 grows but is empty"):
        rules.check(plan)


def test_a_seat_keeps_its_request():
    core, rules, plan = start()
    core.state.request_at(0).request_id = "somebody"
    with pytest.raises(IntegrityError, match="seat 0 is r0's, not somebody's"):
        rules.check(plan)


def test_the_model_length_is_a_limit():
    core, rules, plan = start(max_model_len=8)
    object.__setattr__(core.config, "max_model_len", 6)
    with pytest.raises(IntegrityError, match="breaks rule 3: r0 reaches 7"):
        rules.check(plan)
