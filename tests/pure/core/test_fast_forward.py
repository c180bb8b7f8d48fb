"""Turns that are skipped leave the engine as turns that are taken."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.pure.core.driver import Engine, make_request
from twostroke.core.loop import EngineCore
from twostroke.messages import EventKind
from twostroke.testing.fake_executor import FakeExecutor


def token_of(handle):
    return 10_000 + handle % 3


class Numbers(FakeExecutor):
    """Each request repeats one token, which some others have too; skipped steps are renumbered."""

    def __init__(self, block_size):
        super().__init__(block_size=block_size, token=lambda name, _: token_of(int(name[1:])))

    def skip(self, turns, freed, steps):
        for plan, step in zip(self._submitted, steps, strict=True):
            self._change_seats(plan)
            plan.new, plan.freed_slots = [], np.empty(0, np.int32)
            plan.grown_slots = plan.grown_counts = plan.grown_blocks = np.empty(0, np.int32)
            ends = plan.num_computed + plan.num_scheduled
            for slot, end in zip(plan.slots.tolist(), ends.tolist(), strict=True):
                self._seats[slot].num_computed = end - 1
            plan.step, plan.slots, plan.samples = step.number, step.slots, step.samples
            plan.num_computed, plan.num_scheduled = step.num_computed, step.num_scheduled
        for slot in freed:
            del self._seats[slot]
        for seat in self._seats.values():
            seat.num_known += turns
            seat.num_computed += turns
            seat.num_blocks = 10**6


def picture(core: EngineCore):
    """Everything that decides what the engine does next."""
    state, kv = core.state, core.state.kv
    for request in state.seats.requests():
        state.seats.read(request)
    requests = {
        handle: (
            request.status,
            request.num_computed,
            request.num_known,
            request.num_placeholders,
            request.table.blocks,
            request.table.num_registered,
            len(request.table.keys),
        )
        for handle, request in state.by_handle.items()
    }
    tokens = {
        request.handle: state.seats.tokens_of(request).tolist()
        for request in state.seats.requests()
    }
    keys = kv._map.keys_by_block()
    columns = [getattr(state.seats, name).tolist() for name in ("room", "register_at", "num_keys")]
    in_flight = [
        (s.number, s.slots.tolist(), s.num_computed.tolist(), s.num_scheduled.tolist())
        for s in state.in_flight
    ]
    free = kv.pool.free_blocks().tolist()
    stats = core.stats()
    return requests, tokens, keys, kv._map.blocks_by_key(), columns, in_flight, free, stats


def engine(*, fast, secret, **options):
    executor = Numbers(options["block_size"])
    made = Engine(check=False, executor=executor, **options)
    made.core.state.kv.hasher._secret = secret
    made.core.state.kv.hasher._root = made.core.state.kv.hasher._start_of("")
    made.fast = fast
    return made


def take_turns(made, turns):
    """That many turns, skipping what can be skipped."""
    skipped = 0
    while turns:
        made.take()
        count = min(made.core.skippable_turns, turns) if made.fast else 0
        if count:
            slots = made.core.state.running
            tokens = token_of(made.core.state.seats.handle[slots]).astype(np.int32)
            freed = made.core.skip(count, tokens)
            made.executor.skip(count, freed, made.core.state.in_flight)
            skipped += count
            turns -= count
            continue
        before = made.core.num_in_flight
        made.turn()
        if made.core.num_in_flight <= before:
            turns -= 1
    return skipped


requests = st.tuples(st.integers(1, 30), st.integers(1, 40), st.integers(0, 2))


@settings(max_examples=60, deadline=None)
@given(
    waves=st.lists(
        st.tuples(st.lists(requests, max_size=4), st.integers(1, 40), st.booleans()), max_size=5
    ),
    is_async=st.booleans(),
    caching=st.booleans(),
    num_blocks=st.integers(18, 60),
    seats=st.integers(1, 6),
    block_size=st.sampled_from([1, 4, 5]),
)
@example(  # turns in which no block gets full
    waves=[([(1, 9, 0)], 3, False)],
    is_async=False,
    caching=True,
    num_blocks=18,
    seats=1,
    block_size=5,
)
def test_skipped_turns_equal_turns_taken(waves, is_async, caching, num_blocks, seats, block_size):
    options = {
        "async_scheduling": is_async,
        "enable_prefix_caching": caching,
        "num_blocks": num_blocks,
        "max_num_seqs": seats,
        "block_size": block_size,
        "max_num_batched_tokens": 48,
        "max_model_len": 96,
    }
    both = [engine(fast=fast, secret=b"x" * 32, **options) for fast in (True, False)]
    handle = 0
    for wave, turns, abort in waves:
        for prompt, output, family in wave:
            for made in both:
                made.core.add(make_request(handle, [family] * prompt, output))
            handle += 1
        for made in both:
            if abort and made.core.state.by_handle:
                made.core.abort([min(made.core.state.by_handle)])
            take_turns(made, turns)
        assert picture(both[0].core) == picture(both[1].core)
        both[0].core.check_integrity()


@pytest.mark.parametrize("is_async", [True, False])
def test_nearly_all_of_a_long_answer_is_skipped(is_async):
    made = engine(
        fast=True, secret=b"y" * 32, block_size=4, num_blocks=40, async_scheduling=is_async
    )
    made.core.add(make_request(1, 8, 50))
    assert take_turns(made, 60) == 50 - 1 + is_async
    made.take()
    assert made.finished.keys() == {1}


@pytest.mark.parametrize("is_async", [True, False])
def test_a_turn_in_which_some_end_is_the_last(is_async):
    options = {"block_size": 4, "num_blocks": 60, "async_scheduling": is_async}
    fast, slow = (engine(fast=fast, secret=b"e" * 32, **options) for fast in (True, False))
    for made in (fast, slow):
        # In its last turn the first fills a block whose key that of the second has, too.
        for handle, output in ((0, 13), (3, 30), (6, 13)):
            made.core.add(make_request(handle, [7] * 8, output))
    while not (turns := fast.core.skippable_turns):
        take_turns(fast, 1)
        take_turns(slow, 1)
    assert fast.core.ends_in(turns)
    assert not fast.core.ends_in(turns - 1)
    before = fast.core.stats()
    assert take_turns(fast, turns) == turns
    take_turns(slow, turns)
    assert picture(fast.core) == picture(slow.core)
    assert fast.core.stats().step_tokens - before.step_tokens == 3 * turns - 2 * is_async
    fast.take()
    assert fast.finished == slow.finished
    assert fast.finished.keys() == {0, 6}
    assert fast.events[-2:] == slow.events[-2:] == [(h, EventKind.FINISHED) for h in (0, 6)]


def test_an_end_by_the_longest_length_is_seen_when_it_comes():
    made = engine(fast=True, secret=b"l" * 32, block_size=4, num_blocks=40, max_model_len=24)
    made.core.add(make_request(1, 8, 50))
    take_turns(made, 3)
    assert not made.core.ends_in(made.core.skippable_turns)
    take_turns(made, 30)
    made.take()
    assert made.finished.keys() == {1}
    assert made.core.stats().generation_tokens == 24 - 8


def test_an_end_that_a_minimum_puts_off_is_not_skipped():
    made = engine(fast=True, secret=b"m" * 32, block_size=4, num_blocks=40, async_scheduling=False)
    made.core.add(make_request(1, 8, 5, min_tokens=9))
    take_turns(made, 2)
    assert not made.core.ends_in(made.core.skippable_turns)


def test_no_more_turns_than_blocks():
    made = engine(fast=True, secret=b"z" * 32, block_size=4, num_blocks=9)
    for handle in (1, 2):
        made.core.add(make_request(handle, 8, 50))
    take_turns(made, 2)
    # Two tables of 2 blocks grow in turns; the 8 usable ones hold 16 tokens of each.
    turns = made.core.skippable_turns
    room = 16 - made.core.state.seats.computed[made.core.state.running].max()
    assert 0 < turns == room


@pytest.mark.parametrize(
    ("prompts", "options"),
    [
        ([8, 8], {"max_num_seqs": 4, "num_blocks": 5, "block_size": 4}),  # one waits for blocks
        ([40], {"max_num_batched_tokens": 16}),  # chunks
        ([40], {"max_num_batched_tokens": 16, "async_scheduling": False}),
        ([8], {"sliding_window": 8}),
        ([8], {"num_spec_tokens": 2}),
    ],
)
def test_nothing_is_skipped_where_more_than_decodes_may_happen(prompts, options):
    made = Engine(check=False, **options)
    for handle, prompt in enumerate(prompts):
        made.core.add(make_request(handle, prompt, 20))
    made.turn()
    made.turn()
    assert made.core.skippable_turns == 0


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("more", [0, 40])
def test_the_outlook_is_what_the_engine_says_of_itself_turn_by_turn(is_async, more):
    options = {"block_size": 4, "num_blocks": 600, "max_num_seqs": 50}
    options["max_num_batched_tokens"] = 512
    made = engine(fast=False, secret=b"o" * 32, async_scheduling=is_async, **options)
    for handle, prompt in ((1, 5), (2, 7), *((10 + i, 3 + i % 5) for i in range(more))):
        made.core.add(make_request(handle, prompt, 30))
    while not (turns := made.core.skippable_turns):
        made.turn()
    assert made.core.first_tokens_due == ([*made.core.state.by_handle] if is_async else [])
    outlook = made.core.outlook()
    for expected in [outlook.after(turn) for turn in range(turns)]:  # then they end
        assert made.core.stats() == expected
        take_turns(made, 1)
    assert made.core.first_tokens_due == []


def test_an_end_is_to_be_told():
    made = Engine()
    made.core.add(make_request(1, 8))
    assert not made.core.has_ends
    made.core.abort([1])
    assert made.core.has_ends
    made.take()
    assert not made.core.has_ends


def test_checked_plans_are_not_skipped():
    made = Engine(check=True)
    made.core.add(make_request(1, 8, 20))
    made.turn()
    made.turn()
    made.turn()
    assert made.core.skippable_turns == 0


@pytest.mark.parametrize("is_async", [True, False])
def test_what_is_left_behind_the_last_end_is_taken_at_once(is_async):
    options = {"block_size": 4, "num_blocks": 40, "async_scheduling": is_async}
    fast, slow = (engine(fast=False, secret=b"d" * 32, **options) for _ in range(2))
    for made in (fast, slow):
        made.core.add(make_request(1, 8, 3))
        assert not made.core.drain()  # there is a request
        made.turn()
        assert not made.core.drain()
        while 1 not in made.finished:
            made.turn()
    assert fast.core.num_in_flight == is_async
    assert fast.core.drain()
    slow.run()
    assert picture(fast.core) == picture(slow.core)
    assert fast.core.scheduler.num_steps == slow.core.scheduler.num_steps
    assert not fast.core.has_work()
    assert fast.core.drain()  # nothing is left
    assert picture(fast.core) == picture(slow.core)


def test_an_engine_with_rows_in_flight_is_not_drained():
    made = Engine(check=False)
    made.core.add(make_request(1, 8, 20))
    made.turn()
    made.core.abort([1])
    assert made.core.num_in_flight
    assert not made.core.drain()


def test_checked_plans_are_not_drained():
    made = Engine(check=True)
    made.core.add(make_request(1, 8, 1))
    while 1 not in made.finished:
        made.turn()
    assert not made.core.drain()
