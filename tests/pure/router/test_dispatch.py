"""The life of requests over engines that do what the test says, as long as nothing goes wrong."""

import pytest

from tests.pure.router.engines import LENGTH, World, ask, outputs, stats
from twostroke.errors import EngineDeadError, RequestError
from twostroke.kv_messages import (
    KvConnect,
    KvDisconnect,
    KvLink,
    KvReady,
    KvReceived,
    KvRenew,
)
from twostroke.ledger import DECODE_LEG, PREFILL_LEG, Boundary
from twostroke.messages import EngineReady, EventKind, Finished, PrefillInfo, SamplingParams


def test_one_engine_passes_untouched():
    world = World("both", max_retries=0)
    world.submit(ask(1))
    assert [leg.handle for leg in world.added(0)] == [1]
    said = outputs({1: [5]}, events=[(1, EventKind.FIRST_TOKEN, 1.0)])
    assert world.say(0, said) is said
    assert world.finished(0, world.added(0)[0]).finished == [Finished(1, LENGTH)]
    world.check_empty()


def test_pull_prefills_on_p_and_decodes_on_d():
    world = World("prefill", "decode")
    assert world.dispatcher.submit(ask(1, max_tokens=8)) is Boundary.SENT
    world.flush()
    (first,) = world.added(0)
    assert (first.max_tokens, first.kv_send.stream, first.eos_token_ids) == (1, False, ())
    assert first.request_id == "r1#p"
    assert world.added(1) == []
    ticket = world.prefilled(0, first)
    (second,) = world.added(1)
    assert (second.handle, second.request_id, second.max_tokens) == (1, "r1", 8)
    assert second.kv_receive.ticket == ticket
    assert second.kv_receive.timeout_s == pytest.approx(120 * 0.9)
    assert world.released(0) == []
    assert world.loaded(1, second).handles.tolist() == [1]
    assert world.released(0) == [ticket.transfer_id]
    assert world.finished(1, second).finished == [Finished(1, LENGTH)]
    assert world.released(0) == [ticket.transfer_id]
    assert world.sleep(1000) is None
    assert world.dispatcher.counters.decisions == {("handed_over", "always"): 1}
    assert world.dispatcher.counters.transfer_bytes == 1000
    world.check_empty()


def test_stream_gives_d_its_blocks_first():
    world = World("prefill", "decode", kv_mode="stream")
    world.submit(ask(1))
    (second,) = world.added(1)
    assert second.kv_receive.ticket is None
    assert world.added(0) == []
    world.say(1, outputs(events=[(1, EventKind.LOADING, 0.0)]))
    (first,) = world.added(0)
    assert first.kv_send.stream
    tickets = [world.ticket(0, 16), world.ticket(0, 40)]
    for i, ticket in enumerate(tickets):
        world.say(0, outputs(kv_ready=[KvReady(first.handle, ticket, i == 1)]))
    assert [(it.handle, it.is_last) for it in world.of(1, KvReady)] == [(1, False), (1, True)]
    world.say(0, outputs({first.handle: [7]}, ends=[(first.handle, LENGTH)]))
    world.loaded(1, second)
    assert sorted(world.released(0)) == sorted(ticket.transfer_id for ticket in tickets)
    world.finished(1, second)
    world.check_empty()


def test_what_d_has_cached_needs_no_p():
    world = World("prefill", "decode", kv_mode="stream")
    world.submit(ask(1))
    (leg,) = world.added(1)
    world.loaded(1, leg, num_bytes=0, reason="cached")
    world.finished(1, leg)
    assert world.added(0) == []
    world.check_empty()


def test_events_and_cached_tokens_are_told_of_either_leg():
    world = World("prefill", "decode")
    world.submit(ask(1))
    (first,) = world.added(0)
    events = [(first.handle, kind, 1.0) for kind in (EventKind.QUEUED, EventKind.SCHEDULED)]
    left = world.say(0, outputs(events=events, prefills=[PrefillInfo(first.handle, 16)]))
    assert left.events.handles.tolist() == [1, 1]
    assert left.events.kinds.tolist() == [PREFILL_LEG, PREFILL_LEG + EventKind.SCHEDULED]
    assert left.prefills == [PrefillInfo(1, 16)]
    world.prefilled(0, first)
    events = [(1, EventKind.QUEUED, 2.0), (1, EventKind.LOADING, 3.0)]
    left = world.say(1, outputs(events=events, prefills=[PrefillInfo(1, 39)]))
    assert left.events.kinds.tolist() == [DECODE_LEG, DECODE_LEG + EventKind.LOADING]
    assert left.prefills == []
    world.loaded(1, world.added(1)[0])
    said = outputs({1: [9]}, events=[(1, EventKind.PREEMPTED, 5.0)])
    assert world.say(1, said) is said  # once it decodes it is like any other


# ---------------------------------------------------------------- where


def test_engines_meet_when_they_are_ready():
    world = World("prefill", "decode", "decode", "both")
    met = {i: [it.endpoint.engine_id for it in world.of(i, KvConnect)] for i in range(4)}
    p, both = world.ids[0], world.ids[3]
    assert met == {0: [], 1: [p, both], 2: [p, both], 3: [p]}
    world.die(0)
    assert [len(world.of(i, KvDisconnect)) for i in (1, 2, 3)] == [1, 1, 1]
    world.start(0, "prefill")
    assert world.of(1, KvConnect)[-1].endpoint.engine_id == world.ids[0] != p


def test_only_engines_of_the_same_model_meet_as_partners():
    world = World("prefill")
    world.ids[1] = "other"
    other = world.endpoint(1)
    layout = type(other.layout)(**{**_fields(other.layout), "model": "another"})
    world.sent[1] = []
    world.dispatcher.add_engine(1, "decode")
    endpoint = type(other)(**{**_fields(other), "layout": layout})
    world.dispatcher.engine_ready(1, EngineReady(1, 8192, 101, 16, kv=endpoint))
    world.submit(ask(1))
    assert world.added(0) == []
    assert world.added(1)[0].kv_receive is None
    assert world.dispatcher.counters.decisions == {("whole", "no_prefill_engine"): 1}


def _fields(struct) -> dict:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


@pytest.mark.parametrize(
    ("fields", "settings", "engine", "reason"),
    [
        ({"params": SamplingParams(prompt_logprobs=1)}, {}, 1, "prompt_logprobs"),
        ({"max_tokens": 1}, {}, 0, "one_token"),
        ({"num_prompt": 1}, {}, 1, "short"),
        ({}, {"pd_policy": "never"}, 1, "never"),
    ],
)
def test_some_requests_are_served_by_one_engine(fields, settings, engine, reason):
    world = World("prefill", "decode", **settings)
    world.submit(ask(1, **fields))
    (leg,) = world.added(engine)
    assert leg.kv_send is leg.kv_receive is None
    assert world.dispatcher.counters.decisions == {("whole", reason): 1}
    world.finished(engine, leg)
    world.check_empty()


def test_two_that_do_both_hand_nothing_over():
    world = World("both", "both", "decode")
    world.dispatcher.set_role(2, "both")
    world.submit(*(ask(handle) for handle in (1, 2, 3)))
    assert [leg.kv_send for i in range(3) for leg in world.added(i)] == [None] * 3


def test_samples_of_a_request_share_engines():
    world = World("prefill", "prefill", "decode", "decode")
    world.submit(ask(1), ask(2))
    world.submit(ask(3), ask(4), beside=1)
    sources = [len(world.added(i)) for i in (0, 1)]
    assert sources == [3, 1]
    for leg in world.added(0):
        world.prefilled(0, leg)
    (reader,) = (i for i in (2, 3) if world.added(i))
    assert len(world.added(reader)) == 3


# ---------------------------------------------------------------- room on D


def test_what_d_has_no_room_for_waits_in_the_router():
    world = World("prefill", "decode", num_blocks=21)  # 20 blocks: 4 requests of 5 blocks
    asked = [ask(handle, num_prompt=64, max_tokens=16) for handle in range(1, 17)]
    passed = [world.dispatcher.submit(request) for request in asked]
    world.flush()
    assert passed == [Boundary.SENT] * 4 + [Boundary.HELD] * 12
    assert world.dispatcher.num_waiting == 12
    served = 0
    while served < len(asked):
        assert len(world.added(0)) - served <= 4
        world.prefilled(0, world.added(0)[served])
        leg = world.added(1)[served]
        world.loaded(1, leg)
        world.finished(1, leg)
        served += 1
    assert [leg.handle for leg in world.added(1)] == list(range(1, 17))  # in order
    world.check_empty()


def test_prefixes_that_requests_share_leave_room_for_more():
    world = World("prefill", "decode", num_blocks=41)
    world.submit(*(ask(handle, num_prompt=320, max_tokens=16) for handle in (1, 2, 3)))
    assert world.dispatcher.num_waiting == 2  # 21 blocks each, of 40
    world.prefilled(0, world.added(0)[0])
    world.loaded(1, world.added(1)[0], stats=stats(kv_usage=21 / 40))
    assert world.dispatcher.num_waiting == 2
    world.say(1, outputs(stats=stats(kv_usage=0.1)))  # most of it is not its own
    assert world.dispatcher.num_waiting == 1


def test_an_aborted_one_waits_no_more():
    world = World("prefill", "decode", num_blocks=6)
    world.submit(*(ask(handle, num_prompt=64, max_tokens=16) for handle in (1, 2, 3)))
    assert world.dispatcher.num_waiting == 2
    world.dispatcher.abort([2])
    assert world.dispatcher.num_waiting == 1
    world.dispatcher.abort([1])
    world.flush()
    assert world.dispatcher.num_waiting == 0
    assert [leg.request_id for leg in world.added(0)] == ["r1#p", "r3#p"]
    assert len(world.aborted(0)) == 1


# ---------------------------------------------------------------- leases


def test_leases_are_renewed_while_a_ticket_is_out():
    world = World("prefill", "decode", lease_s=30.0, handoff_timeout_s=500.0)
    world.submit(ask(1))
    world.sleep(100)
    assert world.of(0, KvRenew) == []
    ticket = world.prefilled(0, world.added(0)[0])
    world.sleep(60)
    renewals = world.of(0, KvRenew)
    assert [it.transfer_ids for it in renewals] == [[ticket.transfer_id]] * 6
    world.loaded(1, world.added(1)[0])
    world.sleep(60)
    assert len(world.of(0, KvRenew)) == 6


# ---------------------------------------------------------------- roles


def test_a_role_switches_once_the_engine_has_drained():
    world = World("prefill", "decode", "decode")
    world.submit(ask(1), ask(2))
    for leg in world.added(0):
        world.prefilled(0, leg)
    (one,), (two,) = world.added(1), world.added(2)
    world.dispatcher.set_role(1, "prefill")
    engine = world.dispatcher.fleet[1]
    assert (engine.state, engine.role, engine.next_role) == ("draining", "decode", "prefill")
    world.submit(ask(3))
    world.prefilled(0, world.added(0)[2])
    assert len(world.added(1)) == 1  # it gets nothing new
    world.loaded(1, one)
    world.finished(1, one)
    assert (engine.state, engine.role, engine.next_role) == ("ready", "prefill", None)
    assert world.of(2, KvConnect)[-1].endpoint.engine_id == world.ids[1]
    world.submit(*(ask(handle) for handle in range(4, 8)))
    assert {leg.kv_send is not None for leg in world.added(1)[1:]} == {True}
    world.loaded(2, two)


def test_held_prompts_keep_an_engine_from_switching():
    world = World("prefill", "prefill", "decode")
    world.submit(ask(1))
    world.prefilled(0, world.added(0)[0])
    world.dispatcher.set_role(0, "decode")
    assert world.dispatcher.fleet[0].state == "draining"
    world.loaded(2, world.added(2)[0])
    assert (world.dispatcher.fleet[0].state, world.dispatcher.fleet[0].role) == ("ready", "decode")


def test_somebody_must_decode():
    world = World("prefill", "decode", "decode")
    world.submit(ask(1))
    world.prefilled(0, world.added(0)[0])
    (busy,) = (i for i in (1, 2) if world.added(i))
    other = 3 - busy
    with pytest.raises(RequestError, match="engine 9 is not there"):
        world.dispatcher.set_role(9, "both")
    world.dispatcher.set_role(busy, "prefill")
    with pytest.raises(RequestError, match="last one that decodes"):
        world.dispatcher.set_role(other, "prefill")
    world.die(other)
    assert world.dispatcher.fleet[busy].state == "ready"  # the switch is off
    with pytest.raises(RequestError, match="is not there"):
        world.dispatcher.set_role(other, "both")
    world.dispatcher.set_role(0, "both")  # at once
    assert world.dispatcher.fleet[0].role == "both"


def test_changing_ones_mind_ends_the_drain():
    world = World("prefill", "decode", "decode")
    world.submit(ask(1))
    world.dispatcher.set_role(0, "decode")
    assert world.dispatcher.fleet[0].state == "draining"
    world.dispatcher.set_role(0, "prefill")
    assert world.dispatcher.fleet[0].state == "ready"


def test_requests_wait_for_an_engine_that_loads_but_not_for_ever():
    world = World("prefill", handoff_timeout_s=120.0)
    with pytest.raises(EngineDeadError, match="no engine"):
        world.submit(ask(1))
    world.dispatcher.add_engine(1, "decode")
    assert world.dispatcher.submit(ask(2)) is Boundary.HELD
    left = world.sleep(121)
    assert [end.handle for end in left.finished] == [2]
    assert "within 120 s" in left.finished[0].error
    world.submit(ask(3))
    world.ids[1], world.sent[1] = "e1", []
    world.dispatcher.engine_ready(1, EngineReady(1, 8192, 101, 16, kv=world.endpoint(1)))
    world.flush()
    assert len(world.added(0)) == 1
    assert world.sleep(0) is None


def test_a_handshake_that_failed_is_tried_again_later():
    world = World("prefill", "decode")
    source = world.ids[0]
    world.say(1, outputs(kv_links=[KvLink(engine_id=source, error="refused")]))
    world.submit(ask(1))
    assert world.added(0) == []
    world.clock.advance_to(4.0)
    world.say(1, outputs())
    assert len(world.of(1, KvConnect)) == 1
    world.clock.advance_to(6.0)
    for _ in range(3):
        world.say(1, outputs())
    assert len(world.of(1, KvConnect)) == 2
    world.say(1, outputs(kv_links=[KvLink(engine_id=source, error="refused")]))
    world.clock.advance_to(12.0)
    world.say(1, outputs())
    assert len(world.of(1, KvConnect)) == 2  # twice as long
    world.clock.advance_to(17.0)
    world.say(1, outputs())
    assert len(world.of(1, KvConnect)) == 3
    world.say(1, outputs(kv_links=[KvLink(engine_id=source, bytes_per_s=1e9)]))
    world.clock.advance_to(40.0)
    world.submit(ask(2))
    assert len(world.added(0)) == 1


def test_a_link_that_cannot_be_is_not_used_and_transfers_are_measured():
    world = World("prefill", "decode", "decode")
    world.say(1, outputs(kv_links=[KvLink(engine_id=world.ids[0], error="another model")]))
    for handle in range(1, 4):
        world.submit(ask(handle))
        world.prefilled(0, world.added(0)[-1])
    assert len(world.added(2)) == 3
    world.say(2, outputs(kv_links=[KvLink(engine_id=world.ids[0], bytes_per_s=1e9)]))
    engine = world.dispatcher.fleet[2]
    pair = world.dispatcher.fleet.pair(engine, world.ids[0])
    assert pair.transfer_s(1, 10**9 - pair.bytes_under_way) == 1.0
    received = KvReceived(handle=1, num_tokens=40, num_bytes=500, ended_s=0.5)
    world.say(2, outputs(kv_received=[received]))
    assert pair.bytes_per_s == 1000
