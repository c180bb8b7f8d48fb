"""From steps on a clock and clients' times back to what they were made of."""

import random

import msgspec
import pytest

from twostroke.cost import HostCost, LinearStepCost
from twostroke.cost_fit import work_of
from twostroke.cost_host import Wave, error_on, fit_costs
from twostroke.messages import StepSample
from twostroke.trace_steps import Trace, TracedStep

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
)


def run_waves(engine: int, seed: int, start_s: float, slow: float = 1.0) -> tuple[list, list]:
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
            sample.seconds = COST.step_s(work_of(sample)) * slow
            steps.append(TracedStep(engine, now, now + sample.seconds, sample))
            now += sample.seconds + HOST.gap_s + HOST.gap_row_s * count
            context += tokens
        ended_s = steps[-1].end_s + HOST.egress_s + HOST.deliver_s + HOST.deliver_row_s * count
        waves.append(Wave(count, length, sent_s, ended_s))
        now = ended_s + 0.01
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
    assert host.slowdown == (1.0,)


def test_engines_that_slow_each_other_down() -> None:
    """One engine alone first; then two at once, each 1.6 times slower."""
    alone, waves = run_waves(0, 1, 0.0)
    later = alone[-1].end_s + 1
    both = run_waves(0, 2, later, slow=1.6)[0] + run_waves(1, 2, later, slow=1.6)[0]
    steps = sorted([*alone, *both], key=lambda step: step.start_s)
    cost, host, _ = fit_costs(Trace(steps, [], []), waves)
    assert cost.base_s == pytest.approx(COST.base_s, rel=0.02)
    assert host.slowdown == pytest.approx((1.0, 1.6), rel=0.05)
    assert error_on(cost, host, steps).median < 0.02


def test_prompts_and_decodes_are_slowed_down_apart() -> None:
    """One engine computes prompts while the other decodes, after a time in which one was alone."""
    alone, _ = run_waves(0, 1, 0.0)
    decodes = [it for it in alone if it.sample.num_tokens == it.sample.num_rows]
    prompt = next(it.sample for it in alone if it.sample.num_tokens > 1000)
    now, steps = alone[-1].end_s + 1, list(alone)
    for _ in range(20):
        start_s = now
        end_s = start_s + 1.3 * COST.step_s(work_of(prompt))
        steps.append(TracedStep(0, start_s, end_s, replaced(prompt, end_s - start_s)))
        for it in decodes:
            if now >= end_s:
                break
            seconds = 1.8 * it.sample.seconds
            steps.append(TracedStep(1, now, now + seconds, replaced(it.sample, seconds)))
            now += seconds
        now += 0.01
    steps.sort(key=lambda step: step.start_s)
    _, host, _ = fit_costs(Trace(steps, [], []), [])
    assert host.slowdown == pytest.approx((1.0, 1.8), rel=0.05)
    assert host.prompt_slowdown == pytest.approx((1.0, 1.3), rel=0.05)


def replaced(sample: StepSample, seconds: float) -> StepSample:
    return msgspec.structs.replace(sample, seconds=seconds)


def test_steps_without_clients() -> None:
    steps, _ = run_waves(0, 3, 0.0)
    _, host, _ = fit_costs(Trace(steps, [], []), [])
    assert host.frontend_s == host.ingress_s == host.egress_s == host.deliver_s == 0.0
    with pytest.raises(ValueError, match="no step"):
        fit_costs(Trace([], [], []), [])
