"""Deadlines of jobs: in order, once each, and not those that were dropped or moved."""

import pytest

from tests.pure.core.driver import make_request
from twostroke.router.deadlines import Deadlines
from twostroke.router.jobs import Job


@pytest.fixture
def jobs():
    return [Job(make_request(handle), ()) for handle in range(3)]


def test_they_are_due_in_order_of_time_and_of_setting(jobs):
    deadlines = Deadlines()
    for job, at_s in zip(jobs, (2.0, 1.0, 2.0), strict=True):
        deadlines.set(job, at_s)
    assert deadlines.next_s() == 1.0
    assert deadlines.take_due(0.5) is None
    assert [deadlines.take_due(2.0) for _ in range(4)] == [jobs[1], jobs[0], jobs[2], None]
    assert deadlines.next_s() is None


def test_a_deadline_that_a_job_has_no_more_is_skipped(jobs):
    deadlines = Deadlines()
    for job in jobs:
        deadlines.set(job, 1.0)
    jobs[0].deadline_s = None
    deadlines.set(jobs[1], 3.0)
    assert deadlines.take_due(2.0) is jobs[2]
    assert deadlines.take_due(2.0) is None
    assert deadlines.next_s() == 3.0
    assert deadlines.take_due(3.0) is jobs[1]
