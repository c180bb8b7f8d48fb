import numpy as np

from tests.pure.core.driver import Engine, make_request
from twostroke.config import SchedulerConfig
from twostroke.core.request import Request
from twostroke.core.seats import Seats
from twostroke.kv.manager import KvManager


def make(num_seats=2, **settings):
    kv = KvManager(SchedulerConfig(block_size=4, num_blocks=20, **settings))
    return kv, Seats(num_seats, kv, max_model_len=32, max_length=32, num_drafts=0)


def seated(kv, seats, handle=0, prompt=6, **fields):
    message = make_request(handle, prompt, **fields)
    table = kv.new_table(message.prompt_token_ids, "", may_read=True)
    request = Request(message, handle + 1, table)
    seats.sit(request)
    return request


def test_counters_move_in_and_out():
    kv, seats = make()
    request = seated(kv, seats, max_tokens=5)
    slot = request.slot
    assert (seats.end[slot], seats.stop_at[slot], seats.known[slot]) == (11, 11, 6)
    seats.computed[slot] = 6
    seats.placeholders[slot] = 1
    assert seats.leave(request) == slot
    assert (request.num_computed, request.num_placeholders, request.slot) == (6, 1, -1)
    assert list(seats.requests()) == []


def test_lengths_beyond_any_number_are_capped():
    kv, seats = make()
    request = seated(kv, seats, max_tokens=1 << 40)
    assert seats.stop_at[request.slot] == 32


def test_tokens_outlive_the_seat():
    kv, seats = make()
    request = seated(kv, seats, prompt=[1, 2, 3])
    seats.append(request, [4, 5])
    assert request.num_known == 5
    seats.write(request)
    seats.leave(request)
    seats.append(request, [6])
    assert request.tokens.tolist() == [1, 2, 3, 4, 5, 6]


def test_tokens_that_had_keys_come_back_as_well():
    kv, seats = make()
    request = seated(kv, seats, prompt=[1, 2, 3, 4, 5, 6])
    assert len(request.table.keys) == 1
    seats.append(request, [7])
    seats.write(request)
    assert seats.tokens_of(request).tolist() == [1, 2, 3, 4, 5, 6, 7]
    seats.leave(request)
    assert request.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_rows_grow_for_a_sequence_beyond_the_model_length():
    kv, seats = make()
    request = seated(kv, seats, prompt=33)
    assert seats.tokens.shape[1] > 33
    seats.append(request, list(range(60)))
    assert seats.tokens[request.slot, 33:93].tolist() == list(range(60))


def test_blocks_are_hashed_for_many_seats_at_once():
    kv, seats = make()
    one, two = seated(kv, seats, 0, prompt=6), seated(kv, seats, 1, prompt=6)
    for request in (one, two):
        seats.append(request, list(range(8)))
        seats.write(request)
    slots = np.array([one.slot, two.slot])
    seats.hash_blocks(slots, np.array([14, 9], np.int32))
    assert (len(one.table.keys), len(two.table.keys)) == (3, 2)
    whole = kv.new_table(seats.tokens_of(one)[:14], "", may_read=True)
    assert one.table.keys == whole.keys


def test_the_stop_filter_lets_no_stop_token_through():
    kv, seats = make()
    request = seated(kv, seats, stop_token_ids=(7, 5000), eos_token_ids=(2,))
    tokens = np.array([2, 7, 5000, 8], np.int32)
    assert seats.may_stop(tokens).tolist() == [True, True, True, False]
    seats.leave(request)
    assert not seats.may_stop(tokens).any()


def test_a_window_moves_with_the_request():
    engine = Engine(sliding_window=6, num_blocks=12, async_scheduling=False)
    engine.add(0, prompt=8, max_tokens=30)
    engine.run()
    assert len(engine.tokens[0]) == 30
