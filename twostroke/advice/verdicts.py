"""Nine questions about a P/D deployment, each answered from an `Observation` alone.

    1 decode_bound      is D bound by KV capacity or by compute, and where do P and D balance?
    2 message_size      what bandwidth do blocks of this size get, against what the link can do?
    3 layout            which ratio and parallel layout carry the load when bandwidth is at its low?
    4 link_limit        is the KV volume near the limit of the link?
    5 prefill_blocked   is P's batch blocked by KV that waits to be fetched?
    6 decode_waits      does D wait for KV, or is decode itself the bottleneck?
    7 move_prefix       is a prefix hit on another engine worth moving?
    8 append_on_decode  should the next turn's tokens be prefilled on D?
    9 ratio             does the P:D ratio fit the lengths of prompts and outputs?

The docstring of each rule lists its answers. Thresholds are named once, here and in `figures`.
"""

import math

from twostroke.advice import closed_form as forms
from twostroke.advice import figures
from twostroke.advice.figures import FULL, known, over
from twostroke.advice.observation import Observation
from twostroke.advice.verdict import Case, Verdict, evidence, figure, unknown

NEAR_LINK = 0.8  # utilisation at which sharing makes a transfer five times as long
GOOD_MESSAGES = 0.8  # share of the link's rate
STARVED = 0.2  # share of D's requests that are on their way instead of decoding
NO_MORE_FROM_BATCH = 0.9  # elasticity: ten per cent more rows bring less than one per cent
WORTH_CHANGING = 1.1  # capacity of the better layout over that of the present one
SKEWED = 1.6  # capacity of one side over the other's, with too few engines to split better
MAX_COUNT = 2048  # engines of a role: every split of them is looked at
MOST_ENGINES = 16  # of the ratios that are named to people


def judge(seen: Observation) -> list[Verdict]:
    """All nine verdicts, in order."""
    return [
        decode_bound(seen),
        message_size(seen),
        layout(seen),
        link_limit(seen),
        prefill_blocked(seen),
        decode_waits(seen),
        move_prefix(seen),
        append_on_decode(seen),
        ratio(seen),
    ]


def decode_bound(seen: Observation) -> Verdict:
    """kv, compute, seats (max_num_seqs) or nothing (D keeps up with what P sends)."""
    used_up = figures.decode_saturation(seen)
    if used_up == "unknown":
        return unknown("decode_bound", seen.missing("decode_kv_usage", "decode_running"))
    power = figures.elasticity(seen)
    measured = seen.knows("decode_elasticity")
    case = Case(
        "decode_bound",
        evidence(
            ("KV in use on D", seen.decode_kv_usage, "%"),
            ("by requests that still wait for P", _before_prefill(seen), "%"),
            ("rows a step", seen.decode_running, ""),
            ("TPOT", seen.tpot_s, "s"),
            ("dt/dB * B/t", power, "" if measured else "(assumed)"),
            ("waiting on D", seen.decode_waiting, ""),
        ),
        "high" if measured else "medium",
        seen.missing("decode_elasticity", "decode_waiting", "decode_pool_tokens"),
    )
    balance = _balance(seen)
    flat = measured and power >= NO_MORE_FROM_BATCH and used_up != "nothing"
    if flat or seen.tpot_s > seen.tpot_slo_s:
        why = "a larger batch brings nothing" if flat else "TPOT is above its bound"
        return case.act(
            "compute",
            f"decode compute binds: {why}{balance}",
            "add a D, raise its TP, or lower its --max-num-seqs until TPOT fits",
        )
    if used_up == "kv":
        gain = figures.batch_gain(1.1, power) - 1
        return case.act(
            "kv",
            f"KV capacity binds: 10 % more KV would decode about {gain:.0%} more{balance}",
            "give D more KV (--gpu-memory-utilization, FP8 KV, TP <= KV heads), or add a D",
        )
    if used_up == "seats":
        summary = f"--max-num-seqs binds before KV and compute{balance}"
        return case.act("seats", summary, "raise --max-num-seqs on D")
    return case.leave("nothing", f"D has room: neither KV nor compute binds{balance}")


def message_size(seen: Observation) -> Verdict:
    """small (the cost of each message takes more than a fifth of the link) or good."""
    size = over(seen.transfer_bytes, seen.transfer_messages)
    share = forms.message_efficiency(size, seen.link_message_s, seen.link_bytes_per_s)
    confidence = "high"
    missing = seen.missing(
        "transfer_bytes", "transfer_messages", "link_message_s", "link_bytes_per_s"
    )
    if math.isnan(share):
        # From transfers alone: sharing the link slows them too, so that part is taken out.
        alone = 1 - min(known(figures.link_load(seen)), 0.95)
        read_s = known(seen.read_s, seen.transfer_s)
        achieved = over(figures.request_bytes(seen), read_s * alone)
        # In this order a figure that is not known stays so.
        share, confidence = min(over(achieved, seen.link_bytes_per_s), 1.0), "low"
    gets = over(figures.request_bytes(seen), seen.read_s)
    found = evidence(
        ("message", size, "B"),
        ("cost of each", seen.link_message_s, "s"),
        ("a transfer gets", gets, "B/s"),
        ("link", seen.link_bytes_per_s, "B/s"),
        ("share of it that such messages reach", share, "%"),
    )
    if math.isnan(share):
        return unknown("message_size", missing, found)
    case = Case("message_size", found, confidence, missing)
    if share >= GOOD_MESSAGES:
        said = f"blocks of this size reach {share:.0%} of the link"
        alone = 1 - min(known(figures.link_load(seen)), 0.95)
        if gets < GOOD_MESSAGES * share * alone * seen.link_bytes_per_s:
            got = over(gets, seen.link_bytes_per_s)
            said += f"; transfers get {got:.0%} for another reason: bursts, or a busy CPU"
        return case.leave("good", said)
    target = forms.message_bytes_for(GOOD_MESSAGES, seen.link_message_s, seen.link_bytes_per_s)
    aim = figure(known(target, 1 << 20), "B")
    said = f"blocks of this size reach only {share:.0%} of the link"
    if confidence == "low":
        said = (
            f"transfers get only {share:.0%} of the link: small blocks, or what starts each of them"
        )
    return case.act(
        "small",
        said,
        f"make messages {aim} or more: a larger --block-size, all layers of a block in one piece, "
        "or packing before sending",
    )


def layout(seen: Observation) -> Verdict:
    """change or keep: P and D engines of the same total, with the links at their low."""
    prefill = figures.prefill_capacity_per_s(seen)
    decode = figures.decode_capacity_per_s(seen)
    missing = seen.missing("link_bytes_per_s", "link_low_bytes_per_s", "decode_elasticity")
    if not (prefill > 0 and decode > 0 and _has_counts(seen)):
        return _no_capacity("layout", seen)
    rate = known(seen.link_low_bytes_per_s, seen.link_bytes_per_s)
    each_link = known(over(rate, figures.request_bytes(seen)), math.inf)
    counts = int(seen.num_prefill), int(seen.num_decode)

    def carried(split: tuple[int, int]) -> float:
        return min(split[0] * prefill, split[1] * decode, min(split) * each_link)

    best = forms.best_split(sum(counts), prefill, decode, each_link)
    now, then = carried(counts), carried(best)
    linked = min(counts) * each_link <= now
    shown, better = f"{counts[0]}P:{counts[1]}D", f"{best[0]}P:{best[1]}D"
    versus = f"{better} {then:.3g}" if better != shown else f"and no other of {sum(counts)} more"
    case = Case(
        "layout",
        evidence(
            ("one P prefills", prefill, "req/s"),
            ("one D decodes", decode, "req/s"),
            ("one link at its low moves", each_link, "req/s"),
            f"{shown} carries {now:.3g} req/s, {versus}",
        ),
        "medium" if missing else "high",
        missing,
    )
    if linked and seen.decode_tp > seen.num_kv_heads:
        heads = f"{seen.num_kv_heads:.0f}"
        return case.act(
            "change",
            f"at its low the link binds, and TP {seen.decode_tp:.0f} stores {heads} KV heads more "
            "than once",
            f"run D at TP {heads} with more engines, which moves each head once; then {better}",
        )
    if then >= WORTH_CHANGING * now > 0:
        gain = then / now - 1
        return case.act(
            "change", f"{better} would carry {gain:.0%} more than {shown}", f"run {better}"
        )
    if linked:
        return case.act(
            "change",
            "at its low the link binds, whatever the ratio",
            "more or faster links (one engine a NIC), FP8 KV, or prefill on D while the link is "
            "slow (--pd-policy cost)",
        )
    return case.leave("keep", f"no split of the same engines carries 10 % more than {shown}")


def link_limit(seen: Observation) -> Verdict:
    """near or far: 80 % of the rate, at its low where that is known."""
    load = figures.link_load(seen, low=True)
    found = evidence(
        ("moved", figures.moved_bytes_per_s(seen), "B/s"),
        ("links", known(seen.num_links, 1), ""),
        ("rate of each", seen.link_bytes_per_s, "B/s"),
        ("in its worst tenth", seen.link_low_bytes_per_s, "B/s"),
        ("utilisation", figures.link_load(seen), "%"),
        ("a transfer takes", known(seen.read_s, seen.transfer_s), "s"),
    )
    if math.isnan(load):
        missing = seen.missing("link_bytes_per_s")
        if math.isnan(figures.moved_bytes_per_s(seen)):
            missing += seen.missing("transfer_bytes_per_s", "kv_token_bytes")
        return unknown("link_limit", missing, found)
    missing = seen.missing("link_low_bytes_per_s", "num_links")
    case = Case("link_limit", found, "high" if seen.knows("num_links") else "medium", missing)
    if load < NEAR_LINK:
        return case.leave("far", f"{load:.0%} of the link is used")
    stretch = f"{1 / (1 - load):.0f} times" if load < 1 else "without bound"
    return case.act(
        "near",
        f"{min(load, 9.99):.0%} of the link is asked for; sharing stretches transfers {stretch}",
        "more or faster links, FP8 KV, TP <= KV heads on D (no copies), or send less "
        "(--pd-policy cost)",
    )


def prefill_blocked(seen: Observation) -> Verdict:
    """yes or no: prompts wait on P since KV that others have yet to fetch fills its pool."""
    missing = seen.missing("prefill_pin_wait_s", "prefill_pinned")
    waited = seen.prefill_pin_wait_s
    if not math.isnan(waited):
        is_blocked = waited > figures.SHORT * known(figures.request_s(seen), waited)
        confidence = "high"
    elif seen.knows("prefill_pinned", "prefill_waiting"):
        limit = known(seen.prefill_pin_limit, 1.0)
        is_blocked = seen.prefill_pinned >= FULL * limit and seen.prefill_waiting >= 1
        confidence = "medium"
    elif seen.knows("prefill_kv_usage", "prefill_waiting", "prefill_running"):
        # Full, with a queue, and hardly anything computing: what fills it waits to be fetched.
        is_idle = seen.prefill_running < 1 or seen.prefill_busy < 0.5
        is_blocked = seen.prefill_kv_usage >= FULL and seen.prefill_waiting >= 1 and is_idle
        confidence = "medium" if is_blocked else "low"
    elif seen.room_wait_s <= figures.SHORT * figures.request_s(seen):
        # What P holds it holds until D has room, and nobody has waited for that.
        is_blocked, confidence = False, "medium"
    else:
        return unknown("prefill_blocked", missing)
    case = Case(
        "prefill_blocked",
        evidence(
            ("prompts wait for pinned KV", seen.prefill_pin_wait_s, "s"),
            ("pinned", seen.prefill_pinned, "%"),
            ("limit of it", seen.prefill_pin_limit, "%"),
            ("P's KV in use", seen.prefill_kv_usage, "%"),
            ("waiting on P", seen.prefill_waiting, ""),
            ("P computes", seen.prefill_busy, "%"),
        ),
        confidence,
        missing,
    )
    if not is_blocked:
        return case.leave("no", "P does not wait for what it holds")
    cause = "D has no room for it" if seen.room_wait_s > seen.transfer_s else "the link is slow"
    return case.act(
        "yes",
        f"prompts wait on P for KV that is yet to be fetched: {cause}",
        "relieve what makes D fetch late (verdicts 1, 4, 6); a larger --kv-hold-share only moves "
        "the queue",
    )


def decode_waits(seen: Observation) -> Verdict:
    """waits (for KV), decode (is the bottleneck itself) or neither (D keeps up)."""
    share = over(seen.transfer_s, seen.transfer_s + seen.decode_s)
    on_the_way = figures.loading(seen)
    loading = over(on_the_way, on_the_way + seen.decode_running)
    missing = seen.missing("transfer_s", "room_wait_s", "decode_s", "decode_loading")
    if math.isnan(share) and math.isnan(loading):
        return unknown("decode_waits", missing)
    starved = max(known(share), known(loading))
    case = Case(
        "decode_waits",
        evidence(
            ("waits for room on D", seen.room_wait_s, "s"),
            ("transfer", seen.transfer_s, "s"),
            ("then waits to run", seen.decode_queue_s, "s"),
            ("decode", seen.decode_s, "s"),
            ("loading", on_the_way, ""),
            ("running", seen.decode_running, ""),
            ("KV in use on D", seen.decode_kv_usage, "%"),
            ("D computes", seen.decode_busy, "%"),
        ),
        "medium" if missing else "high",
        missing,
    )
    if starved >= STARVED:
        return case.act(
            "waits",
            f"{starved:.0%} of what D has room for is on its way, not decoding",
            "speed the link up (verdicts 2 and 4), or stream the KV while P computes "
            "(--kv-mode stream)",
        )
    used_up = figures.decode_saturation(seen)
    if used_up in ("kv", "seats") or seen.tpot_s > seen.tpot_slo_s:
        return case.act(
            "decode",
            "KV arrives in time; decode itself is the bottleneck",
            "see verdict 1 for what of D binds",
        )
    return case.leave("neither", "KV arrives in time and D has room")


def move_prefix(seen: Observation) -> Verdict:
    """move or recompute a hit that lies on another engine."""
    tokens = known(seen.prefix_tokens, seen.prompt_tokens)
    hit_bytes = tokens * known(seen.kv_token_bytes, over(seen.transfer_bytes, seen.prompt_tokens))
    saved_s = over(tokens, figures.prefill_tokens_per_s(seen))
    left = max(0.05, 1 - known(figures.link_load(seen, low=True)))
    rate = known(seen.link_low_bytes_per_s, seen.link_bytes_per_s) * left
    achieved = known(rate, over(seen.transfer_bytes, known(seen.read_s, seen.transfer_s)))
    needed = forms.worth_moving_bytes_per_s(hit_bytes, saved_s)
    missing = seen.missing("kv_token_bytes", "prefill_tokens_per_s", "link_bytes_per_s")
    if math.isnan(needed + achieved):
        return unknown("move_prefix", missing)
    case = Case(
        "move_prefix",
        evidence(
            ("prefix", tokens, "tokens"),
            ("its KV", hit_bytes, "B"),
            ("computing it again", saved_s, "s"),
            ("worth moving above", needed, "B/s"),
            ("what a transfer gets", achieved, "B/s"),
        ),
        "high" if seen.knows("link_bytes_per_s", "prefix_tokens") else "medium",
        (*missing, *seen.missing("prefix_tokens")),
    )
    if achieved > needed:
        said = f"moving a hit is {figure(over(achieved, needed), 'times')} as fast as computing it"
        if not seen.knows("prefix_tokens"):  # nobody says that there are any
            return case.leave("move", said, "where prompts share prefixes, fetch hits")
        return case.act("move", said, "route by prefix, and fetch hits from where they are")
    return case.leave(
        "recompute",
        f"computing a prefix is {figure(over(needed, achieved), 'times')} as fast as moving it",
        "route to where hits are, or compute again; do not move them",
    )


def append_on_decode(seen: Observation) -> Verdict:
    """append (on D) or prefill (send the next turn through P)."""
    compute_s = over(seen.turn_tokens, figures.prefill_tokens_per_s(seen))
    waits_s = known(seen.prefill_queue_s) + known(seen.room_wait_s)
    through_s = waits_s + compute_s + seen.transfer_s
    if math.isnan(through_s + seen.decode_running):
        needs = ("turn_tokens", "prefill_tokens_per_s", "transfer_s", "decode_running")
        return unknown("append_on_decode", seen.missing(*needs))
    slack = known(over(seen.tpot_slo_s, seen.tpot_s), 1.0)
    missing = seen.missing("tpot_slo_s", "prefill_queue_s")
    case = Case(
        "append_on_decode",
        evidence(
            ("new tokens of a turn", seen.turn_tokens, ""),
            ("stall of D's step", compute_s, "s"),
            ("rows that it holds up", seen.decode_running, ""),
            ("bound on TPOT / TPOT", slack, ""),
            ("through P", through_s, "s"),
        ),
        "medium" if missing else "high",
        missing,
    )
    if forms.append_on_decode(compute_s, seen.decode_running, slack, through_s):
        return case.act(
            "append",
            "prefilling the next turn on D costs less than the way through P",
            "--pd-policy cost: short turns stay on D",
        )
    return case.leave(
        "prefill",
        "the next turn would hold up D's rows for longer than P takes",
        "send the next turn through P",
    )


def ratio(seen: Observation) -> Verdict:
    """more_prefill, more_decode or fits: what the lengths ask of P and of D."""
    prefill = figures.prefill_capacity_per_s(seen)
    decode = figures.decode_capacity_per_s(seen)
    if not (prefill > 0 and decode > 0 and _has_counts(seen)):
        return _no_capacity("ratio", seen)
    counts = int(seen.num_prefill), int(seen.num_decode)

    def carried(split: tuple[int, int]) -> float:
        return min(split[0] * prefill, split[1] * decode)

    best = forms.best_split(sum(counts), prefill, decode)
    wanted = forms.prefill_per_decode(prefill, decode)
    ideal = forms.nearest_ratio(wanted, MOST_ENGINES)
    skew = over(counts[0] * prefill, counts[1] * decode)
    missing = seen.missing("decode_elasticity")
    case = Case(
        "ratio",
        evidence(
            (
                "prompt, less what is cached",
                seen.prompt_tokens - known(seen.cached_tokens),
                "tokens",
            ),
            ("output", seen.output_tokens, "tokens"),
            ("one P prefills", prefill, "req/s"),
            ("one D decodes", decode, "req/s"),
            f"balanced at {wanted:.2f} P for each D, about {ideal[0]}:{ideal[1]}",
        ),
        "medium" if missing else "high",
        missing,
    )
    shown = f"{counts[0]}P:{counts[1]}D"
    better = carried(best) >= WORTH_CHANGING * carried(counts)
    # With few engines no split may be better, and yet one side idles.
    if not better and 1 / SKEWED < skew < SKEWED:
        return case.leave("fits", f"{shown} fits: its P carry {skew:.2f} times what its D do")
    answer, lacks = ("more_decode", "D") if skew > 1 else ("more_prefill", "P")
    aim = f"aim at {ideal[0]}P:{ideal[1]}D"
    action = f"run {best[0]}P:{best[1]}D; {aim}" if better else f"add a {lacks}; {aim}"
    sides = f"its P carry {counts[0] * prefill:.3g} req/s, its D {counts[1] * decode:.3g}"
    return case.act(answer, f"too few {lacks} in {shown}: {sides}", action)


def _before_prefill(seen: Observation) -> float:
    """Share of D's KV that is kept for prompts that P has yet to compute."""
    usage = seen.decode_kv_usage - figures.decode_kv_usage(seen)
    return usage if usage > 0 else math.nan


def _has_counts(seen: Observation) -> bool:
    return 1 <= seen.num_prefill <= MAX_COUNT and 1 <= seen.num_decode <= MAX_COUNT


def _no_capacity(name: str, seen: Observation) -> Verdict:
    """What one P and one D carry cannot be told: figures lack, or nothing was computed."""
    of_layout = seen.missing("num_prefill", "num_decode")
    of_prefill = seen.missing("prefill_busy", "requests_per_s")
    of_decode = seen.missing("output_tokens", "tpot_s", "decode_running", "decode_kv_usage")
    return unknown(name, of_layout + of_prefill + of_decode)


def _balance(seen: Observation) -> str:
    prefill = figures.prefill_capacity_per_s(seen)
    decode = figures.decode_capacity_per_s(seen)
    if not (prefill > 0 and decode > 0):
        return ""
    best = forms.nearest_ratio(forms.prefill_per_decode(prefill, decode), MOST_ENGINES)
    return f"; one P feeds {prefill / decode:.2g} D ({best[0]}P:{best[1]}D)"
