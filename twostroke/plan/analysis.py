"""What a layout does under a load, from closed forms alone: a fraction of a millisecond each.

    arrivals ──▶ P: batches of prompts ──▶ link ──▶ D: a batch that KV and seats bound ──▶ done
                 prefill compute, pins     link     decode KV, seats, compute

Each constraint has a capacity in requests/s; the smallest binds. Below it everything is stable, and
the queueing formulas give times. Where they do not hold (a queue without end, or two constraints
so close that each makes the other worse) the figure says why it does not apply.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from twostroke.advice import closed_form as forms
from twostroke.cost import LinkCost, StepWork
from twostroke.plan.layout import Demand, KvMode, Layout, Pool
from twostroke.plan.prefill import prefill_capacity_per_s, prefill_line, prefill_s
from twostroke.twin.executor import IDLE_WAIT_S

CLEAR = 1.3  # the next constraint's capacity over the binding one's, for that one to bind alone
STABLE = 0.93  # of the capacity: beyond, queues depend on how long one looks
MOST_ROWS = 1 << 16
SHORT_ANSWERS = 0.1  # a prompt's time over that of all decode steps, from which TPOT is a lottery
FLAT = 0.9  # elasticity from which a larger batch brings nothing, so that compute is what binds

# Steps that are no plain decodes, for each request: the one after its prompt, and after its last
# token; on D, where it joins, that and the next.
COMES_AND_GOES, JOINS_AND_GOES = 2, 3

WAITS = ("room on D", "queue")  # the parts of TTFT that vary from request to request


@dataclass(frozen=True)
class Figure:
    """A value and, where it does not apply, the reason."""

    value: float
    reason: str = ""

    @property
    def applies(self) -> bool:
        return not self.reason


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """One thing that can run out. `capacity_per_s`: requests/s of the whole layout at which."""

    name: str
    capacity_per_s: float
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """`constraints` are sorted, the binding one first. Times are means."""

    constraints: tuple[Constraint, ...]
    rate_per_s: float  # what is asked for
    throughput_per_s: Figure
    ttft_s: Figure
    tpot_s: Figure
    batch: float  # rows of a D's step
    parts_s: dict[str, float] = field(default_factory=dict)  # of TTFT

    @property
    def binding(self) -> Constraint:
        return self.constraints[0]

    @property
    def capacity_per_s(self) -> float:
        """Requests/s at which the first constraint binds."""
        return self.binding.capacity_per_s

    @property
    def next_constraint(self) -> tuple[Constraint, float]:
        """The next of another name, and how far it is used when the first binds."""
        others = (it for it in self.constraints[1:] if it.name != self.binding.name)
        after = next(others, self.constraints[1])
        return after, self.capacity_per_s / after.capacity_per_s

    @property
    def load(self) -> float:
        """What is asked for over what can be had."""
        return self.rate_per_s / self.capacity_per_s if self.capacity_per_s > 0 else math.inf


def analyse(
    layout: Layout,
    demand: Demand,
    link: LinkCost | None = None,
    *,
    tpot_slo_s: float = math.inf,
    kv_mode: KvMode = "pull",
) -> Analysis:
    """Throughput, TTFT, TPOT and what binds. `link` is that of one engine, in each direction."""
    if layout.prefill is not None and layout.decode is not None:
        return _disaggregated(layout.prefill, layout.decode, demand, link, tpot_slo_s, kv_mode)
    return _aggregated(layout.pools[0], demand, tpot_slo_s)


# ---------------------------------------------------------------- P and D

# Where D decodes it hears messages between two steps, half a step late. Its workers begin to read
# when they come to the step that is planned then, one later, and it looks at what has come when a
# step ends. The next is planned by then: the first token is of the one after. An engine without
# rows looks up every few milliseconds.
HEARD_STEPS = 0.5
LATE_STEPS = 1.0
HEARD_IDLE_S = IDLE_WAIT_S / 2


def _in_steps_s(transfer_s: float, step_s: float, busy: float) -> float:
    """From D's room for a request until it knows that its KV is there."""
    among_decodes = (HEARD_STEPS + LATE_STEPS) * step_s + _whole_steps_s(transfer_s, step_s)
    return busy * among_decodes + (1 - busy) * (transfer_s + HEARD_IDLE_S)


def _whole_steps_s(transfer_s: float, step_s: float) -> float:
    """Steps until the end of a read is seen, which begins with one: their number is rounded up.

    Averaged over transfers, or steps, that are longer or shorter by up to SPREAD.
    """

    def rounded_up(until: float) -> float:  # its integral from 0
        whole = math.ceil(until)
        return whole * until - whole * (whole - 1) / 2

    low, high = ((1 + by) * transfer_s / step_s for by in (-SPREAD, SPREAD))
    return step_s * max(1.0, (rounded_up(high) - rounded_up(low)) / max(1e-12, high - low))


SPREAD = 0.15


@dataclass(frozen=True)
class _Decode:
    """D as a function of the rows in its step."""

    pool: Pool
    demand: Demand

    def step_s(self, rows: float) -> float:
        return self.pool.decode_step_s(max(1.0, rows), self.demand, JOINS_AND_GOES)

    @property
    def slots(self) -> float:
        """Requests that one D has room for: the router sends no more than fit with their output."""
        demand, size = self.demand, self.pool.block_size
        blocks = math.ceil((demand.mean_prompt + demand.mean_output) / size)
        return math.floor(self.pool.kv_tokens / size / blocks)

    def residence_s(self, rows: float, before_s: float) -> float:
        """How long a request has room on D: from when it is sent to P until its last token."""
        steps = self.demand.mean_output + 1 + 2 * HEARD_STEPS + LATE_STEPS
        return before_s + steps * self.step_s(rows)

    def through_slots_per_s(self, before_s: float) -> float:
        """Requests/s through all slots of one D, each busy `before_s` before it decodes."""
        slots = self.slots
        if slots < 1:
            return 0.0
        rows = slots
        for _ in range(30):
            rate = slots / self.residence_s(rows, before_s)
            # Halfway each time: the step's length answers to the rows, and they to it.
            rows = (rows + rate * self.demand.mean_output * self.step_s(rows)) / 2
        return slots / self.residence_s(rows, before_s)


@dataclass(frozen=True)
class _Transfer:
    """A prompt's KV on its way from P to D; without a link it takes no time."""

    prefill: Pool
    decode: Pool
    demand: Demand
    link: LinkCost | None
    kv_mode: KvMode

    @property
    def request_bytes(self) -> float:
        return self.demand.mean_prompt * self.decode.kv_token_bytes

    @property
    def capacity_per_s(self) -> float:
        """Requests/s of all links."""
        if self.link is None:
            return math.inf
        links = min(self.prefill.count, self.decode.count)
        return links * self.link.bytes_per_s / self.request_bytes

    def seconds(self, mates: float = 1.0, rate_per_s: float = 0.0) -> float:
        """For prompts of one batch, which leave together and share P's link; while so many come.

        The next batch comes a step later; but D's link carries those of the other P too. Messages
        are one a block and rank pair, as when no blocks are adjacent.
        """
        if self.link is None:
            return 0.0
        rate = min(rate_per_s, self.capacity_per_s)
        others = rate * self.request_bytes / self.decode.count / self.link.bytes_per_s
        others *= 1 - 1 / self.prefill.count
        messages = math.ceil(self.demand.mean_prompt / self.decode.block_size)
        base_s = self.link.base_s + messages * self.link.message_s
        whole_s = forms.shared_transfer_s(
            base_s, mates * self.request_bytes, self.link.bytes_per_s, min(others, 0.999)
        )
        return whole_s if self.kv_mode == "pull" else self._left_to_read_s(whole_s)

    def _left_to_read_s(self, whole_s: float) -> float:
        """What is left at the end of a prompt, of which each step is read when that ends.

        The last step's part; or, on a link slower than P, all that it did not manage meanwhile.
        """
        budget = self.prefill.max_num_batched_tokens
        steps = max(1, math.ceil(self.demand.mean_computed / budget - 1e-9))
        before_last_s = prefill_s(self.prefill, self.demand, 1.0) * (steps - 1) / steps
        return max(whole_s / steps, whole_s - before_last_s)

    def known_on_decode_s(self, mates: float, rate_per_s: float, step_s: float, d: float) -> float:
        """From D's room for a request until it knows that its KV is there; `d`: D's share busy.

        Steps are whole ones, so it matters that mates are, too.
        """
        if not math.isfinite(step_s):
            return math.inf
        few = math.floor(mates)
        low, high = (_in_steps_s(self.seconds(n, rate_per_s), step_s, d) for n in (few, few + 1))
        return low + (high - low) * (mates - few) if mates > few else low


def _disaggregated(
    prefill: Pool,
    decode: Pool,
    demand: Demand,
    link: LinkCost | None,
    tpot_slo_s: float,
    kv_mode: KvMode,
) -> Analysis:
    by_prefill = prefill.count * prefill_capacity_per_s(prefill, demand)
    constraints = [Constraint(name="prefill compute", capacity_per_s=by_prefill)]
    line = prefill_line(prefill, demand)
    latency_s, mates = line.latency_s(prefill.count), line.together(prefill.count)
    alone_s, rate = prefill_s(prefill, demand, 1.0), demand.rate_per_s
    transfer = _Transfer(prefill, decode, demand, link, kv_mode)
    engine = _Decode(decode, demand)
    if link is not None:
        constraints.append(Constraint(name="link", capacity_per_s=transfer.capacity_per_s))
        constraints.append(_pins(prefill, demand, transfer.seconds()))
    constraints += _decode_constraints(engine, alone_s, transfer.seconds(), tpot_slo_s)
    constraints.sort(key=lambda it: it.capacity_per_s)

    served = min(rate, 0.999 * constraints[0].capacity_per_s)
    batch = forms.decode_batch(
        served / decode.count, demand.mean_output, engine.step_s, MOST_ROWS, decode.count
    )
    seen = forms.seen_batch(batch, decode.count)
    step_s = residence_s = math.inf
    if math.isfinite(batch):
        step_s = engine.step_s(seen)
        residence_s = engine.residence_s(seen, latency_s + transfer.seconds(mates, rate))
    busy = 1 - math.exp(-batch)  # the chance that D is in a step when something comes
    # As if the time on D grew with the output.
    places = max(1, int(decode.count * engine.slots))
    room_s = forms.wait_mgc_s(rate, residence_s, places, demand.output_scv)
    if kv_mode == "stream":
        room_s += busy * HEARD_STEPS * step_s  # D is asked first
    parts = {
        "room on D": room_s,
        "queue": latency_s - alone_s,
        "prefill": alone_s,
        "transfer": transfer.known_on_decode_s(mates, rate, step_s, busy),
        "first decode steps": step_s + busy * LATE_STEPS * step_s,
    }
    return _conclude(constraints, demand, parts, batch, step_s)


def _pins(prefill: Pool, demand: Demand, transfer_s: float) -> Constraint:
    """P stops taking prompts once so much of its pool waits to be fetched."""
    held_s = transfer_s + prefill_s(prefill, demand, 1.0)
    tokens = prefill.count * prefill.kv_tokens * prefill.pin_share
    return Constraint(name="pinned KV on P", capacity_per_s=tokens / demand.mean_prompt / held_s)


def _decode_constraints(
    engine: _Decode, prefill_s: float, transfer_s: float, tpot_slo_s: float
) -> list[Constraint]:
    """Capacities by what bounds the batch of a D: KV, seats, and the bound on TPOT."""
    pool, output = engine.pool, engine.demand.mean_output
    seats, slots = float(pool.max_num_seqs), engine.slots
    full_s = engine.step_s(seats)
    # A seat that is left is given away a step later, and then its new owner reads its KV.
    free_s = (1 + LATE_STEPS) * full_s + _whole_steps_s(transfer_s, full_s)
    is_flat = forms.batch_elasticity(engine.step_s, max(1.0, min(slots, seats))) >= FLAT
    found = [
        Constraint(
            name="decode compute" if is_flat and slots <= seats else "decode KV",
            capacity_per_s=pool.count * engine.through_slots_per_s(prefill_s + transfer_s),
            detail=f"{slots:.0f} requests on a D",
        ),
        Constraint(
            name="decode compute" if is_flat and seats < slots else "decode seats",
            capacity_per_s=pool.count * seats / (output * full_s + free_s),
            detail=f"{pool.max_num_seqs} seats on a D",
        ),
    ]
    if math.isfinite(tpot_slo_s):
        rows = forms.largest_batch(engine.step_s, tpot_slo_s, MOST_ROWS)
        rate = forms.decode_per_s(rows, output, engine.step_s(rows)) if rows else 0.0
        detail = f"{rows} rows within the bound on TPOT"
        found.append(
            Constraint(name="decode compute", capacity_per_s=pool.count * rate, detail=detail)
        )
    return found


# ---------------------------------------------------------------- engines that do both


def _aggregated(pool: Pool, demand: Demand, tpot_slo_s: float) -> Analysis:
    """Steps mix decodes with chunks of prompts: each prompt makes all rows' steps longer."""
    context, output = demand.decode_context, demand.mean_output

    def prompt_s(rows: float) -> float:
        return _prompt_in_steps_s(pool, demand, rows, context)

    # Steps of its prompt, the one after them, and the one after its last token.
    changes = math.ceil(demand.mean_computed / pool.max_num_batched_tokens - 1e-9) + COMES_AND_GOES

    def plain_s(rows: float) -> float:
        return pool.decode_step_s(rows, demand, changes)

    def capacity(rows: float) -> float:
        if rows < 1:
            return 0.0
        rows = min(rows, pool.max_num_batched_tokens / 2)  # else prompts find no room in steps
        return pool.count / (prompt_s(rows) + output * plain_s(rows) / rows)

    slots = pool.kv_tokens / context
    constraints = [
        Constraint(name="KV", capacity_per_s=capacity(slots)),
        Constraint(name="seats", capacity_per_s=capacity(float(pool.max_num_seqs))),
        Constraint(name="compute", capacity_per_s=capacity(float(MOST_ROWS))),
    ]
    if math.isfinite(tpot_slo_s):
        rate = _rate_within(tpot_slo_s, pool, output, plain_s, prompt_s)
        constraints.append(Constraint(name="compute within the bound on TPOT", capacity_per_s=rate))
    constraints.sort(key=lambda it: it.capacity_per_s)
    rate = demand.rate_per_s / pool.count

    def tpot_s(rows: float) -> float:
        return _tpot_among_prompts_s(plain_s(rows), prompt_s(rows), rate, rows, output)

    batch = forms.decode_batch(rate, output, tpot_s, MOST_ROWS, pool.count)
    seen = forms.seen_batch(batch, pool.count)
    if not math.isfinite(batch):
        return _conclude(constraints, demand, {"queue": math.inf}, batch, math.inf)
    each, fixed = prompt_s(seen), plain_s(seen)
    analysis = _conclude(
        constraints, demand, _first_token_s(rate, each, fixed, batch), batch, tpot_s(seen)
    )
    if each > SHORT_ANSWERS * output * fixed:
        reason = "answers are so short that it depends on which prompts come between"
        return replace(
            analysis,
            ttft_s=Figure(analysis.ttft_s.value, reason),
            tpot_s=Figure(analysis.tpot_s.value, reason),
        )
    return analysis


def _first_token_s(rate: float, each: float, fixed: float, batch: float) -> dict[str, float]:
    """Parts of TTFT where steps of `fixed` length get `each` longer by a prompt."""
    alone = each + fixed
    mean, random = forms.steps_in_a_row_s(rate, each, fixed)
    # While it decodes, steps follow each other: a prompt waits for the end of the one that it
    # comes in, for the next, which is planned already, and then for its own.
    among_decodes = random / 2 + mean + fixed + each * (1 + rate * random)
    idle = forms.all_at_once(rate, each, fixed).latency_s()
    decodes = 1 - math.exp(-batch)
    total = decodes * among_decodes + (1 - decodes) * idle
    return {"queue": total - alone, "prefill": alone}


def _tpot_among_prompts_s(
    fixed: float, each: float, rate: float, rows: float, output: float
) -> float:
    """Mean time per token where others' prompts make steps longer.

    A share rate * each of the time goes to them. And those that came while the request's own prompt
    waited for its step and was computed (two steps, the longer for it) are still to come when it
    begins to decode, while those of its own last two steps are not.
    """
    load = rate * each
    if load >= 1:
        return math.inf
    mean, random = forms.steps_in_a_row_s(rate, each, fixed)
    own = fixed + each * (1 + rate * random)
    decodes = 1 - math.exp(-rows)
    left_over = load * (own + (decodes - 2) * mean)
    return (fixed + max(0.0, left_over) / output) / (1 - load)


def _prompt_in_steps_s(pool: Pool, demand: Demand, rows: float, context: float) -> float:
    """How much longer steps of `rows` decodes get, in all, by a prompt computed in them."""
    work = demand.prefill_work(1.0)
    budget = max(1.0, pool.max_num_batched_tokens - rows)
    chunks = max(1, math.ceil(work.num_tokens / budget - 1e-9))
    reread = work.num_tokens / 2 if chunks > 1 else 0.0
    plain = StepWork(rows, rows, rows, rows * context, rows * (context + 0.5))
    mixed = StepWork(
        rows + work.num_tokens / chunks,
        rows + 1,
        rows + 1 / chunks,
        rows * context + work.context_tokens + reread,
        rows * (context + 0.5) + work.attended_tokens / chunks,
    )
    return chunks * (pool.cost.step_s(mixed) - pool.cost.step_s(plain))


def _rate_within(
    tpot_slo_s: float,
    pool: Pool,
    output: float,
    step_s: Callable[[float], float],
    prompt_s: Callable[[float], float],
) -> float:
    """Most requests/s at which TPOT, with the prompts between, stays below its bound."""
    best = 0.0
    rows = 1.0
    while rows <= MOST_ROWS:
        # At `rows` and a TPOT at its bound: rate = rows / (O * TPOT), if the prompts leave room.
        rate = rows / (output * tpot_slo_s)
        if step_s(rows) <= tpot_slo_s * (1 - rate * prompt_s(rows)):
            best = rate
        rows *= 1.05
    return pool.count * best


# ---------------------------------------------------------------- what follows


def _conclude(
    constraints: list[Constraint],
    demand: Demand,
    parts: dict[str, float],
    batch: float,
    tpot_s: float,
) -> Analysis:
    """Figures, with the reason where one does not apply. `batch` and TPOT are of what is served."""
    binding, after = constraints[0], constraints[1]
    load = demand.rate_per_s / binding.capacity_per_s if binding.capacity_per_s > 0 else math.inf
    unclear = ""
    if load > STABLE and after.capacity_per_s < CLEAR * binding.capacity_per_s:
        unclear = f"{binding.name} and {after.name} bind at nearly the same rate"
    near = f"{load:.0%} of what {binding.name} lets through is asked for"
    ttft_s = sum(parts.values())
    return Analysis(
        constraints=tuple(constraints),
        rate_per_s=demand.rate_per_s,
        throughput_per_s=Figure(min(demand.rate_per_s, binding.capacity_per_s), unclear),
        ttft_s=Figure(ttft_s, f"{near}: queues grow" if load > STABLE else ""),
        tpot_s=Figure(tpot_s, unclear or ("" if math.isfinite(tpot_s) else near)),
        batch=batch,
        parts_s=parts,
    )
