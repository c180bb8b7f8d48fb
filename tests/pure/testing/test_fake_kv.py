"""The fake model answers by what is in its KV, and a fake link moves that."""

import numpy as np
import pytest

from tests.pure.handoff.pair import make_pair, prompt_of
from twostroke.clock import VirtualClock
from twostroke.kv_messages import KvCommands, KvConnect, KvLoad
from twostroke.testing.fake_kv import FakePool, continuation, next_token
from twostroke.testing.link_with_faults import FakeNetwork, Fault

PROMPT = prompt_of(1, 18)


def test_any_schedule_gives_the_same_tokens():
    p, _ = make_pair({"num_blocks": 12, "max_num_batched_tokens": 5})
    prompts = {handle: prompt_of(handle, 6 + 3 * handle) for handle in range(1, 6)}
    for handle, prompt in prompts.items():
        p.add(handle, prompt, 6)
    p.run()
    for handle, prompt in prompts.items():
        p.check_answer(handle, prompt, 6)


@pytest.mark.parametrize("position", range(18))
def test_wrong_kv_at_any_position_changes_what_follows(position):
    p, _ = make_pair()
    p.add(1, PROMPT, 8)
    while 1 not in p.tokens:
        p.turn()
    blocks = p.core.state.by_handle[1].table.blocks
    p.pool.kv[blocks[position // 4], position % 4] ^= np.uint64(1)
    p.run()
    right = continuation(PROMPT, 8)
    assert p.tokens[1] != right
    assert p.tokens[1][-1] != right[-1]


def test_the_next_token_depends_on_the_order():
    kv = np.array([5, 9], np.uint64)
    assert next_token(kv) != next_token(kv[::-1])


def test_a_word_is_honoured_until_it_is_cleared():
    p, _ = make_pair()
    ticket = p.ticket_for(1, PROMPT)
    assert p.pool.honours(ticket)
    p.pool.set_leases([(ticket.lease_slot, b"")])
    assert not p.pool.honours(ticket)
    assert not FakePool(4, 4).honours(ticket)


def test_time_stops_at_the_limit():
    network = FakeNetwork(VirtualClock())
    happened = []
    network.after(2.0, lambda: happened.append("late"))
    network.after(1.0, lambda: happened.append("early"))
    assert network.next_event_s == 1.0
    assert not network.run(lambda: False, 1.5)
    assert happened == ["early"]
    assert network.run(lambda: len(happened) == 2, 9.0)


def test_a_link_reads_only_what_exists():
    p, d = make_pair()
    ticket = p.ticket_for(1, PROMPT)
    bad = KvLoad(
        load_id=1,
        ticket=type(ticket)(
            transfer_id=ticket.transfer_id,
            endpoint=ticket.endpoint,
            lease_slot=ticket.lease_slot,
            num_tokens=4,
            block_ids=np.array([99], np.int32),
        ),
        first_token=0,
        block_ids=np.array([1], np.int32),
    )
    d.link.apply(KvCommands(loads=[bad]))
    d.sleep(1.0)
    (end,) = d.link.report().loads
    assert "do not exist" in end.error
    d.link.apply(KvCommands(loads=[bad]))  # over already
    d.sleep(1.0)
    assert d.link.report() is None


def test_a_dead_engine_says_nothing():
    p, d = make_pair(read_s=0.1, fault=lambda: Fault.NONE)
    d.tell(KvConnect(p.endpoint))
    d.receive(7, PROMPT, p.ticket_for(1, PROMPT))
    d.turn()
    d.link.shutdown()
    d.sleep(5.0)
    assert d.link.report() is None
