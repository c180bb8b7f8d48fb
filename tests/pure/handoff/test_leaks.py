"""Blocks that nobody frees, or far too late: each way out of a hand-off lets both sides go."""

import msgspec
import pytest

from tests.pure.handoff.pair import faulty, fill, make_pair, prompt_of
from twostroke.kv_messages import (
    KvDisconnect,
    KvReady,
    KvReceive,
    KvRelease,
    KvRenew,
    KvSend,
)
from twostroke.messages import EventKind, FinishReason
from twostroke.testing.link_with_faults import Fault

PROMPT = prompt_of(1, 18)


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
