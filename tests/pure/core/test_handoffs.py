"""The core's part of a hand-off; whole hand-offs are tested in tests/pure/handoff."""

import numpy as np
import pytest

from tests.pure.core.driver import Engine, make_request
from tests.pure.handoff.pair import Party, fill, make_pair, prompt_of
from twostroke.clock import VirtualClock
from twostroke.config import SchedulerConfig
from twostroke.core.loop import EngineCore
from twostroke.errors import ConfigError
from twostroke.kv.manager import IntegrityError
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
from twostroke.messages import EventKind, FinishReason, StepSample
from twostroke.testing.link_with_faults import FakeNetwork

PROMPT = prompt_of(1, 18)


def test_an_engine_without_a_connector_takes_no_part():
    engine = Engine()
    engine.core.apply_kv(KvRelease([b"x" * 16]))
    assert engine.core.stats().num_unknown_transfers == 1
    assert engine.core.next_deadline_s() is None
    engine.add(1, kv_send=KvSend(lease_s=1.0))
    assert "takes no part" in engine.finished[1].error
    engine.core.add(make_request(2, kv_receive=KvReceive(num_tokens=8, timeout_s=1.0)))
    outputs = engine.core.take_outputs()
    assert [it.handle for it in outputs.kv_received] == [2]
    assert engine.core.is_empty()


def test_a_sliding_window_has_no_hand_off():
    p, _ = make_pair()
    config = SchedulerConfig(sliding_window=16, num_blocks=17)
    with pytest.raises(ConfigError, match="sliding window"):
        EngineCore(config, p.clock, connector=p.connector)


def test_a_step_is_sampled_when_its_time_is_known():
    engine = Engine()
    engine.add(1, prompt=8)
    plan = engine.begin()
    result = engine.executor.collect()
    assert len(plan.slots) == 1
    result.started_s, result.ended_s = 5.0, 5.25
    outputs = engine.core.finish(result)
    assert outputs.step == StepSample(
        num_tokens=8,
        num_rows=1,
        num_sampled=1,
        context_tokens=0,
        attended_tokens=32,
        seconds=0.25,
    )


def test_a_step_without_a_time_or_rows_is_not():
    engine = Engine()
    engine.add(1, prompt=8, max_tokens=1)
    engine.begin()
    assert engine.core.finish(engine.executor.collect()).step is None
    engine.begin()
    result = engine.executor.collect()
    result.ended_s = 1.0
    assert engine.core.finish(result).step is None


def test_the_core_says_the_time_on_its_clock():
    engine = Engine()
    engine.clock.advance_to(3.5)
    assert engine.core.now() == 3.5


def test_finished_loads_wait_for_budget_and_seats():
    p, d = make_pair(d={"max_num_seqs": 2, "max_num_batched_tokens": 2}, read_s=0.001)
    d.add(5, prompt_of(5, 12), 4)
    d.turn()
    d.receive(7, PROMPT, p.ticket_for(1, PROMPT), 4)
    d.run()
    d.check_answer(5, prompt_of(5, 12))
    d.check_answer(7, PROMPT)


def test_a_finished_load_waits_while_a_prefill_takes_all():
    p, d = make_pair(d={"num_blocks": 40}, read_s=0.006)
    d.receive(7, PROMPT, p.ticket_for(1, PROMPT), 4)
    d.turn()
    d.add(5, prompt_of(5, 60), 2)
    d.run()
    began = d.events.index((5, EventKind.SCHEDULED))
    arrived = d.events.index((7, EventKind.LOADED))
    assert began < arrived < d.events.index((5, EventKind.FIRST_TOKEN))
    d.check_answer(7, PROMPT)
    d.check_answer(5, prompt_of(5, 60), 2)


def test_without_chunked_prefill_a_part_that_was_moved_waits_for_its_step():
    d = {"enable_chunked_prefill": False, "max_num_batched_tokens": 20, "num_blocks": 40}
    p, d = make_pair(d=d, read_s=0.001)
    prompt = prompt_of(6, 20)
    ticket = p.ticket_for(1, prompt[:2])
    for handle in (2, 3, 4):
        d.add(handle, prompt_of(handle, 4), 9)
    d.turn()
    d.receive(7, prompt, ticket, 4)  # 18 tokens are left, beside three decodes
    d.run()
    d.check_answer(7, prompt)
    for handle in (2, 3, 4):
        d.check_answer(handle, prompt_of(handle, 4), 9)


def test_released_before_its_end_and_preempted_it_has_no_lease_again():
    p, _ = make_pair({"enable_prefix_caching": False})
    p.send(1, prompt_of(1, 40), stream=True)
    while not p.ready:
        p.turn()
    transfer_id = p.ready[0].ticket.transfer_id
    p.tell(KvRenew([transfer_id]))  # it has not begun: nothing to renew
    p.tell(KvRelease([transfer_id]))
    p.preempt()
    p.run()
    assert p.finished[1].reason is FinishReason.LENGTH
    assert [ready.is_last for ready in p.ready].count(True) == 0
    assert p.counts.num_unknown_transfers == 0
    p.check_empty()


def test_the_events_of_a_prefill_that_waits():
    p = Party(FakeNetwork(VirtualClock()), "p", max_hold_share=0.5)
    p.ticket_for(1, prompt_of(1, 32))
    p.send(2, prompt_of(2, 8))
    p.run()
    p.tell(KvRelease([p.ready[0].ticket.transfer_id]))
    p.run()
    assert p.events_of(2) == [
        EventKind.QUEUED,
        EventKind.HELD,
        EventKind.SCHEDULED,
        EventKind.FIRST_TOKEN,
        EventKind.FINISHED,
    ]


def test_a_streamed_prompt_is_told_of_by_chunks_and_other_rows_are_not():
    p, d = make_pair()
    prompt = prompt_of(2, 40)
    p.add(3, prompt_of(3, 5), 20)
    p.send(1, prompt, stream=True)
    p.run()
    assert {ready.handle for ready in p.ready} == {1}
    assert [ready.is_last for ready in p.ready][-1]
    d.receive(7, prompt, None)
    for ready in p.ready:
        d.tell(KvReady(7, ready.ticket, ready.is_last))
    d.run()
    d.check_answer(7, prompt)
    assert d.received[0].num_tokens == 40


def test_a_peer_that_is_gone_fails_what_is_read_from_it():
    p, d = make_pair(read_s=5.0)
    ticket = p.ticket_for(1, PROMPT)
    d.tell(KvConnect(p.endpoint))
    d.run()
    d.receive(7, PROMPT, ticket)
    d.turn()
    assert EventKind.LOADING in d.events_of(7)
    d.tell(KvDisconnect("p"))
    d.run()
    assert d.finished[7].reason is FinishReason.ERROR
    assert d.events_of(7)[-2:] == [EventKind.LOADED, EventKind.FINISHED]
    d.check_empty()


def test_a_load_that_finds_no_room_in_time_has_not_arrived():
    p, d = make_pair()
    fill(d)
    d.receive(7, PROMPT, p.ticket_for(1, PROMPT), timeout_s=0.02)
    d.run()
    assert "no blocks became free" in d.finished[7].error
    assert d.events_of(7) == [EventKind.QUEUED, EventKind.FINISHED]
    d.check_empty()


def decoding_beside_a_load():
    """D, unchecked so that turns may be skipped: request 5 decodes, 7 waits for its KV."""
    p, d = make_pair(d={"check": False, "num_blocks": 40}, read_s=5.0)
    d.add(5, prompt_of(5, 8), 40)
    d.turn()
    d.turn()
    d.receive(7, PROMPT, p.ticket_for(1, PROMPT))
    d.turn()
    return d


def test_turns_beside_a_load_are_skipped_once_it_is_told_of():
    d = decoding_beside_a_load()
    d.tell(KvConnect(Party(d.network, "other").endpoint))
    assert d.core.skippable_turns == 0  # the worker must hear of it
    d.turn()
    turns = d.core.skippable_turns
    assert turns > 0
    computed = d.core.slots()[0]["num_computed_tokens"]
    (load_id,) = d.connector.loads._loads
    report = KvReport(loads=[KvLoadEnd(load_id=load_id)])
    d.core.skip(turns, np.array([1], np.int32), report=report)
    d.take()
    assert d.core.slots()[0]["num_computed_tokens"] == computed + turns
    assert d.events_of(7)[-1] is EventKind.LOADED
    assert d.core.skippable_turns == 0  # it is admitted in the next one


def test_where_requests_reserve_what_they_will_take_a_load_does_too():
    p, d = make_pair(d={"num_blocks": 16, "reserve_output_tokens": 16}, read_s=0.1)
    d.receive(7, PROMPT, p.ticket_for(1, PROMPT), 16)
    d.turn()
    d.add(5, prompt_of(5, 20), 16)  # both would not fit to their ends: 18 + 16 and 20 + 16
    d.turn()
    assert d.core.state.num_running == 0
    d.run()
    d.check_answer(7, PROMPT, 16)
    d.check_answer(5, prompt_of(5, 20), 16)
    assert d.core.stats().num_preemptions == 0


def test_a_prefill_that_is_held_back_again_is_told_of_once():
    p = Party(FakeNetwork(VirtualClock()), "p", max_hold_share=0.5)
    for handle in (1, 2):
        p.send(handle, prompt_of(handle, 16))
    p.run()
    p.send(3, prompt_of(3, 32))
    p.run()
    p.tell(KvRelease([p.ready[0].ticket.transfer_id]))
    p.run()
    assert p.events_of(3) == [EventKind.QUEUED, EventKind.HELD]
    p.tell(KvRelease([p.ready[1].ticket.transfer_id]))
    p.run()
    assert p.events_of(3).count(EventKind.HELD) == 1
    assert p.finished[3].reason is FinishReason.LENGTH


def damaged(break_books):
    p, d = make_pair(read_s=0.05)
    p.ticket_for(1, PROMPT)
    d.receive(7, PROMPT, p.ready[0].ticket)
    d.turn()
    break_books(p.connector, d.connector)
    for party in (p, d):
        party.core.check_integrity()


@pytest.mark.parametrize(
    "break_books",
    [
        lambda p, d: p.sends._free_slots.append(0),
        lambda p, d: p.sends._by_transfer.clear(),
        lambda p, d: p.sends._counted.update([3]),
        lambda p, d: setattr(p.sends, "num_holds", 2),
        lambda p, d: setattr(next(iter(p.sends._sends.values())), "lease_ends_s", None),
        lambda p, d: d.loads._by_uid.clear(),
        lambda p, d: d.loads._awaited.add(99),
    ],
)
def test_books_that_do_not_balance_are_found(break_books):
    damaged(lambda p, d: None)
    with pytest.raises(IntegrityError):
        damaged(break_books)


def test_what_ended_long_ago_is_forgotten():
    from twostroke.connector.outbox import RecentIds

    recent = RecentIds(size=2)
    for number in range(3):
        recent.add(bytes([number]))
    assert [bytes([number]) in recent for number in range(3)] == [False, True, True]


def test_arrays_of_a_ticket_are_columns():
    p, _ = make_pair()
    ticket = p.ticket_for(1, PROMPT)
    assert ticket.block_ids.dtype == np.int32
    assert len(ticket.block_ids) == 5
