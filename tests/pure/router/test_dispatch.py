"""The life of requests over engines that do what the test says."""

import pytest

from tests.pure.router.engines import LENGTH, World, ask, outputs
from twostroke.kv_messages import KvReady
from twostroke.messages import EventKind, Finished

# ---------------------------------------------------------------- as it should be


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
    world.submit(ask(1, max_tokens=8))
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
    left = world.loaded(1, second)
    assert left.handles.tolist() == [1]
    assert world.released(0) == [ticket.transfer_id]
    assert world.finished(1, second).finished == [Finished(1, LENGTH)]
    assert world.released(0) == [ticket.transfer_id]
    assert world.dispatcher.next_deadline_s() is None or world.sleep(1000) is None
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
    tickets = [world.ticket(0, 16)]
    tickets.append(world.ticket(0, 40))
    for i, ticket in enumerate(tickets):
        world.say(0, outputs(kv_ready=[KvReady(first.handle, ticket, i == 1)]))
    assert [(it.handle, it.is_last) for it in world.of(1, KvReady)] == [(1, False), (1, True)]
    world.say(0, outputs({first.handle: [7]}, ends=[(first.handle, LENGTH)]))
    world.loaded(1, second)
    assert sorted(world.released(0)) == sorted(ticket.transfer_id for ticket in tickets)
    world.finished(1, second)
    world.check_empty()
