import math
from dataclasses import replace

import numpy as np
import pytest

from twostroke.cost import HostCost, LinearStepCost, LinkCost
from twostroke.plan.analysis import analyse
from twostroke.plan.layout import Demand, KvMode, Layout, Pool
from twostroke.twin.hardware import find_gpu
from twostroke.twin.models import find_shape
from twostroke.twin.roofline import Roofline

POOL = Pool(
    count=1,
    tensor_parallel_size=1,
    kv_tokens=100_000,
    kv_token_bytes=131_072,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    cost=LinearStepCost(base_s=5e-3, token_s=2e-5, row_s=2e-5, context_s=4e-8),
)
LINK = LinkCost(base_s=1e-3, bytes_per_s=20e9)
PAIR = Layout(prefill=POOL, decode=replace(POOL, count=2))


def demand(rate: float, prompt: int = 1024, output: int = 256) -> Demand:
    return Demand.of([prompt], [output], rate)


def test_constraints_are_sorted_and_the_first_binds() -> None:
    analysis = analyse(PAIR, demand(5.0), LINK)
    capacities = [it.capacity_per_s for it in analysis.constraints]
    assert capacities == sorted(capacities)
    assert analysis.binding is analysis.constraints[0]
    after, share = analysis.next_constraint
    assert share == pytest.approx(analysis.capacity_per_s / after.capacity_per_s)
    assert {it.name for it in analysis.constraints} == {
        "prefill compute", "link", "pinned KV on P", "decode KV", "decode seats",
    }  # fmt: skip


def test_capacity_grows_with_what_binds_and_with_nothing_else() -> None:
    few = replace(PAIR, decode=replace(POOL, kv_tokens=10_000))
    base = analyse(few, demand(1.0), LINK)
    assert base.binding.name == "decode KV"
    more_kv = replace(few, decode=replace(POOL, kv_tokens=20_000))
    assert analyse(more_kv, demand(1.0), LINK).capacity_per_s > 1.5 * base.capacity_per_s
    more_prefill = replace(few, prefill=replace(POOL, count=2))
    assert analyse(more_prefill, demand(1.0), LINK).capacity_per_s == base.capacity_per_s


def test_times_grow_with_the_load_until_they_do_not_apply() -> None:
    capacity = analyse(PAIR, demand(1.0), LINK).capacity_per_s
    found = [analyse(PAIR, demand(share * capacity), LINK) for share in (0.1, 0.4, 0.7)]
    assert all(it.ttft_s.applies and it.tpot_s.applies for it in found)
    ttfts = [it.ttft_s.value for it in found]
    assert ttfts == sorted(ttfts)
    assert found[0].tpot_s.value < found[2].tpot_s.value
    over = analyse(PAIR, demand(2 * capacity), LINK)
    assert not over.ttft_s.applies
    assert "queues grow" in over.ttft_s.reason
    assert over.throughput_per_s.value == pytest.approx(capacity, rel=0.02)


def test_changes_of_rows_make_steps_longer_and_more_so_where_answers_are_short() -> None:
    host = HostCost(changed_s=1e-3)
    for layout in (PAIR, Layout(both=POOL)):
        slower = Layout(**{
            role: replace(pool, host=host)
            for role in ("prefill", "decode", "both")
            if (pool := getattr(layout, role)) is not None
        })  # fmt: skip
        more_s = []
        for output in (32, 256):
            asked = demand(0.5, output=output)
            plain, changed = (analyse(it, asked, LINK) for it in (layout, slower))
            assert changed.ttft_s.value > plain.ttft_s.value
            assert changed.capacity_per_s < plain.capacity_per_s
            more_s.append(changed.tpot_s.value - plain.tpot_s.value)
        assert 2.5e-3 > more_s[0] > 1.5 * more_s[1] > 0


def test_two_constraints_at_one_rate_are_said_to_be_unclear() -> None:
    alike = Layout(prefill=POOL, decode=replace(POOL, count=2, max_num_seqs=82))
    over = analyse(alike, demand(1000.0), LINK)
    first, second = over.constraints[:2]
    assert second.capacity_per_s < 1.3 * first.capacity_per_s
    assert "nearly the same rate" in over.throughput_per_s.reason


def test_a_bound_on_tpot_bounds_the_batch() -> None:
    free = analyse(PAIR, demand(1.0), LINK)
    bound = analyse(PAIR, demand(1.0), LINK, tpot_slo_s=0.006)
    assert bound.binding.name == "decode compute"
    assert bound.capacity_per_s < free.capacity_per_s
    never = analyse(PAIR, demand(1.0), LINK, tpot_slo_s=1e-3)
    assert never.capacity_per_s == 0


def test_a_pool_too_small_for_one_request_lets_nothing_through() -> None:
    tiny = replace(PAIR, decode=replace(POOL, kv_tokens=512))
    assert analyse(tiny, demand(1.0), LINK).capacity_per_s == 0


def test_cached_tokens_relieve_prefill_alone() -> None:
    plain = Demand.of([1024], [64], 5.0)
    cached = Demand.of([1024], [64], 5.0, cached_tokens=900)
    before, after = (analyse(PAIR, it, LINK) for it in (plain, cached))
    by_name = [
        {it.name: it.capacity_per_s for it in analysis.constraints} for analysis in (before, after)
    ]
    assert by_name[1]["prefill compute"] > 3 * by_name[0]["prefill compute"]
    assert by_name[1]["link"] == by_name[0]["link"]


def test_engines_that_do_both_share_their_time() -> None:
    both = Layout(both=POOL)
    light = analyse(both, demand(0.5))
    busy = analyse(both, demand(5.0))
    assert light.tpot_s.value < busy.tpot_s.value
    assert {it.name for it in light.constraints} == {"KV", "seats", "compute"}
    bound = analyse(both, demand(5.0), tpot_slo_s=0.008)
    assert "bound on TPOT" in bound.binding.name
    assert analyse(both, demand(5.0, output=2)).tpot_s.applies is False


def test_a_prompt_longer_than_a_step_takes_several() -> None:
    narrow = replace(PAIR, prefill=replace(POOL, max_num_batched_tokens=512))
    whole = analyse(PAIR, demand(1.0), LINK).parts_s["prefill"]
    assert analyse(narrow, demand(1.0), LINK).parts_s["prefill"] > whole


def test_demands_are_resampled_and_scaled() -> None:
    lengths = np.arange(1, 101, dtype=float)
    base = Demand.of(lengths, lengths, 3.0, cached_tokens=50)
    assert base.cached_tokens.max() == 50
    assert base.cached_tokens.min() == 0  # at least one token is computed
    assert base.at_rate(6.0).rate_per_s == 6.0
    again = base.resampled(np.random.Generator(np.random.PCG64(0)))
    assert len(again.prompt_tokens) == 100
    assert math.isclose(again.mean_prompt, base.mean_prompt, rel_tol=0.2)


def test_layouts_have_names_and_sizes() -> None:
    assert PAIR.name == "1P:2D of TP1"
    assert Layout(both=replace(POOL, count=3)).name == "3 x TP1"
    wide = replace(PAIR, decode=replace(POOL, tensor_parallel_size=4))
    assert wide.name == "1P TP1 : 1D TP4"
    assert wide.num_gpus == 5


@pytest.mark.parametrize("rate", [1e-9, 1.0, 1e3, 1e9, math.inf])
@pytest.mark.parametrize("layout", [PAIR, Layout(both=POOL)], ids=["apart", "together"])
def test_any_rate_is_answered_with_a_roofline(rate: float, layout: Layout) -> None:
    cost = Roofline(find_shape("qwen3-30b-a3b"), find_gpu("H100"))
    changed = {
        role: replace(pool, cost=cost)
        for role in ("prefill", "decode", "both")
        if (pool := getattr(layout, role)) is not None
    }
    for prompt, output in ((1, 1), (50_000, 1), (100, 20_000)):
        analysis = analyse(Layout(**changed), demand(rate, prompt, output), LINK, tpot_slo_s=0.05)
        assert analysis.throughput_per_s.value <= max(rate, 0)
        assert analysis.ttft_s.value > 0
        assert analysis.tpot_s.value > 0


def test_a_decode_that_never_keeps_up_has_no_time_of_its_own() -> None:
    """P is quick and takes a few at a time; D's rows cost more than they bring."""
    dear = LinearStepCost(base_s=1e-3, token_s=1e-6, row_s=5e-2, context_s=0.0)
    layout = Layout(
        prefill=replace(POOL, count=2), decode=replace(POOL, cost=dear, max_num_seqs=4096)
    )
    analysis = analyse(layout, demand(15.0), LINK)
    assert analysis.ttft_s.value == math.inf
    assert not analysis.ttft_s.applies


def test_what_streams_leaves_its_last_step_to_read() -> None:
    narrow = Layout(prefill=replace(POOL, max_num_batched_tokens=512), decode=POOL)
    slow, fast = LinkCost(base_s=0.0, bytes_per_s=0.5e9), LinkCost(base_s=0.0, bytes_per_s=20e9)
    seen = demand(0.01, prompt=2048)

    def transfer_s(layout: Layout, link: LinkCost, mode: KvMode) -> float:
        return analyse(layout, seen, link, kv_mode=mode).parts_s["transfer"]

    alone_s = 2048 * POOL.kv_token_bytes / fast.bytes_per_s
    pulled, streamed = (transfer_s(narrow, fast, mode) for mode in ("pull", "stream"))
    assert pulled - streamed == pytest.approx(3 / 4 * alone_s, rel=0.1)
    # A link slower than P is behind by all that P needs no time for.
    prefill_s = analyse(narrow, seen, slow).parts_s["prefill"]
    pulled, streamed = (transfer_s(narrow, slow, mode) for mode in ("pull", "stream"))
    assert pulled - streamed == pytest.approx(3 / 4 * prefill_s, rel=0.1)
    # A prompt of one step has nothing to overlap with.
    assert transfer_s(PAIR, fast, "stream") == transfer_s(PAIR, fast, "pull")
