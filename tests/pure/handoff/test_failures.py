"""What goes wrong in prefill/decode systems, one way at a time, and what must come of it.

Each section is a kind of failure that public reports of other engines describe: blocks that nobody
frees, memory that is reused under a transfer, waits without an end, failures that nobody is told.
"""

import msgspec
import numpy as np
import pytest

from tests.pure.handoff.pair import make_pair, prompt_of
from twostroke.kv_messages import (
    KvConnect,
    KvDisconnect,
    KvLoadEnd,
    KvReady,
    KvReceive,
    KvRelease,
    KvRenew,
    KvReport,
    KvSend,
)
from twostroke.messages import EventKind, FinishReason
from twostroke.testing.link_with_faults import Fault

PROMPT = prompt_of(1, 18)


def faulty(*faults: Fault, p=None, d=None, **network):
    """P and D; the loads, in order, go wrong as told, and those after them do not."""
    queue = list(faults)
    return make_pair(p, d, fault=lambda: queue.pop(0) if queue else Fault.NONE, **network)


# ---------------------------------------------------------------- blocks that nobody frees


def bad_ticket(ticket):
    return msgspec.structs.replace(ticket, num_tokens=ticket.num_tokens - 1)


REFUSED = {
    "empty": ([], lambda ticket: ticket),
    "too long for the model": (prompt_of(2, 64), lambda ticket: ticket),
    "a ticket for another prompt": (prompt_of(2, 10), lambda ticket: ticket),
    "a ticket that lacks a token": (PROMPT, bad_ticket),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refusal_on_d_lets_p_go(what):
    prompt, change = REFUSED[what]
    p, d = make_pair()
    ticket = change(p.ticket_for(1, PROMPT))
    receive = KvReceive(num_tokens=18, timeout_s=5.0, ticket=ticket)
    d.add(7, prompt, kv_receive=receive)
    assert d.finished[7].reason is FinishReason.ERROR
    assert [(it.handle, it.error, it.reason) for it in d.received] == [
        (7, d.finished[7].error, "refused")
    ]
    d.check_empty()


def fill(engine):
    """Leave too few free blocks for another prompt."""
    engine.add(90, prompt_of(90, 56), 6)
    engine.turn()


def test_an_abort_in_ds_waiting_queue_lets_p_go():
    p, d = make_pair()
    ticket = p.ticket_for(1, PROMPT)
    fill(d)
    d.receive(7, PROMPT, ticket)
    d.turn()
    assert EventKind.LOADING not in d.events_of(7)
    d.abort(7)
    assert [(it.handle, it.reason, it.error) for it in d.received] == [(7, "abort", "")]
    d.run()
    d.check_empty()


@pytest.mark.parametrize("turns", range(8))
def test_an_abort_at_any_moment_lets_p_go_once(turns):
    p, d = make_pair(read_s=0.02)
    ticket = p.ticket_for(1, PROMPT)
    d.receive(7, PROMPT, ticket, 3)
    for _ in range(turns):
        d.turn()
    d.abort(7)
    d.abort(7)
    d.run()
    assert len(d.received) == 1
    d.check_empty()
    p.tell(KvRelease([ticket.transfer_id]))
    p.run()
    p.check_empty()


def test_a_lease_ends_by_time_on_an_idle_engine():
    p, _ = make_pair()
    p.ticket_for(1, PROMPT, lease_s=2.0)
    p.sleep_until_deadline()
    p.run()
    assert p.counts.num_expired_leases == 1
    p.check_empty()


def test_leases_end_when_the_pool_is_full_of_them_and_nothing_runs():
    p, _ = make_pair({"max_hold_share": 1.0, "enable_prefix_caching": False})
    for handle in range(1, 5):
        p.ticket_for(handle, prompt_of(handle, 16), lease_s=2.0)
    assert p.num_free == 0
    p.add(9, PROMPT)
    p.run()
    assert 9 not in p.finished
    while 9 not in p.finished:
        p.sleep_until_deadline()
        p.run()
    p.check_answer(9, PROMPT)


def test_an_error_of_the_transfer_is_an_end():
    p, d = faulty(Fault.ERROR)
    d.receive(7, PROMPT, p.ticket_for(1, PROMPT))
    d.run()
    assert d.finished[7].reason is FinishReason.ERROR
    assert d.received[0].error == d.finished[7].error == "connection lost"
    assert d.events_of(7)[-2:] == [EventKind.LOADED, EventKind.FINISHED]
    assert (d.counts.num_failed_loads, d.counts.num_expired_leases) == (1, 0)
    d.check_empty()


def test_a_load_has_a_deadline():
    p, d = faulty(Fault.STALL)
    d.receive(7, PROMPT, p.ticket_for(1, PROMPT), timeout_s=1.0)
    while not d.finished:
        d.turn()
    assert 1.0 <= d.clock.now() < 1.2
    assert "timed out" in d.finished[7].error
    assert [(it.error, it.reason) for it in d.received] == [(d.finished[7].error, "late")]
    assert d.num_free < 16  # a read may still write there


def test_so_has_the_wait_for_blocks():
    p, d = make_pair()
    ticket = p.ticket_for(1, PROMPT)
    holder = p.ticket_for(2, prompt_of(2, 20))
    d.receive(6, prompt_of(2, 20), holder, 40, timeout_s=9.0)
    d.run()
    d.receive(7, PROMPT, ticket, timeout_s=0.0)
    d.turn()
    assert "no blocks" in d.finished[7].error
    d.check_empty()


def test_a_stream_without_tickets_has_a_deadline():
    _, d = make_pair()
    d.receive(7, PROMPT, None, timeout_s=1.0)
    d.run()
    d.sleep_until_deadline()
    assert d.finished[7].reason is FinishReason.ERROR
    assert len(d.received) == 1
    d.run()
    d.check_empty()  # nothing was ever read for it


def test_unknown_names_are_counted_and_harmless():
    p, d = make_pair()
    ticket = p.ticket_for(1, PROMPT)
    for engine in (p, d):
        engine.tell(KvRelease([b"x" * 16]))
        engine.tell(KvRenew([b"x" * 16, b"y" * 16]))
        engine.tell(KvReady(999, ticket, is_last=True))
        engine.tell(KvDisconnect("nobody"))
        engine.abort(12345)
        engine.run()
        assert engine.core.stats().num_unknown_transfers == 4
    assert p.counts.num_holds == 1


def test_a_late_release_is_no_stranger():
    p, _ = make_pair()
    ticket = p.ticket_for(1, PROMPT)
    for _ in range(2):
        p.tell(KvRelease([ticket.transfer_id]))
        p.tell(KvRenew([ticket.transfer_id]))
    p.run()
    assert p.counts.num_unknown_transfers == 0
    p.check_empty()


@pytest.mark.parametrize("stream", [False, True])
def test_a_prefill_that_is_aborted_leaves_nothing(stream):
    p, _ = make_pair()
    p.send(1, prompt_of(1, 40), stream=stream)
    p.turn()
    p.turn()
    p.abort(1)
    p.run()
    p.check_empty()
    assert all(not ready.is_last for ready in p.ready)


def test_a_prefill_that_is_released_before_its_end_is_not_held():
    p, _ = make_pair()
    p.send(1, prompt_of(1, 40), stream=True)
    while not p.ready:
        p.turn()
    p.tell(KvRelease([p.ready[0].ticket.transfer_id]))
    p.run()
    assert p.finished[1].reason is FinishReason.LENGTH
    assert not any(ready.is_last for ready in p.ready)
    p.check_empty()


def test_a_refused_prefill_leaves_nothing():
    p, _ = make_pair()
    p.send(1, [])
    assert p.finished[1].reason is FinishReason.ERROR
    p.check_empty()


def test_one_request_cannot_do_both():
    p, d = make_pair()
    ticket = p.ticket_for(1, PROMPT)
    d.receive(7, PROMPT, ticket, kv_send=KvSend(lease_s=1.0))
    assert "one of the two" in d.finished[7].error


# ---------------------------------------------------------------- memory reused under a transfer


def test_blocks_of_an_aborted_load_are_not_reused_while_it_is_read():
    p, d = faulty(Fault.SLOW, d={"num_blocks": 11, "enable_prefix_caching": False}, slow_s=0.2)
    first, second = prompt_of(1, 20), prompt_of(2, 20)
    d.receive(7, first, p.ticket_for(1, first))
    d.turn()
    d.turn()
    d.abort(7)
    d.add(8, second)
    d.turn()
    loading = {block for request in d.core.state.held.values() for block in request.table.blocks}
    assert loading
    assert not loading & set(d.core.state.by_handle[8].table.blocks)
    d.run()
    d.check_answer(8, second)
    d.check_empty()


def test_a_stalled_reads_blocks_stay_out_of_use_until_its_source_is_destroyed():
    p, d = faulty(Fault.STALL, d={"quarantine_s": 2.0})
    d.receive(7, PROMPT, p.ticket_for(1, PROMPT), timeout_s=1.0)
    while not d.finished:
        d.turn()
    while d.core.state.held:
        assert d.num_free < 16
        d.turn()
    assert 4.9 < d.clock.now() < 5.5  # 1 s, and two times 2 s
    d.run()
    d.check_empty()


def test_a_lost_report_is_asked_for_again():
    p, d = faulty(Fault.LOST, d={"quarantine_s": 2.0})
    d.receive(7, PROMPT, p.ticket_for(1, PROMPT), timeout_s=1.0)
    d.run()
    assert "timed out" in d.finished[7].error
    assert d.clock.now() < 1.5  # the worker says at once that it knows of no such read
    d.check_empty()


@pytest.mark.parametrize("fault", [Fault.TWICE, Fault.LATE])
def test_a_report_may_come_twice_or_late(fault):
    p, d = faulty(fault, slow_s=0.2)
    d.receive(7, PROMPT, p.ticket_for(1, PROMPT), timeout_s=5.0)
    d.run()
    d.check_answer(7, PROMPT)
    assert d.counts.num_unknown_transfers == (fault is Fault.TWICE)


def test_a_late_report_after_the_deadline_is_ignored():
    p, d = faulty(Fault.LATE, slow_s=1.0)
    d.receive(7, PROMPT, p.ticket_for(1, PROMPT), timeout_s=1.0)
    d.run()
    assert d.finished[7].reason is FinishReason.ERROR
    d.sleep(5.0)
    d.receive(8, PROMPT, p.ticket_for(2, PROMPT))
    d.run()
    d.check_answer(8, PROMPT)
    assert d.counts.num_unknown_transfers == 1
    d.check_empty()


def test_success_that_is_reported_before_the_last_piece_is_no_success():
    p, d = make_pair()
    prompt = prompt_of(1, 40)
    d.receive(7, prompt, None)
    d.turn()
    p.send(1, prompt, stream=True)
    while not p.ready:
        p.turn()
    d.tell(KvReady(7, p.ready[0].ticket, is_last=False))
    d.turn()
    load_id = next(iter(d.link._loads))
    d.connector.update_connector_output(KvReport(loads=[KvLoadEnd(load_id=load_id)]))
    assert d.counts.num_unknown_transfers == 1
    d.run()
    assert 7 not in d.finished


def test_a_stale_ticket_reads_nothing():
    p, d = make_pair({"enable_prefix_caching": False})
    ticket = p.ticket_for(1, PROMPT)
    p.tell(KvRelease([ticket.transfer_id]))
    for handle in range(2, 6):
        p.add(handle, prompt_of(handle, 12))
    p.run()
    d.receive(7, PROMPT, ticket)
    d.run()
    assert d.finished[7].error == "the lease ended"
    assert d.tokens == {}
    d.add(8, PROMPT)  # and nothing of it was kept
    d.run()
    d.check_answer(8, PROMPT)
    assert d.cached[8] == 0


def test_a_lease_that_ends_during_the_read_spoils_it():
    p, d = faulty(Fault.SLOW, p={"enable_prefix_caching": False}, slow_s=1.0)
    ticket = p.ticket_for(1, PROMPT, lease_s=1.5)
    d.receive(7, PROMPT, ticket, timeout_s=9.0)
    d.turn()
    d.sleep(1.2)  # the first half is there
    p.sleep(0.5)
    p.turn()
    for handle in range(2, 6):
        p.add(handle, prompt_of(handle, 12))
    p.run()
    d.run()
    assert d.finished[7].error == "the lease ended"


def test_a_new_hold_in_the_same_slot_is_another():
    p, d = make_pair()
    old = p.ticket_for(1, PROMPT)
    p.tell(KvRelease([old.transfer_id]))
    new = p.ticket_for(2, prompt_of(2, 18))
    assert new.lease_slot == old.lease_slot
    d.receive(7, PROMPT, old)
    d.run()
    assert d.finished[7].error == "the lease ended"


def test_held_blocks_are_pinned_before_anything_can_evict_them():
    p, d = make_pair({"enable_prefix_caching": False})
    ticket = p.ticket_for(1, PROMPT)
    for handle in range(2, 7):
        p.add(handle, prompt_of(handle, 20), 6)
    p.run()
    d.receive(7, PROMPT, ticket)
    d.run()
    d.check_answer(7, PROMPT)


def test_the_word_is_cleared_in_the_plan_that_reuses_the_blocks_or_before():
    p, _ = make_pair()
    ticket = p.ticket_for(1, PROMPT)
    p.add(9, prompt_of(9, 16), 20)
    p.turn()  # a step is in flight when the release comes
    p.tell(KvRelease([ticket.transfer_id]))
    plan = p.turn()
    assert plan.kv.leases == [(ticket.lease_slot, b"")]
    p.run()


@pytest.mark.parametrize("stream", [False, True])
def test_preempted_on_p_in_its_last_step_it_is_computed_again(stream):
    p, d = make_pair({"num_blocks": 12, "enable_prefix_caching": False, "max_hold_share": 1.0})
    prompt = prompt_of(1, 24)
    p.send(1, prompt, stream=stream)
    p.turn()
    p.turn()
    assert p.core.num_in_flight == 1  # its last
    p.preempt()
    assert not p.finished
    p.run()
    last = p.ready[-1]
    assert last.is_last
    assert p.finished[1].reason is FinishReason.LENGTH
    d.receive(7, prompt, last.ticket)
    d.run()
    d.check_answer(7, prompt)
    ids = {ready.ticket.transfer_id for ready in p.ready}
    assert len(ids) == 1 + stream  # what was promised before the preemption is void
    p.tell(KvRelease(sorted(ids)))
    p.run()
    assert p.counts.num_unknown_transfers == 0
    p.check_empty()


def test_a_stream_goes_on_after_a_preemption_on_p():
    p, d = make_pair({"enable_prefix_caching": False})
    prompt = prompt_of(1, 40)
    d.receive(7, prompt, None)
    d.run()
    p.send(1, prompt, stream=True)

    def relay(told: int) -> int:
        for ready in p.ready[told:]:
            d.tell(KvReady(7, ready.ticket, ready.is_last))
            d.turn()
            d.sleep(0.1)
        return len(p.ready)

    while not p.ready:
        p.turn()
    told = relay(0)
    p.preempt()
    while not p.finished:
        p.turn()
        told = relay(told)
    d.run()
    d.check_answer(7, prompt)


def test_the_ticket_has_the_blocks_of_the_end():
    p, d = make_pair({"enable_prefix_caching": False})
    prompt = prompt_of(1, 40)
    p.send(1, prompt)
    p.turn()
    before = list(p.core.state.by_handle[1].table.blocks)
    p.preempt()
    p.add(2, prompt_of(2, 8), 1)
    p.run()
    ticket = p.ready[-1].ticket
    assert ticket.block_ids.tolist()[: len(before)] != before
    d.receive(7, prompt, ticket)
    d.run()
    d.check_answer(7, prompt)


# ---------------------------------------------------------------- waits without an end


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


# ---------------------------------------------------------------- failures that nobody is told


def test_a_pending_abort_wins_over_the_transfers_success():
    p, d = make_pair(read_s=0.001)
    d.receive(7, PROMPT, p.ticket_for(1, PROMPT))
    d.executor.submit(d.core.begin())
    d.executor.start()
    d.sleep(0.1)  # all is read: that is in the result of this step
    d.abort(7)
    result = d.executor.collect()
    assert [end.error for end in result.kv.loads] == [""]
    d.core.finish(result)
    d.run()
    assert d.finished[7].reason is FinishReason.ABORT
    assert (d.tokens, len(d.received)) == ({}, 1)
    d.check_empty()


def test_requests_may_share_a_name():
    p, d = make_pair(read_s=0.05)
    prompts = {handle: prompt_of(handle, 12) for handle in (1, 2, 3)}
    tickets = {h: p.ticket_for(h, prompt, request_id="same") for h, prompt in prompts.items()}
    for handle, prompt in prompts.items():
        d.receive(handle, prompt, tickets[handle], request_id="same")
    d.turn()
    d.abort(2)
    d.run()
    d.check_answer(1, prompts[1])
    d.check_answer(3, prompts[3])
    assert sorted(it.handle for it in d.received) == [1, 2, 3]
    d.check_empty()


def test_a_handle_may_be_used_again_while_its_first_load_is_quarantined():
    p, d = faulty(Fault.SLOW, slow_s=0.3)
    other = prompt_of(2, 14)
    d.receive(7, PROMPT, p.ticket_for(1, PROMPT))
    d.turn()
    d.turn()
    d.abort(7)
    d.finished.clear()
    d.receive(7, other, p.ticket_for(2, other))
    d.run()
    d.check_answer(7, other)
    assert len(d.received) == 2
    d.check_empty()


@pytest.mark.parametrize(
    "change",
    [
        {"num_tokens": 17},
        {"num_tokens": 19},
        {"transfer_id": b"short"},
        {"block_ids": np.array([1], np.int32)},
    ],
)
def test_a_ticket_that_does_not_serve_its_stream_is_an_error(change):
    p, d = make_pair()
    ticket = msgspec.structs.replace(p.ticket_for(1, PROMPT), **change)
    d.receive(7, PROMPT, None)
    d.run()
    d.tell(KvReady(7, ticket, is_last=True))
    assert "does not serve" in d.finished[7].error
    assert d.received[0].reason == "bad_ticket"
    d.run()
    d.check_empty()


@pytest.mark.parametrize("num_tokens", [-1, 0, 19])
def test_an_impossible_number_of_tokens_is_refused(num_tokens):
    _, d = make_pair()
    receive = KvReceive(num_tokens=num_tokens, timeout_s=5.0)
    d.add(7, PROMPT, kv_receive=receive)
    assert "was announced" in d.finished[7].error


def test_lease_ends_and_transfer_failures_are_counted_apart():
    p, d = faulty(Fault.ERROR)
    d.receive(7, PROMPT, p.ticket_for(1, PROMPT, lease_s=1.0))
    d.run()
    p.sleep(2.0)
    p.run()
    p.turn()
    assert (p.core.stats().num_expired_leases, p.core.stats().num_failed_loads) == (1, 0)
    assert (d.core.stats().num_expired_leases, d.core.stats().num_failed_loads) == (0, 1)
