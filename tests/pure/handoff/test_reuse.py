"""Memory that is reused under a transfer: late, stale and aborted reads, tickets that are void."""

import pytest

from tests.pure.handoff.pair import faulty, fill, make_pair, prompt_of
from twostroke.kv_messages import (
    KvLoadEnd,
    KvReady,
    KvRelease,
    KvReport,
)
from twostroke.messages import FinishReason
from twostroke.testing.link_with_faults import Fault

PROMPT = prompt_of(1, 18)


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


def test_pieces_that_no_plan_has_told_of_are_taken_back():
    p, d = make_pair(read_s=0.05)
    prompt = prompt_of(1, 40)
    for handle in (7, 8):
        d.receive(handle, prompt, None)
    d.run()
    p.send(1, prompt, stream=True)
    p.run()
    first, second, last = p.ready
    d.tell(KvReady(7, first.ticket, is_last=False))
    d.turn()
    d.tell(KvReady(7, second.ticket, is_last=False))
    d.tell(KvReady(8, first.ticket, is_last=False))
    d.abort(7, 8)
    plan = d.turn()
    assert plan.kv.loads == []
    assert plan.kv.given_up == [1]  # of the other the worker knows nothing
    d.run()
    d.check_empty()
    assert last.is_last


def test_a_ticket_may_come_before_there_are_blocks():
    p, d = make_pair()
    fill(d)
    d.receive(7, PROMPT, None)
    d.turn()
    d.tell(KvReady(7, p.ticket_for(1, PROMPT), is_last=True))
    d.run()
    d.check_answer(7, PROMPT)
