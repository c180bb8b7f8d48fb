"""From steps on a clock and clients' times back to what they were made of."""

import random
from dataclasses import replace
from itertools import chain, pairwise

import msgspec
import numpy as np
import pytest

from twostroke.cost import CHANGE_FADES, HostCost, LinearStepCost
from twostroke.cost_fit import work_of
from twostroke.cost_host import Wave, error_on, fit_costs
from twostroke.messages import StepSample
from twostroke.trace_steps import Trace, TracedLoad, TracedStep

COST = LinearStepCost(base_s=5e-3, token_s=2e-5, row_s=1e-4, context_s=1e-7)
HOST = HostCost(
    gap_s=2e-4,
    gap_row_s=1e-5,
    frontend_s=2.5e-3,
    frontend_token_s=2e-6,
    ingress_s=5e-4,
    egress_s=5e-4,
    deliver_s=1e-3,
    deliver_row_s=5e-5,
    deliver_first_s=1.5e-3,
)


def run_waves(
    engine: int, seed: int, start_s: float, late_s: float = 0.0, pause_s: float = 0.01
) -> tuple[list, list]:
    """A grid of waves on one engine: a prefill, then eleven decodes, one wave after the other."""
    draw, now = random.Random(seed), start_s
    steps, waves = [], []
    for count in (1, 1, 2, 8, 1, 32, 16, 1, 4, 1) * 3:
        length = draw.choice([16, 64, 256, 1024])
        sent_s = now
        now += HOST.ingress_s + HOST.frontend_s + HOST.frontend_token_s * length
        context = 0
        for i in range(12):
            tokens = count * (length if i == 0 else 1)
            attended = count * length**2 // 2 if i == 0 else context
            sample = StepSample(tokens, count, count, context, attended, 1.0)
            sample.seconds = COST.step_s(work_of(sample)) + late_s
            steps.append(TracedStep(engine, now, now + sample.seconds, sample))
            now += sample.seconds + HOST.gap_s + HOST.gap_row_s * count
            context += tokens
        ended_s = steps[-1].end_s + HOST.egress_s + HOST.deliver_s + HOST.deliver_row_s * count
        out_s = HOST.egress_s + HOST.deliver_s + HOST.deliver_row_s + HOST.deliver_first_s
        waves.append(Wave(count, length, sent_s, ended_s, steps[-12].end_s + out_s))
        now = ended_s + pause_s
    return steps, waves


def inputs_of(waves: list[Wave]) -> list[float]:
    """When the engine has each request: of n, the last is 1.5 ms * (n - 1) late."""
    times = []
    for wave in waves:
        first_s = wave.sent_s + HOST.frontend_s + HOST.ingress_s
        first_s += HOST.frontend_token_s * wave.prompt_tokens
        times += [first_s + 1.5e-3 * i for i in range(wave.num_requests)]
    return times


def test_what_was_put_in_comes_out() -> None:
    steps, waves = run_waves(0, 1, 100.0)
    cost, host, error = fit_costs(Trace(steps, [], inputs_of(waves)), waves, relay_s=5e-4)
    assert error.p90 < 1e-3
    assert cost.base_s == pytest.approx(COST.base_s, rel=0.01)
    assert host.gap_s == pytest.approx(HOST.gap_s, rel=0.02)
    assert host.gap_row_s == pytest.approx(HOST.gap_row_s, rel=0.02)
    assert host.ingress_s == host.egress_s == 5e-4
    assert host.frontend_s == pytest.approx(HOST.frontend_s, rel=0.02)
    assert host.frontend_token_s == pytest.approx(HOST.frontend_token_s, rel=0.05)
    assert host.frontend_busy_s == pytest.approx(1.5e-3, rel=0.01)
    assert host.deliver_s == pytest.approx(HOST.deliver_s, rel=0.02)
    assert host.deliver_row_s == pytest.approx(HOST.deliver_row_s, rel=0.05)
    assert host.deliver_first_s == pytest.approx(HOST.deliver_first_s, rel=0.05)
    assert host.beside_s == host.interrupted_s == host.cold_s == host.handoff_s == 0.0


def test_what_engines_of_one_host_take_from_each_other() -> None:
    """One engine alone first; then prompts on it in long steps, and decodes on another meanwhile:
    each of those takes 1 ms longer beside a prompt, and each makes the prompt 0.5 ms longer."""
    alone, waves = run_waves(0, 1, 0.0)
    steps, now = alone, alone[-1].end_s + 1
    for tokens in (2048, 4096, 3072, 1024) * 4:
        long = StepSample(tokens, 1, 1, 0, tokens**2 // 2, 0.0)
        plain_s = COST.step_s(work_of(long))
        begins, at = [], now + 1e-3
        while at < now + plain_s + 5e-4 * len(begins):
            short = StepSample(1, 1, 1, 100 + len(begins), 101, 0.0)
            short.seconds = COST.step_s(work_of(short)) + 1e-3
            begins.append(TracedStep(1, at, at + short.seconds, short))
            at += short.seconds + 3e-4
        long.seconds = plain_s + 5e-4 * len(begins)
        steps = [*steps, TracedStep(0, now, now + long.seconds, long), *begins]
        now = at + 0.01
    cost, host, _ = fit_costs(Trace(steps, [], []), waves)
    assert cost.base_s == pytest.approx(COST.base_s, rel=0.02)
    assert host.beside_s == pytest.approx(1e-3, rel=0.05)
    assert host.interrupted_s == pytest.approx(5e-4, rel=0.05)
    assert error_on(cost, host, steps).p90 < 0.02


def test_engines_with_steps_of_one_length_are_each_late() -> None:
    """Each step of one overlaps two of the other; which of them it is that costs cannot be told."""
    alone, waves = run_waves(0, 1, 0.0)
    later = alone[-1].end_s + 1
    both = run_waves(0, 2, later, late_s=2e-3)[0] + run_waves(1, 2, later + 1e-3, late_s=2e-3)[0]
    steps = sorted([*alone, *both], key=lambda step: step.start_s)
    cost, host, _ = fit_costs(Trace(steps, [], []), waves)
    assert host.beside_s + host.interrupted_s == pytest.approx(2e-3, rel=0.15)
    assert error_on(cost, host, steps).median < 0.06


def test_steps_after_a_pause() -> None:
    """The first steps of the waves that come late take 1 ms longer."""
    warm, waves = run_waves(0, 1, 0.0)
    cold, _ = run_waves(0, 2, warm[-1].end_s + 1, pause_s=0.5)
    slow = []
    for before, it in pairwise([warm[-1], *cold]):
        late_s = 1e-3 if it.start_s - before.end_s > 0.1 else 0.0
        sample = msgspec.structs.replace(it.sample, seconds=it.sample.seconds + late_s)
        slow.append(TracedStep(0, it.start_s, it.end_s + late_s, sample))
    _, host, error = fit_costs(Trace([*warm, *slow], [], []), waves)
    assert host.cold_s == pytest.approx(1e-3, rel=0.02)
    assert error.p90 < 0.01


def test_changes_of_rows() -> None:
    """The first step of each wave and its first decode take 1 ms longer, and those that follow
    less and less; a step that waits for nothing of it costs what it did."""
    plain, _ = run_waves(0, 1, 0.0)
    level, late_s, steps = 0.0, 0.0, []
    for i, it in enumerate(plain):
        level = level * CHANGE_FADES + (i % 12 < 2)
        sample = msgspec.structs.replace(it.sample, seconds=it.sample.seconds + 1e-3 * level)
        steps.append(TracedStep(0, it.start_s + late_s, it.end_s + late_s + 1e-3 * level, sample))
        late_s += 1e-3 * level
    cost, host, error = fit_costs(Trace(steps, [], []), [])
    assert host.changed_s == pytest.approx(1e-3, rel=0.1)
    assert error.p90 < 0.01
    for it in plain[11::12]:
        assert cost.step_s(work_of(it.sample)) == pytest.approx(it.sample.seconds, rel=0.01)


def test_requests_that_come_during_a_step() -> None:
    """Steps are 3 ms late for one of them, and 0.5 ms for each more; who knows nothing of messages
    has one engine's steps late at random."""
    plain, _ = run_waves(0, 1, 0.0)
    late_s, steps, inputs = 0.0, [], []
    for i, it in enumerate(plain):
        count = {0: 1, 4: 4}.get(i % 7, 0)
        own_s = (3e-3 + 5e-4 * (count - 1)) if count else 0.0
        sample = msgspec.structs.replace(it.sample, seconds=it.sample.seconds + own_s)
        steps.append(TracedStep(0, it.start_s + late_s, it.end_s + late_s + own_s, sample))
        inputs += [it.start_s + late_s + 1e-4 * (1 + n) for n in range(count)]
        late_s += own_s
    cost, host, error = fit_costs(Trace(steps, [], inputs), [])
    assert host.arrival_s == pytest.approx(3e-3, rel=0.02)
    assert host.arrivals_s == pytest.approx(5e-4, rel=0.05)
    assert error.p90 < 0.01
    assert cost.base_s == pytest.approx(COST.base_s, rel=0.02)
    assert error_on(cost, host, steps).p90 > 0.1
    others = [TracedStep(1, it.start_s, it.end_s, it.sample) for it in run_waves(1, 1, 1e3)[0]]
    _, host, _ = fit_costs(Trace([*steps, *others], [], inputs), [])
    assert host.arrival_s == host.arrivals_s == 0.0  # whose messages they were is not known


def test_a_first_piece_that_comes_after_the_next_step() -> None:
    """Each second one waits for the step after its own, which takes 5.5 ms or so: 6 ms."""
    steps, waves = run_waves(0, 1, 0.0)
    late = [
        replace(wave, first_s=wave.first_s + 6e-3 * (nth % 2)) if wave.num_requests == 1 else wave
        for nth, wave in enumerate(waves)
    ]
    _, host, _ = fit_costs(Trace(steps, [], []), late)
    share = np.mean([nth % 2 for nth, wave in enumerate(waves) if wave.num_requests == 1])
    assert host.deliver_first_s == pytest.approx(HOST.deliver_first_s + 6e-3 * share, rel=0.1)


def test_what_one_wave_of_many_rows_says_is_chance() -> None:
    steps, waves = run_waves(0, 1, 0.0)
    single = [wave for wave in waves if wave.num_requests == 1]
    two = next(wave for wave in waves if wave.num_requests == 2)
    _, host, _ = fit_costs(
        Trace(steps, [], []), [*single, replace(two, ended_s=two.ended_s + 0.002)]
    )
    assert host.deliver_row_s == 0.0
    one_row_s = HOST.egress_s + HOST.deliver_s + HOST.deliver_row_s
    assert host.deliver_s == pytest.approx(one_row_s, rel=0.05)


def test_a_hand_off() -> None:
    """P ends at 1 s, D reads from 1.003 to 1.01 s, and begins at 1.0115 s."""
    works = [StepSample(64, 1, 1, 0, 2048, 0.5), StepSample(1, 1, 1, 64, 64, 0.01)]
    steps = [TracedStep(0, 0.5, 1.0, works[0]), TracedStep(1, 1.0115, 1.0215, works[1])]
    load = TracedLoad(1, 1.003, 1.01, 1 << 20, 1)
    waves = [Wave(1, 64, 0.49, 1.03), Wave(3, 64, 0.49, 1.03)]
    _, host, _ = fit_costs(Trace(steps, [load], []), waves, relay_s=2e-4)
    assert host.handoff_s == pytest.approx(4.5e-3 - 4e-4)


def test_slow_minutes_are_neither_fitted_to_nor_part_of_the_spread() -> None:
    """A machine that is half as fast for a fifth of the time."""
    parts, now = [], 0.0
    for seed in range(5):
        parts.append(run_waves(0, seed, now)[0])
        now = parts[-1][-1].end_s + 1
    for it in parts[3]:
        it.sample.seconds *= 2
    cost, host, _ = fit_costs(Trace([*chain(*parts)], [], []), [])
    for it in parts[4]:
        assert cost.step_s(work_of(it.sample)) == pytest.approx(it.sample.seconds, rel=0.02)
    late = np.concatenate([series > 1.9 for series in host.spread.ratios])
    assert late.mean() < 0.02


def test_steps_without_clients() -> None:
    steps, _ = run_waves(0, 3, 0.0)
    _, host, _ = fit_costs(Trace(steps, [], []), [])
    assert host.frontend_s == host.ingress_s == host.egress_s == host.deliver_s == 0.0
    with pytest.raises(ValueError, match="no step"):
        fit_costs(Trace([], [], []), [])
