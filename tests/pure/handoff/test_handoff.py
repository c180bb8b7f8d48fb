"""Hand-offs as they should go, from two engines' point of view."""

import pytest

from tests.pure.handoff.pair import make_pair, prompt_of
from twostroke.connector.base import KvHandoffScheduler
from twostroke.cost import LinearStepCost
from twostroke.kv_messages import KvCommands, KvConnect, KvDisconnect, KvReady, KvRelease, KvRenew
from twostroke.messages import EventKind, FinishReason
from twostroke.testing.fake_kv import continuation

LOADED_LIFE = [
    EventKind.QUEUED,
    EventKind.LOADING,
    EventKind.LOADED,
    EventKind.SCHEDULED,
    EventKind.FIRST_TOKEN,
    EventKind.FINISHED,
]


@pytest.mark.parametrize("num_tokens", [2, 3, 4, 5, 16, 17, 30])
@pytest.mark.parametrize("sizes", [(4, 4), (8, 4), (4, 8)])
def test_a_prompt_is_pulled(num_tokens, sizes):
    p, d = make_pair({"block_size": sizes[0]}, {"block_size": sizes[1]})
    prompt = prompt_of(1, num_tokens)
    ticket = p.ticket_for(1, prompt)
    assert ticket.num_tokens == num_tokens
    assert p.finished[1].reason is FinishReason.LENGTH
    d.receive(7, prompt, ticket)
    d.run()
    d.check_answer(7, prompt)
    assert d.events_of(7) == LOADED_LIFE
    (received,) = d.received
    assert (received.handle, received.num_tokens, received.error) == (7, num_tokens, "")
    assert received.num_bytes > 0
    assert received.ended_s > received.started_s
    assert d.cached[7] == 0  # of this engine's own cache
    d.check_empty()
    p.tell(KvRelease([ticket.transfer_id]))
    p.run()
    p.check_empty()


def test_a_prompt_is_streamed_chunk_by_chunk():
    p, d = make_pair()
    prompt = prompt_of(2, 40)
    d.receive(7, prompt, None)
    d.run()
    assert EventKind.LOADING in d.events_of(7)
    assert not d.core.has_work()  # nothing was read yet: it sleeps
    p.send(1, prompt, stream=True)
    while not p.finished:
        told = len(p.ready)
        p.turn()
        for ready in p.ready[told:]:
            d.tell(KvReady(7, ready.ticket, ready.is_last))
            d.turn()
    assert [(it.ticket.num_tokens, it.is_last) for it in p.ready] == [
        (16, False),
        (32, False),
        (40, True),
    ]
    assert len({it.ticket.transfer_id for it in p.ready}) == 1
    d.run()
    d.check_answer(7, prompt)
    assert d.received[0].num_tokens == 40


def test_later_pieces_of_a_stream_wait_for_no_plan():
    """The first one does: a step in flight may still write into its blocks. So does what comes
    before that plan was run, or pieces would change places."""
    p, d = make_pair()
    prompt = prompt_of(2, 40)
    p.send(1, prompt, stream=True)
    p.run()
    pieces = [KvReady(7, it.ticket, it.is_last) for it in p.ready]
    told: list[int] = []  # first tokens of what the worker was told to read
    apply = d.link.apply

    def noting_apply(commands: KvCommands) -> None:
        told.extend(piece.first_token for piece in commands.loads)
        apply(commands)

    d.link.apply = noting_apply  # type: ignore[method-assign]
    d.add(1, prompt_of(9, 5), 20)
    d.receive(7, prompt, None)
    while EventKind.LOADING not in d.events_of(7):
        d.turn()
    d.tell(pieces[0])
    assert told == []
    plan = d.core.begin()
    d.executor.submit(plan)
    d.tell(pieces[1])
    while not told:
        d.finish()
    assert told == [0], "the second one came before the first one's plan was run"
    d.turn()
    while len(told) < 2:
        d.turn()
    while d.core.num_in_flight:
        d.finish()
    d.executor.submit(d.core.begin())
    d.tell(pieces[2])
    assert told == [0, 16, 32], "a step is in flight, and does not matter"
    d.run()
    d.check_answer(7, prompt)


def test_chunks_are_told_of_when_their_results_are_in():
    p, _ = make_pair()
    p.send(1, prompt_of(2, 40), stream=True)
    p.turn()
    assert p.core.num_in_flight == 1
    assert p.ready == []


def test_tokens_equal_those_of_one_engine():
    p, d = make_pair()
    prompt = prompt_of(3, 21)
    p.add(1, prompt, 8)
    p.run()
    d.receive(7, prompt, p.ticket_for(2, prompt), 8)
    d.run()
    assert d.tokens[7] == p.tokens[1] == continuation(prompt, 8)


def test_the_cached_part_is_not_read():
    p, d = make_pair()
    prompt = prompt_of(4, 23)
    ticket = p.ticket_for(1, prompt)
    d.add(6, prompt[:17], 1)
    d.run()
    d.receive(7, prompt, ticket)
    d.run()
    d.check_answer(7, prompt)
    assert d.received[0].num_tokens == 23 - 16
    assert d.cached[7] == 16


def test_nothing_is_read_when_all_is_cached():
    p, d = make_pair()
    prompt = prompt_of(4, 17)
    d.add(6, prompt, 1)
    d.run()
    d.receive(7, prompt, p.ticket_for(1, prompt))
    d.run()
    d.check_answer(7, prompt)
    assert [(it.num_tokens, it.reason) for it in d.received] == [(0, "cached")]
    assert EventKind.LOADING not in d.events_of(7)


def test_47_what_is_cheaper_to_compute_is_not_moved():
    p, d = make_pair(d={"step_cost": LinearStepCost(base_s=1e-6, token_s=1e-6)})
    d.tell(KvConnect(p.endpoint))
    d.run()
    prompt = prompt_of(5, 20)
    d.receive(7, prompt, p.ticket_for(1, prompt))
    d.run()
    d.check_answer(7, prompt)
    assert [(it.num_tokens, it.reason) for it in d.received] == [(0, "recompute")]


def test_without_a_measured_link_it_is_moved():
    p, d = make_pair(d={"step_cost": LinearStepCost(base_s=1e-6)})
    prompt = prompt_of(5, 20)
    d.receive(7, prompt, p.ticket_for(1, prompt))
    d.run()
    assert d.received[0].num_tokens == 20
    d.receive(8, prompt_of(6, 20), None)  # who will hold it is not known yet
    d.turn()
    assert EventKind.LOADING in d.events_of(8)


def test_a_dear_step_is_saved():
    p, d = make_pair(d={"step_cost": LinearStepCost(base_s=10.0)})
    d.tell(KvConnect(p.endpoint))
    d.run()
    prompt = prompt_of(5, 20)
    d.receive(7, prompt, p.ticket_for(1, prompt))
    d.run()
    assert d.received[0].num_tokens == 20


def test_a_part_of_a_prompt_can_be_moved():
    p, d = make_pair()
    prompt = prompt_of(6, 30)
    ticket = p.ticket_for(1, prompt[:18])
    d.receive(7, prompt, ticket)
    d.run()
    d.check_answer(7, prompt)
    assert d.received[0].num_tokens == 18


# ---------------------------------------------------------------- the bound on what is held


def test_prefills_beyond_the_bound_are_held_back_once_told():
    p, _ = make_pair({"max_hold_share": 0.5, "enable_prefix_caching": False})  # 8 of 16 blocks
    tickets = [p.ticket_for(handle, prompt_of(handle, 16)) for handle in (1, 2)]
    assert p.counts.hold_usage == 0.5
    for handle in (3, 4):
        p.send(handle, prompt_of(handle, 8))
    p.run()
    assert not p.core.has_work()  # it sleeps until a release or the end of a lease
    assert [p.events_of(handle) for handle in (3, 4)] == [[EventKind.QUEUED, EventKind.HELD]] * 2
    p.tell(KvRelease([tickets[0].transfer_id]))
    p.run()
    assert {3, 4} <= p.finished.keys()
    assert p.events_of(3).count(EventKind.HELD) == 1
    assert p.counts.hold_usage == 0.5


def test_other_requests_pass_those_held_back():
    p, _ = make_pair({"max_hold_share": 0.25})
    p.ticket_for(1, prompt_of(1, 16))
    p.send(2, prompt_of(2, 16))
    p.add(3, prompt_of(3, 16))
    p.run()
    p.check_answer(3, prompt_of(3, 16))
    assert 2 not in p.finished


def test_a_prompt_larger_than_the_bound_passes_alone():
    p, _ = make_pair({"max_hold_share": 0.25})
    small, large = prompt_of(1, 8), prompt_of(2, 40)
    ticket = p.ticket_for(1, small)
    p.send(2, large)
    p.send(3, small)  # would fit, but must not starve the large one
    p.run()
    assert p.finished.keys() == {1}
    p.tell(KvRelease([ticket.transfer_id]))
    p.run()
    assert p.finished.keys() == {1, 2}
    p.tell(KvRelease([p.ready[-1].ticket.transfer_id]))
    p.run()
    assert p.finished.keys() == {1, 2, 3}


def test_shared_blocks_count_once():
    p, _ = make_pair({"max_hold_share": 0.6})  # 9 of 16 blocks
    prefix = prompt_of(1, 24)
    for handle in range(1, 4):
        p.ticket_for(handle, prefix + prompt_of(handle + 5, 2))
    assert p.counts.num_holds == 3
    assert p.counts.hold_usage == (6 + 3) / 16


def test_the_next_passes_when_the_first_is_aborted():
    p, _ = make_pair({"max_hold_share": 0.5})
    ticket = p.ticket_for(1, prompt_of(1, 32))
    p.send(2, prompt_of(2, 32))
    p.send(3, prompt_of(3, 8))
    p.run()
    p.abort(2)
    p.tell(KvRelease([ticket.transfer_id]))
    p.run()
    assert p.finished[3].reason is FinishReason.LENGTH


# ---------------------------------------------------------------- when to step, and when to sleep


def test_holds_are_no_work():
    p, _ = make_pair()
    p.ticket_for(1, prompt_of(1, 16), lease_s=30.0)
    assert not p.core.has_work()
    assert p.core.begin() is None
    assert not p.core.is_empty()
    assert p.core.next_deadline_s() == pytest.approx(p.clock.now() + 30.0, abs=0.1)


def test_loads_and_handshakes_are():
    p, d = make_pair(read_s=0.05)
    d.tell(KvConnect(p.endpoint))
    assert d.core.has_work()
    d.turn()
    assert d.core.has_work()
    d.run()
    d.tell(KvConnect(p.endpoint))  # once is enough
    assert not d.core.has_work()
    d.receive(7, prompt_of(1, 8), p.ticket_for(1, prompt_of(1, 8)))
    d.turn()
    assert d.core.has_work()


def test_a_handshake_is_not_waited_for_for_ever():
    p, d = make_pair()
    d.link.apply = lambda commands: None  # never answers
    d.tell(KvConnect(p.endpoint))
    d.turn()
    assert d.core.has_work()
    d.sleep(11.0)
    d.run()
    assert not d.core.has_work()


def test_a_peer_that_is_gone_is_met_anew():
    p, d = make_pair()
    d.tell(KvConnect(p.endpoint))
    d.run()
    d.tell(KvDisconnect("p"))
    d.run()
    d.tell(KvConnect(p.endpoint))
    assert d.core.has_work()


def test_renewed_leases_last():
    p, _ = make_pair()
    ticket = p.ticket_for(1, prompt_of(1, 16), lease_s=1.0)
    for _ in range(5):
        p.sleep(0.9)
        p.tell(KvRenew([ticket.transfer_id]))
        p.turn()
    assert p.counts.num_holds == 1
    p.sleep_until_deadline()
    p.run()
    assert p.counts.num_expired_leases == 1
    p.check_empty()


# ---------------------------------------------------------------- settings


def test_the_protocol_is_complete():
    p, _ = make_pair()
    assert isinstance(p.connector, KvHandoffScheduler)
    assert p.core.state.handoff is p.connector


def test_blocks_of_one_request_stand_in_runs():
    p, _ = make_pair({"enable_prefix_caching": False, "max_num_batched_tokens": 64})
    for handle in range(1, 5):  # churn: blocks come back last first
        p.add(handle, prompt_of(handle, 14), 2)
    p.run()
    ticket = p.ticket_for(9, prompt_of(9, 24))
    ids = ticket.block_ids.tolist()
    assert ids == sorted(ids)
