"""Whatever fails: the documented outcome, one release a ticket, nothing left behind."""

import pytest

from tests.pure.router.engines import ABORT, ERROR, LENGTH, World, ask, outputs
from twostroke.errors import EngineDeadError
from twostroke.kv_messages import LEASE_ENDED, KvDisconnect, KvReady, KvReceived
from twostroke.ledger import Boundary
from twostroke.messages import EventKind, FinishReason

# ---------------------------------------------------------------- the client goes


def test_client_gone_while_p_computes():
    world = World("prefill", "decode")
    world.submit(ask(1))
    (first,) = world.added(0)
    world.dispatcher.abort([1])
    world.flush()
    assert world.aborted(0) == [first.handle]
    # The ticket was on its way already, so P holds the prompt.
    ticket = world.ticket(0)
    left = world.say(
        0,
        outputs(
            {first.handle: [7]},
            events=[(first.handle, EventKind.FINISHED, 0.0)],
            ends=[(first.handle, LENGTH)],
            kv_ready=[KvReady(first.handle, ticket, True)],
        ),
    )
    assert world.released(0) == [ticket.transfer_id]
    assert not left.handles.size
    assert not left.events.handles.size
    assert left.finished == []
    assert world.added(1) == []
    world.check_empty()


def test_client_gone_while_d_loads_or_decodes():
    for is_loaded in (False, True):
        world = World("prefill", "decode")
        world.submit(ask(1))
        ticket = world.prefilled(0, world.added(0)[0])
        (second,) = world.added(1)
        if is_loaded:
            world.loaded(1, second)
        world.dispatcher.abort([1])
        world.flush()
        assert world.aborted(1) == [1]
        assert world.released(0) == [ticket.transfer_id]
        world.finished(1, second, ABORT)
        late = KvReceived(handle=1, error="given up", reason="abort")
        world.say(1, outputs(kv_received=[late]))
        assert world.released(0) == [ticket.transfer_id]
        assert not world.dispatcher.counters.failures
        world.check_empty()


def test_client_gone_in_each_state_of_a_stream():
    for steps in range(4):
        world = World("prefill", "decode", kv_mode="stream")
        world.submit(ask(1))
        ticket = None
        if steps > 0:
            world.say(1, outputs(events=[(1, EventKind.LOADING, 0.0)]))
        if steps > 1:
            ticket = world.ticket(0, 16)
            world.say(0, outputs(kv_ready=[KvReady(world.added(0)[0].handle, ticket, False)]))
        if steps > 2:
            world.prefilled(0, world.added(0)[0])
        world.dispatcher.abort([1])
        world.flush()
        assert world.aborted(1) == [1]
        assert len(world.released(0)) == max(0, steps - 1)
        if steps in (1, 2):
            (first,) = world.added(0)
            assert world.aborted(0) == [first.handle]
            if ticket is not None:  # more of the same lease is no second release
                more = KvReady(first.handle, ticket, False)
                world.say(0, outputs(kv_ready=[more], ends=[(first.handle, ABORT)]))
                assert world.released(0) == [ticket.transfer_id]
        world.check_empty()


# ---------------------------------------------------------------- a leg fails


def test_an_error_on_p_ends_the_request():
    world = World("prefill", "decode")
    world.submit(ask(1))
    (first,) = world.added(0)
    left = world.finished(0, first, ERROR, "prompt does not fit")
    assert [(end.handle, end.reason, end.error) for end in left.finished] == [
        (1, ERROR, "prompt does not fit")
    ]
    world.check_empty()


def test_an_error_on_p_ends_the_other_leg_of_a_stream():
    world = World("prefill", "decode", kv_mode="stream")
    world.submit(ask(1))
    world.say(1, outputs(events=[(1, EventKind.LOADING, 0.0)]))
    left = world.finished(0, world.added(0)[0], ERROR, "logits are not finite")
    assert [end.error for end in left.finished] == ["logits are not finite"]
    assert world.aborted(1) == [1]
    world.check_empty()


def test_a_refusal_on_d_is_tried_once_more_and_told():
    world = World("prefill", "decode")
    world.submit(ask(1))
    ticket = world.prefilled(0, world.added(0)[0])
    (second,) = world.added(1)
    assert world.say(1, outputs(ends=[(1, ERROR, None, "too long")])).finished == []
    assert world.released(0) == [ticket.transfer_id]
    third = world.added(1)[1]
    assert third.kv_receive is None
    left = world.finished(1, third, ERROR, "too long")
    assert [(end.handle, end.error) for end in left.finished] == [(1, "too long")]
    assert second.handle == 1
    world.check_empty()


def test_a_failed_load_is_prefilled_where_it_decodes():
    world = World("prefill", "decode")
    world.submit(ask(1))
    ticket = world.prefilled(0, world.added(0)[0])
    left = world.failed(1, world.added(1)[0], LEASE_ENDED)
    assert left.finished == []
    assert left.events.kinds.tolist() == [Boundary.MOVED]  # not that it has finished
    again = world.added(1)[1]
    assert (again.request_id, again.kv_receive) == ("r1#1", None)
    assert again.handle > 1 << 60
    left = world.say(1, outputs({again.handle: [4, 5]}, ends=[(again.handle, LENGTH)]))
    assert left.handles.tolist() == [1]
    assert left.finished[0].handle == 1
    counters = world.dispatcher.counters
    assert counters.failures == counters.recomputes == {"lease_ended": 1}
    assert world.released(0) == [ticket.transfer_id]
    world.check_empty()


def test_a_prompt_too_long_to_be_prefilled_by_d_fails():
    world = World("prefill", "decode", recompute_max_tokens=39)
    world.submit(ask(1))
    world.prefilled(0, world.added(0)[0])
    left = world.failed(1, world.added(1)[0])
    (end,) = left.finished
    assert (end.handle, end.reason) == (1, ERROR)
    assert "no route" in end.error
    assert "limit: 39" in end.error
    world.check_empty()


def test_an_error_while_decoding_is_the_clients():
    world = World("prefill", "decode")
    world.submit(ask(1))
    world.prefilled(0, world.added(0)[0])
    (second,) = world.added(1)
    world.loaded(1, second)
    left = world.finished(1, second, ERROR, "logits")
    assert [(end.handle, end.error) for end in left.finished] == [(1, "logits")]
    assert len(world.added(1)) == 1
    world.check_empty()


def test_no_more_than_max_retries():
    world = World("prefill", "decode", max_retries=0)
    world.submit(ask(1))
    world.prefilled(0, world.added(0)[0])
    left = world.failed(1, world.added(1)[0])
    assert [(end.handle, end.error) for end in left.finished] == [(1, "load: no route")]
    world.check_empty()


# ---------------------------------------------------------------- P dies


def test_p_dies_before_its_ticket():
    world = World("prefill", "prefill", "decode")
    world.submit(ask(1))
    (home,) = (i for i in (0, 1) if world.added(i))
    assert world.die(home) == []
    (again,) = world.added(1 - home)
    assert again.request_id == "r1#1#p"
    assert world.dispatcher.counters.retries == {"prefill_died": 1}
    assert world.die(1 - home) == []  # that one, too: prefilled on D
    (whole,) = world.added(2)
    assert (whole.request_id, whole.kv_receive) == ("r1#2", None)
    world.loaded(2, whole)
    world.finished(2, whole)
    world.check_empty()


def test_p_dies_after_its_ticket_and_the_load_succeeds():
    world = World("prefill", "decode")
    world.submit(ask(1))
    world.prefilled(0, world.added(0)[0])
    (second,) = world.added(1)
    assert world.die(0) == []
    assert world.of(1, KvDisconnect) == []  # it may still be read from
    world.loaded(1, second)
    assert [it.engine_id for it in world.of(1, KvDisconnect)] == ["e0.0"]
    assert world.finished(1, second).finished[0].reason is LENGTH
    assert world.released(0) == []  # nobody is there to hear it
    world.check_empty()


def test_p_dies_after_its_ticket_and_the_load_fails():
    world = World("prefill", "decode")
    world.submit(ask(1))
    world.prefilled(0, world.added(0)[0])
    (second,) = world.added(1)
    world.die(0)
    world.failed(1, second)
    assert len(world.of(1, KvDisconnect)) == 1
    whole = world.added(1)[1]
    assert whole.kv_receive is None
    world.finished(1, whole)
    world.check_empty()


def test_p_dies_in_the_middle_of_a_stream():
    world = World("prefill", "decode", kv_mode="stream")
    world.submit(ask(1))
    world.say(1, outputs(events=[(1, EventKind.LOADING, 0.0)]))
    (first,) = world.added(0)
    world.say(0, outputs(kv_ready=[KvReady(first.handle, world.ticket(0, 16), False)]))
    assert world.die(0) == []
    assert world.aborted(1) == [1]
    assert len(world.of(1, KvDisconnect)) == 1
    whole = world.added(1)[1]
    assert whole.handle != 1
    # What the first try still says is for nobody.
    left = world.say(1, outputs({1: [3]}, ends=[(1, ABORT)]))
    assert not left.handles.size
    assert left.finished == []
    world.finished(1, whole)
    world.check_empty()


def test_p_is_back_under_its_index():
    world = World("prefill", "decode")
    world.submit(ask(1))
    world.die(0)
    world.start(0, "prefill")
    world.submit(ask(2))
    assert [leg.request_id for leg in world.added(0)] == ["r2#p"]
    assert world.added(1)[0].request_id == "r1#1"


# ---------------------------------------------------------------- D dies


def test_d_dies_with_nothing_streamed_and_another_reads():
    world = World("prefill", "decode", "decode")
    world.submit(ask(1))
    ticket = world.prefilled(0, world.added(0)[0])
    (home,) = (i for i in (1, 2) if world.added(i))
    assert world.die(home) == []
    (again,) = world.added(3 - home)
    assert again.kv_receive.ticket == ticket
    assert again.request_id == "r1#1"
    world.loaded(3 - home, again)
    world.finished(3 - home, again)
    assert world.released(0) == [ticket.transfer_id]
    assert world.dispatcher.counters.retries == {"decode_died": 1}
    world.check_empty()


def test_d_dies_and_the_ticket_is_gone_too():
    world = World("prefill", "prefill", "decode", "decode")
    world.submit(ask(1))
    (source,) = (i for i in (0, 1) if world.added(i))
    world.prefilled(source, world.added(source)[0])
    (home,) = (i for i in (2, 3) if world.added(i))
    world.die(source)
    assert world.die(home) == []
    (again,) = world.added(1 - source)  # from the start
    world.prefilled(1 - source, again)
    (second,) = world.added(5 - home)
    world.loaded(5 - home, second)
    world.finished(5 - home, second)
    world.check_empty()


def test_d_dies_with_something_streamed():
    world = World("prefill", "decode", "decode")
    world.submit(ask(1))
    world.prefilled(0, world.added(0)[0])
    (home,) = (i for i in (1, 2) if world.added(i))
    world.loaded(home, world.added(home)[0])
    (end,) = world.die(home)
    assert (end.handle, end.reason) == (1, ERROR)
    assert f"engine {home}: killed" in end.error
    world.check_empty()


def test_d_dies_before_p_is_done_and_another_reads():
    world = World("prefill", "decode", "decode")
    world.submit(ask(1))
    home = next(e.index for e in world.dispatcher.fleet if e.committed_blocks)
    assert world.die(home) == []
    world.prefilled(0, world.added(0)[0])
    assert len(world.added(3 - home)) == 1


def test_the_last_d_dies():
    world = World("prefill", "decode", num_blocks=6)
    world.submit(*(ask(handle, num_prompt=64, max_tokens=16) for handle in (1, 2)))
    ended = world.die(1)
    assert [end.handle for end in ended] == [2]  # it waited for room
    with pytest.raises(EngineDeadError, match="engine 1: killed"):
        world.submit(ask(3))
    # P is done, and nobody is left to read it.
    (first,) = world.added(0)
    ticket = world.ticket(0)
    left = world.say(
        0,
        outputs(ends=[(first.handle, LENGTH)], kv_ready=[KvReady(first.handle, ticket, True)]),
    )
    assert [(end.handle, end.reason) for end in left.finished] == [(1, ERROR)]
    assert world.released(0) == [ticket.transfer_id]
    world.check_empty()


def test_an_engine_that_is_shut_down_moves_what_has_not_begun():
    world = World("prefill", "decode", "decode")
    world.submit(ask(1))
    world.prefilled(0, world.added(0)[0])
    (home,) = (i for i in (1, 2) if world.added(i))
    left = world.finished(home, world.added(home)[0], ABORT)
    assert left.finished == []
    assert world.dispatcher.counters.retries == {"engine_left": 1}
    assert not left.handles.size


# ---------------------------------------------------------------- late, lost, twice


def test_p_that_says_nothing_is_given_up():
    world = World("prefill", "decode", handoff_timeout_s=60.0)
    world.submit(ask(1))
    left = world.sleep(61)
    assert left.events.kinds.tolist() == [Boundary.MOVED]
    assert world.aborted(0) == [world.added(0)[0].handle]
    (whole,) = world.added(1)
    assert whole.kv_receive is None
    assert world.dispatcher.counters.num_late == 1
    world.finished(1, whole)
    world.check_empty()


def test_d_that_says_nothing_is_given_up():
    world = World("prefill", "decode", "decode", handoff_timeout_s=60.0)
    world.submit(ask(1))
    ticket = world.prefilled(0, world.added(0)[0])
    (home,) = (i for i in (1, 2) if world.added(i))
    world.sleep(61)
    assert world.aborted(home) == [1]
    assert world.released(0) == [ticket.transfer_id]
    (whole,) = world.added(3 - home)  # not where it hung
    left = world.say(home, outputs({1: [9]}, events=[(1, EventKind.FIRST_TOKEN, 0.0)]))
    assert not left.handles.size
    world.finished(3 - home, whole)


def test_tickets_told_twice_or_by_strangers_change_nothing():
    world = World("prefill", "decode")
    world.submit(ask(1))
    (first,) = world.added(0)
    ticket = world.prefilled(0, first)
    for handle in (first.handle, 1, 77):
        again = KvReady(handle, ticket, True)
        world.say(0, outputs(kv_ready=[again]))
    assert world.dispatcher.counters.num_unknown_tickets == 3
    assert len(world.added(1)) == 1
    world.loaded(1, world.added(1)[0])
    world.loaded(1, world.added(1)[0])
    world.finished(1, world.added(1)[0])
    assert world.released(0) == [ticket.transfer_id]
    world.check_empty()


def test_a_prefill_without_a_ticket_runs_again():
    world = World("prefill", "decode")
    world.submit(ask(1))
    world.finished(0, world.added(0)[0], LENGTH)
    assert world.dispatcher.counters.retries == {"prefill_lost": 1}
    world.prefilled(0, world.added(0)[1])
    assert len(world.added(1)) == 1


def test_a_pair_that_fails_again_and_again_is_left_alone_for_a_while():
    world = World("prefill", "decode")
    for handle in range(1, 5):
        world.submit(ask(handle))
        if len(world.added(0)) < handle:
            break
        world.prefilled(0, world.added(0)[-1])
        world.failed(1, next(leg for leg in world.added(1) if leg.handle == handle))
        world.finished(1, world.added(1)[-1])
    assert handle == 4
    assert world.added(1)[-1].kv_receive is None
    assert world.dispatcher.counters.decisions["whole", "no_prefill_engine"] == 1
    world.sleep(6)
    world.submit(ask(5))
    assert len(world.added(0)) == 4


def test_outputs_of_an_engine_that_is_gone_are_nothing():
    world = World("prefill", "decode", "decode")
    world.submit(ask(1))
    world.die(0)
    left = world.say(0, outputs({1: [5]}, ends=[(1, FinishReason.STOP)]))
    assert not left.handles.size
    assert left.finished == []
    assert world.die(0) == []
