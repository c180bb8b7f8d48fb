"""A few hundred random fault schedules; `python -m tests.pure.handoff.faults` tries thousands."""

from tests.pure.handoff.faults import run_schedules

NUM_SCHEDULES = 200


def test_no_schedule_hangs_leaks_or_answers_wrongly(capsys):
    tried, failed = run_schedules(range(NUM_SCHEDULES))
    with capsys.disabled():
        print(f"\n{NUM_SCHEDULES} fault schedules: {dict(sorted(tried.items()))}")
    assert not failed, f"seeds {[seed for seed, _ in failed]}\n{failed[0][1]}"
    assert tried["transfers"] > NUM_SCHEDULES
    for happened in ("aborts", "load: stall", "load: lost", "leases expired", "restarts"):
        assert tried[happened] > 0, f"no schedule had {happened}"
