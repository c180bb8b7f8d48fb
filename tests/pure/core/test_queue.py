import pytest

from tests.pure.core.driver import make_request
from twostroke.core.queue import WaitingQueues
from twostroke.core.request import Request, Status
from twostroke.kv.manager import BlockTable


def make(handle, priority=0, arrival_s=0.0):
    message = make_request(handle, priority=priority, arrival_s=arrival_s)
    return Request(message, handle, BlockTable([], None))


def names(requests):
    return [request.handle for request in requests]


@pytest.fixture
def fcfs():
    queues = WaitingQueues("fcfs")
    requests = [make(handle) for handle in range(4)]
    for request in requests:
        queues.add(request)
    return queues, requests


def test_first_come_first_served(fcfs):
    queues, requests = fcfs
    assert queues.head() is requests[0]
    queues.take(requests[0])
    queues.end_scan()
    assert names(queues.waiting()) == [1, 2, 3]
    assert len(queues) == 3


def test_preempted_requests_go_to_the_front(fcfs):
    queues, _ = fcfs
    for handle in (7, 8):
        queues.put_back(make(handle))
    assert names(queues.waiting()) == [8, 7, 0, 1, 2, 3]


def test_passed_over_requests_overtake_the_rest(fcfs):
    queues, requests = fcfs
    queues.pass_over(queues.head())
    queues.pass_over(queues.head())
    assert queues.head() is requests[2]
    queues.end_scan()
    assert queues.head() is requests[0]
    assert names(queues.skipped()) == [0, 1]
    assert names(queues.waiting()) == [2, 3]


def test_skipped_requests_keep_their_order_when_passed_over_again(fcfs):
    queues, requests = fcfs
    for _ in range(3):
        queues.pass_over(queues.head())
    queues.end_scan()
    queues.pass_over(queues.head())
    queues.take(queues.head())
    queues.end_scan()
    assert names(queues.skipped()) == [0, 2]
    assert queues.head() is requests[0]


def test_blocked_requests_are_not_looked_at_until_they_wake(fcfs):
    queues, requests = fcfs
    queues.block(queues.head())
    assert queues.num_blocked == 1
    assert queues.is_blocked(requests[0])
    assert queues.head() is requests[1]
    assert names(queues.skipped()) == [0]
    queues.wake(requests[0])
    queues.wake(requests[0])
    assert queues.head() is requests[0]
    assert queues.num_blocked == 0


def test_arrivals_that_are_blocked_start_in_skipped():
    queues = WaitingQueues("fcfs")
    request = make(0)
    request.status = Status.WAITING_FOR_GRAMMAR
    queues.add(request)
    assert names(queues.skipped()) == [0]
    assert queues.head() is None


def test_hidden_requests_keep_their_place(fcfs):
    queues, requests = fcfs
    queues.pass_over(queues.head())
    queues.end_scan()
    queues.hide(queues.head())
    queues.hide(queues.head())
    assert queues.head() is requests[2]
    assert queues.head(skipped_only=True) is None
    queues.end_scan()
    assert names(queues.skipped()) == [0]
    assert names(queues.waiting()) == [1, 2, 3]


def test_removal_from_anywhere(fcfs):
    queues, requests = fcfs
    queues.block(queues.head())
    queues.pass_over(queues.head())
    queues.end_scan()
    for request in (*requests, make(9)):
        queues.remove(request)
    assert len(queues) == 0
    assert queues.head() is None


def test_stale_entries_are_swept():
    queues = WaitingQueues("fcfs")
    requests = [make(handle) for handle in range(300)]
    for request in requests:
        queues.add(request)
    for request in requests[1:]:
        queues.remove(request)
    assert len(queues._waiting._heap) < 100
    assert queues.head() is requests[0]


def test_priority_order_and_its_ties():
    queues = WaitingQueues("priority")
    for handle, priority, arrival_s in ((0, 1, 0.0), (1, 0, 2.0), (2, 0, 1.0), (3, 0, 1.0)):
        queues.add(make(handle, priority, arrival_s))
    assert names(queues.waiting()) == [2, 3, 1, 0]
    queues.put_back(make(4, 0, 1.5))
    assert names(queues.waiting()) == [2, 3, 4, 1, 0]


def test_priority_takes_the_smaller_head_of_both_queues():
    queues = WaitingQueues("priority")
    low, high = make(0, 5), make(1, 1)
    queues.add(low)
    queues.pass_over(queues.head())
    queues.end_scan()
    queues.add(high)
    assert queues.head() is high
    queues.take(high)
    assert queues.head() is low


def test_who_holds_blocks(fcfs):
    queues, requests = fcfs
    requests[0].table.blocks.append(4)
    queues.block(queues.head())
    queues.pass_over(queues.head())
    queues.end_scan()
    assert queues.num_holding_blocks == 1
