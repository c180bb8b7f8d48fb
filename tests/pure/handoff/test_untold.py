"""Failures that nobody is told of, or that are told of the wrong request."""

import msgspec
import numpy as np
import pytest

from tests.pure.handoff.pair import faulty, make_pair, prompt_of
from twostroke.kv_messages import (
    KvReady,
    KvReceive,
)
from twostroke.messages import FinishReason
from twostroke.testing.link_with_faults import Fault

PROMPT = prompt_of(1, 18)


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
