"""Waits without an end: dead engines, full pools, loads that wait for each other."""

import pytest

from tests.pure.handoff.pair import faulty, fill, make_pair, prompt_of
from twostroke.kv_messages import (
    KvConnect,
    KvDisconnect,
)
from twostroke.messages import EventKind, FinishReason
from twostroke.testing.link_with_faults import Fault

PROMPT = prompt_of(1, 18)


def test_engines_that_die_are_found_out():
    p, d = make_pair()
    ticket = p.ticket_for(1, PROMPT)
    p.link.shutdown()
    d.receive(7, PROMPT, ticket)
    d.run()
    assert d.finished[7].error == "nobody answers by that engine id"
    d.check_empty()


def test_a_dead_engines_tickets_are_not_waited_for():
    p, d = make_pair()
    ticket = p.ticket_for(1, PROMPT)
    fill(d)
    d.receive(7, PROMPT, ticket)
    d.turn()
    d.tell(KvDisconnect("p"))
    assert "is gone" in d.finished[7].error
    assert d.received[0].reason == "source_gone"
    d.run()
    d.check_empty()


def test_a_load_that_is_late_as_its_source_is_destroyed_ends_once():
    p, d = faulty(Fault.STALL, d={"quarantine_s": 1.0})
    first, second = p.ticket_for(1, PROMPT), p.ticket_for(2, prompt_of(2, 18))
    d.receive(7, PROMPT, first)
    d.turn()
    d.turn()
    d.abort(7)
    d.turn()
    d.sleep(1.1)
    d.turn()  # reminded once; the next time it is disconnected
    d.add(5, prompt_of(5, 30), 30)
    d.turn()
    d.receive(8, prompt_of(2, 18), second, timeout_s=0.5)
    d.turn()
    assert EventKind.LOADING not in d.events_of(8)
    d.sleep(2.0)
    d.turn()
    assert "no blocks" in d.finished[8].error
    d.run()
    d.check_empty()
    assert [it.handle for it in d.received] == [7, 8]


def test_what_is_read_from_a_dead_engine_ends():
    p, d = faulty(Fault.STALL)
    d.receive(7, PROMPT, p.ticket_for(1, PROMPT), timeout_s=60.0)
    d.turn()
    d.tell(KvDisconnect("p"))
    d.run()
    assert d.finished[7].reason is FinishReason.ERROR
    assert d.clock.now() < 1.0
    d.check_empty()


def test_an_engine_restarted_under_the_same_address_is_another():
    p, d = make_pair()
    ticket = p.ticket_for(1, PROMPT)
    p.link.shutdown()
    again, _ = make_pair()
    d.network.join("p-again", again.pool)
    d.receive(7, PROMPT, ticket)
    d.run()
    assert d.finished[7].reason is FinishReason.ERROR


def test_preempted_on_d_after_the_load_it_computes_and_never_asks_again():
    p, d = make_pair()
    d.receive(7, PROMPT, p.ticket_for(1, PROMPT), 8)
    while 7 not in d.tokens:
        d.turn()
    d.preempt()
    assert d.core.reset_prefix_cache()
    d.run()
    d.check_answer(7, PROMPT, 8)
    assert len(d.received) == 1
    assert d.events_of(7).count(EventKind.LOADING) == 1


def test_preempted_with_its_load_in_place_it_computes():
    p, d = make_pair()
    d.receive(7, PROMPT, p.ticket_for(1, PROMPT), 8)
    while EventKind.LOADED not in d.events_of(7):
        d.turn()
    (request,) = d.core.state.loaded.values()
    d.core.state.lose_blocks(request)
    d.run()
    d.check_answer(7, PROMPT, 8)
    assert len(d.received) == 1


@pytest.mark.parametrize("num_blocks", [7, 8, 9])
def test_two_loads_do_not_wait_for_each_other(num_blocks):
    p, d = make_pair(d={"num_blocks": num_blocks + 1, "enable_prefix_caching": False})
    first, second = prompt_of(1, 16), prompt_of(2, 12)  # 4 + 1 and 3 + 1 blocks
    d.receive(7, first, p.ticket_for(1, first))
    d.receive(8, second, p.ticket_for(2, second))
    d.run()
    d.check_answer(7, first)
    d.check_answer(8, second)
    assert EventKind.PREEMPTED not in [kind for _, kind in d.events]
    d.check_empty()


def test_a_load_has_its_first_decode_block_from_the_start():
    p, d = make_pair()
    d.receive(7, prompt_of(1, 16), p.ticket_for(1, prompt_of(1, 16)))
    d.turn()
    assert len(d.core.state.by_handle[7].table.blocks) == 5


def test_a_prompt_of_the_whole_pool_is_loaded():
    p, d = make_pair(d={"num_blocks": 6})
    prompt = prompt_of(1, 20)
    d.receive(7, prompt, p.ticket_for(1, prompt))
    d.run()
    d.check_answer(7, prompt, 1)
    assert d.finished[7].reason is FinishReason.LENGTH  # the pool can carry it no further


def test_a_finished_load_is_not_hidden_behind_a_blocked_head():
    p, d = make_pair(d={"policy": "priority"}, read_s=0.03)
    ticket = p.ticket_for(1, PROMPT)
    d.add(5, prompt_of(5, 28), 24)
    d.turn()
    d.receive(7, PROMPT, ticket, 3, priority=5)
    d.turn()
    d.add(6, prompt_of(6, 40), 4, priority=1)  # lacks blocks, and stands before it
    while 7 not in d.finished:
        assert 5 not in d.finished
        d.turn()
    d.check_answer(7, PROMPT, 3)
    d.run()


def test_loads_take_seats():
    p, d = make_pair(d={"max_num_seqs": 2}, read_s=0.05)
    tickets = {h: p.ticket_for(h, prompt_of(h, 8)) for h in (1, 2, 3)}
    for handle, ticket in tickets.items():
        d.receive(handle, prompt_of(handle, 8), ticket, 6)
    d.turn()
    assert len(d.core.state.loading) == 2
    d.run()
    for handle in tickets:
        d.check_answer(handle, prompt_of(handle, 8), 6)


def test_d_leaves_room_for_the_growth_of_what_runs():
    p, d = make_pair(d={"num_blocks": 15, "enable_prefix_caching": False})
    d.core.state.mean_output_tokens = 16.0
    d.add(5, prompt_of(5, 16), 16)
    d.turn()
    d.receive(7, PROMPT, p.ticket_for(1, PROMPT), 16)
    d.run()
    assert EventKind.PREEMPTED not in [kind for _, kind in d.events]
    d.check_answer(5, prompt_of(5, 16), 16)
    d.check_answer(7, PROMPT, 16)


def test_loads_count_among_what_grows():
    p, d = make_pair(d={"num_blocks": 16, "enable_prefix_caching": False}, read_s=0.1)
    d.core.state.mean_output_tokens = 16.0
    first, second = prompt_of(1, 16), prompt_of(2, 12)
    d.receive(7, first, p.ticket_for(1, first), 16)
    d.turn()
    d.receive(8, second, p.ticket_for(2, second), 16)
    d.turn()
    assert EventKind.LOADING in d.events_of(8)
    d.receive(9, prompt_of(3, 4), p.ticket_for(3, prompt_of(3, 4)), 16)
    d.turn()
    assert EventKind.LOADING not in d.events_of(9)
    d.run()
    assert EventKind.PREEMPTED not in [kind for _, kind in d.events]


def test_all_blocks_are_there_before_p_begins_to_stream():
    _, d = make_pair()
    fill(d)
    d.receive(7, PROMPT, None)
    d.turn()
    assert EventKind.LOADING not in d.events_of(7)
    while EventKind.LOADING not in d.events_of(7):
        d.turn()
    assert len(d.core.state.by_handle[7].table.blocks) == 5
    d.abort(7)
    d.run()
    d.check_empty()


def test_the_last_request_that_cannot_grow_ends():
    p, d = make_pair(d={"num_blocks": 7, "max_model_len": 64})
    prompt = prompt_of(1, 18)
    d.receive(7, prompt, p.ticket_for(1, prompt), 40)
    d.run()
    assert d.finished[7].reason is FinishReason.LENGTH
    d.check_answer(7, prompt, 7)
    d.check_empty()


@pytest.mark.parametrize("role", ["send", "receive"])
def test_what_never_fits_is_refused_at_once(role):
    p, d = make_pair(p={"num_blocks": 5}, d={"num_blocks": 5})
    prompt = prompt_of(1, 20)
    if role == "send":
        p.send(1, prompt)
        assert "needs 5 KV blocks" in p.finished[1].error
    else:
        d.receive(7, prompt, None)
        assert "needs 5 KV blocks" in d.finished[7].error
        assert d.received[0].reason == "refused"


def test_a_dead_engine_can_be_told_of():
    p, d = make_pair()
    p.link.shutdown()
    d.tell(KvConnect(p.endpoint))
    d.run()
    assert d.received == []
