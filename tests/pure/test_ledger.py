from hypothesis import given
from hypothesis import strategies as st

from twostroke.ledger import Boundary, Interval, LedgerWithTimes, RequestLedger

B = Boundary


def walk(*steps: tuple[int, float], arrived_s: float = 0.0) -> RequestLedger:
    ledger = RequestLedger(arrived_s)
    for boundary, time_s in steps:
        ledger.mark(boundary, time_s)
    return ledger


def spent(ledger: RequestLedger) -> dict[str, float]:
    return {i.name.lower(): ledger.seconds(i) for i in Interval if ledger.spent_ns[i]}


def test_a_plain_life():
    ledger = walk(
        (B.SENT, 1), (B.QUEUED, 2), (B.SCHEDULED, 4), (B.FIRST_TOKEN, 7), (B.TOKEN, 8),
        (B.FINISHED, 12), (B.CLOSED, 18),
    )  # fmt: skip
    assert spent(ledger) == {
        "frontend": 1, "queue": 3, "prefill": 3, "decode": 5, "egress": 6,
    }  # fmt: skip
    assert (ledger.first_token_ns, ledger.finished_ns) == (7e9, 12e9)


def test_preempted_while_decoding_counts_until_the_next_token():
    ledger = walk(
        (B.SENT, 0), (B.SCHEDULED, 1), (B.FIRST_TOKEN, 2), (B.PREEMPTED, 3), (B.TOKEN, 4),
        (B.SCHEDULED, 6), (B.TOKEN, 9), (B.FINISHED, 10), (B.CLOSED, 10),
    )  # fmt: skip
    assert spent(ledger) == {"queue": 1, "prefill": 1, "decode": 2, "preempted": 6}
    assert ledger.num_preemptions == 1


def test_preempted_before_the_first_token_counts_until_scheduled_again():
    ledger = walk(
        (B.SENT, 0), (B.SCHEDULED, 1), (B.PREEMPTED, 2), (B.SCHEDULED, 5), (B.FIRST_TOKEN, 7),
        (B.FINISHED, 7), (B.CLOSED, 7),
    )  # fmt: skip
    assert spent(ledger) == {"queue": 1, "prefill": 3, "preempted": 3}


def test_aborted_before_it_ran():
    assert spent(walk((B.CLOSED, 2))) == {"frontend": 2}
    assert spent(walk((B.SENT, 1), (B.FINISHED, 3), (B.CLOSED, 4))) == {
        "frontend": 1, "queue": 2, "egress": 1,
    }  # fmt: skip


def test_a_hand_off_that_is_pulled():
    ledger = walk(
        (B.HELD, 1), (B.PREFILL_QUEUED, 3), (B.PREFILL_SCHEDULED, 4), (B.PREFILL_FINISHED, 8),
        (B.DECODE_QUEUED, 9), (B.DECODE_LOADING, 10), (B.DECODE_LOADED, 13),
        (B.DECODE_SCHEDULED, 14), (B.DECODE_FIRST_TOKEN, 16), (B.FINISHED, 20), (B.CLOSED, 21),
    )  # fmt: skip
    assert spent(ledger) == {
        "frontend": 1, "held": 2 + 2, "queue": 1, "prefill": 4, "transfer": 3, "decode_queue": 1,
        "decode": 6, "egress": 1,
    }  # fmt: skip
    assert ledger.first_token_ns == 16e9


def test_a_hand_off_that_streams():
    ledger = walk(
        (B.SENT, 1), (B.DECODE_QUEUED, 2), (B.DECODE_LOADING, 4), (B.PREFILL_QUEUED, 5),
        (B.PREFILL_SCHEDULED, 7), (B.PREFILL_FINISHED, 12), (B.DECODE_LOADED, 13),
        (B.DECODE_SCHEDULED, 15), (B.FIRST_TOKEN, 16), (B.CLOSED, 16),
    )  # fmt: skip
    assert spent(ledger) == {
        "frontend": 1, "queue": 1 + 1 + 2, "prefill": 5, "transfer": 1, "decode_queue": 2 + 2,
        "decode": 1,
    }  # fmt: skip


def test_memory_pinned_on_p_holds_a_prompt_up():
    ledger = walk(
        (B.SENT, 1), (B.PREFILL_QUEUED, 2), (B.PREFILL_HELD, 3), (B.PREFILL_SCHEDULED, 7),
        (B.PREFILL_PREEMPTED, 8), (B.PREFILL_SCHEDULED, 10), (B.PREFILL_FINISHED, 11),
        (B.DECODE_SCHEDULED, 12), (B.FIRST_TOKEN, 13), (B.DECODE_PREEMPTED, 14),
        (B.SCHEDULED, 15), (B.TOKEN, 16), (B.CLOSED, 17),
    )  # fmt: skip
    assert spent(ledger) == {
        "frontend": 1, "queue": 2, "held": 4 + 1, "prefill": 2, "preempted": 2 + 2,
        "decode": 2 + 1,
    }  # fmt: skip


def test_a_failed_load_begins_again():
    ledger = walk(
        (B.SENT, 1), (B.PREFILL_SCHEDULED, 2), (B.PREFILL_FINISHED, 3), (B.DECODE_LOADING, 4),
        (B.DECODE_LOADED, 6), (B.MOVED, 7), (B.QUEUED, 8), (B.SCHEDULED, 9), (B.FIRST_TOKEN, 12),
        (B.CLOSED, 12),
    )  # fmt: skip
    assert spent(ledger) == {
        "frontend": 1, "queue": 1 + 1, "prefill": 1 + 3, "held": 1 + 1, "transfer": 2,
        "decode_queue": 1,
    }  # fmt: skip


@given(
    arrived_s=st.floats(0, 1e6),
    steps=st.lists(st.tuples(st.sampled_from(Boundary), st.floats(0, 1e6)), max_size=30),
    aborted_s=st.floats(0, 1e6),
)
def test_intervals_sum_exactly_whatever_happens(arrived_s, steps, aborted_s):
    ledger = walk(*steps, (B.FINISHED, aborted_s), (B.CLOSED, aborted_s), arrived_s=arrived_s)
    assert sum(ledger.spent_ns) == ledger.total_ns
    assert min(ledger.spent_ns) >= 0
    latest_s = max([arrived_s, aborted_s, *(time_s for _, time_s in steps)])
    assert 0 <= ledger.total_ns <= round(latest_s * 1e9) - round(arrived_s * 1e9)
    before = list(ledger.spent_ns)
    ledger.mark(B.CLOSED, 2e6)
    assert ledger.spent_ns == before


def test_a_ledger_with_times_tells_when_intervals_began():
    ledger = LedgerWithTimes(1.0)
    for boundary, time_s in (
        (B.SENT, 2), (B.QUEUED, 2.5), (B.SCHEDULED, 4), (B.FIRST_TOKEN, 7), (B.FINISHED, 9),
        (B.CLOSED, 10),
    ):  # fmt: skip
        ledger.mark(boundary, time_s)
    assert [(interval.name.lower(), start, end) for interval, start, end in ledger.spans()] == [
        ("frontend", 1, 2), ("queue", 2, 4), ("prefill", 4, 7), ("decode", 7, 9), ("egress", 9, 10),
    ]  # fmt: skip
