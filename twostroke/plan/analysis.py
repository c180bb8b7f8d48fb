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
from twostroke.plan.layout import Demand, Layout, Pool
from twostroke.twin.executor import IDLE_WAIT_S

CLEAR = 1.3  # the next constraint's capacity over the binding one's, for that one to bind alone
STABLE = 0.93  # of the capacity: beyond, queues depend on how long one looks
MOST_ROWS = 1 << 16
SHORT_ANSWERS = 0.1  # a prompt's time over that of all decode steps, from which TPOT is a lottery
FLAT = 0.9  # elasticity from which a larger batch brings nothing, so that compute is what binds

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
    layout: Layout, demand: Demand, link: LinkCost | None = None, *, tpot_slo_s: float = math.inf
) -> Analysis:
    """Throughput, TTFT, TPOT and what binds. `link` is that of one engine, in each direction."""
    if layout.prefill is not None and layout.decode is not None:
        return _disaggregated(layout.prefill, layout.decode, demand, link, tpot_slo_s)
    return _aggregated(layout.pools[0], demand, tpot_slo_s)


# ---------------------------------------------------------------- prefill


def prompts_per_step(pool: Pool, demand: Demand) -> float:
    """Whole prompts that a full step holds; below 1 a prompt takes several steps."""
    return min(pool.max_num_batched_tokens / demand.mean_computed, pool.max_num_seqs)


def prefill_s(pool: Pool, demand: Demand, batch: float) -> float:
    """Seconds until `batch` prompts are computed, in as many steps as the token budget makes it."""
    work = demand.prefill_work(batch)
    chunks = math.ceil(work.num_tokens / pool.max_num_batched_tokens - 1e-9)
    if chunks <= 1:
        return pool.cost.step_s(work) + _gap_s(pool, batch)
    # A prompt of several chunks is read again by each that follows, half of it on average.
    context = work.context_tokens + work.num_tokens / 2 / batch
    part = StepWork(
        work.num_tokens / chunks,
        max(1.0, work.num_rows / chunks),
        work.num_sampled / chunks,
        context,
        work.attended_tokens / chunks,
    )
    return chunks * (pool.cost.step_s(part) + _gap_s(pool, part.num_rows))


def prefill_capacity_per_s(pool: Pool, demand: Demand) -> float:
    """Prompts/s of one engine whose steps are full."""
    batch = prompts_per_step(pool, demand)
    whole = float(max(1, math.floor(batch)))
    return whole / prefill_s(pool, demand, whole)


def _gap_s(pool: Pool, rows: float) -> float:
    return pool.host.gap_s + rows * pool.host.gap_row_s


def _prefill_line(pool: Pool, demand: Demand) -> tuple[float, float]:
    """Mean time from arrival at P to the end of the prompt; and how many end with it."""
    rate = demand.rate_per_s / pool.count
    alone = prefill_s(pool, demand, 1.0)
    batch = math.floor(prompts_per_step(pool, demand))
    if batch < 2:
        # As if the time of a prompt grew with its tokens.
        wait_s = forms.wait_mgc_s(demand.rate_per_s, alone, pool.count, demand.computed_scv)
        return alone + wait_s, 1.0
    each = (prefill_s(pool, demand, float(batch)) - alone) / (batch - 1)
    fixed = max(0.0, alone - each)
    latency = forms.batch_latency_s(rate, each, fixed)
    if not math.isfinite(latency):
        return latency, float(batch)
    mates = forms.batch_mates(rate, latency, each, fixed)
    # The router sends each prompt to the P with least to do: nearly one queue before all of them.
    shared = 1.0
    if pool.count > 1:
        offered = pool.count * min(0.98, rate * (each + fixed / mates))
        shared = min(1.0, ROUTED * forms.erlang_c(pool.count, offered) / offered)
    return alone + shared * (latency - alone), min(float(batch), 1 + shared * (mates - 1))


# How much longer prompts wait where the router chooses a P when they come, than in one queue from
# which P take them when they are free (fitted to the twin: 1.2 to 1.7).
ROUTED = 1.45


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
    if not math.isfinite(step_s):
        return math.inf
    until_read = (HEARD_STEPS + LATE_STEPS) * step_s
    among_decodes = until_read + max(step_s, transfer_s + step_s / 2)
    return busy * among_decodes + (1 - busy) * (transfer_s + HEARD_IDLE_S)


@dataclass(frozen=True)
class _Decode:
    """D as a function of the rows in its step."""

    pool: Pool
    demand: Demand

    def step_s(self, rows: float) -> float:
        return self.pool.decode_step_s(max(1.0, rows), self.demand.decode_context)

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


def _disaggregated(
    prefill: Pool, decode: Pool, demand: Demand, link: LinkCost | None, tpot_slo_s: float
) -> Analysis:
    by_prefill = prefill.count * prefill_capacity_per_s(prefill, demand)
    constraints = [Constraint(name="prefill compute", capacity_per_s=by_prefill)]
    latency_s, mates = _prefill_line(prefill, demand)
    alone_s = prefill_s(prefill, demand, 1.0)
    transfer_s = transfer_alone_s = 0.0
    if link is not None:
        request_bytes = demand.mean_prompt * decode.kv_token_bytes
        by_link = min(prefill.count, decode.count) * link.bytes_per_s / request_bytes
        constraints.append(Constraint(name="link", capacity_per_s=by_link))
        base_s = link.base_s + _messages(decode, demand) * link.message_s
        # Prompts of one batch leave together, and share P's link as one transfer of their size.
        # The next batch comes a step later; but D's link carries those of the other P too.
        arriving = min(demand.rate_per_s, by_link)
        others = arriving * request_bytes / decode.count / link.bytes_per_s
        others *= 1 - 1 / prefill.count
        transfer_s = forms.shared_transfer_s(
            base_s, mates * request_bytes, link.bytes_per_s, min(others, 0.999)
        )
        transfer_alone_s = base_s + request_bytes / link.bytes_per_s
        constraints.append(_pins(prefill, demand, transfer_alone_s))
    engine = _Decode(decode, demand)
    constraints += _decode_constraints(engine, alone_s + transfer_alone_s, tpot_slo_s)
    constraints.sort(key=lambda it: it.capacity_per_s)

    served = min(demand.rate_per_s, 0.999 * constraints[0].capacity_per_s)
    batch = forms.decode_batch(
        served / decode.count, demand.mean_output, engine.step_s, MOST_ROWS, decode.count
    )
    seen = forms.seen_batch(batch, decode.count)
    step_s = engine.step_s(seen) if math.isfinite(batch) else math.inf
    places = max(1, int(decode.count * engine.slots))
    residence_s = math.inf
    if math.isfinite(batch):
        residence_s = engine.residence_s(seen, latency_s + transfer_s)
    busy = 1 - math.exp(-batch)  # the chance that D is in a step when something comes
    parts = {
        # As if the time on D grew with the output.
        "room on D": forms.wait_mgc_s(demand.rate_per_s, residence_s, places, demand.output_scv),
        "queue": latency_s
        - alone_s
        + HEARD_IDLE_S * (1 - min(1.0, demand.rate_per_s / by_prefill)),
        "prefill": alone_s,
        "transfer": _in_steps_s(transfer_s, step_s, busy),
        "first decode steps": step_s + busy * LATE_STEPS * step_s,
    }
    return _conclude(constraints, demand, parts, batch, step_s)


def _messages(decode: Pool, demand: Demand) -> float:
    """Messages of a transfer when no blocks are adjacent: one a block and rank pair."""
    return math.ceil(demand.mean_prompt / decode.block_size)


def _pins(prefill: Pool, demand: Demand, transfer_s: float) -> Constraint:
    """P stops taking prompts once so much of its pool waits to be fetched."""
    held_s = transfer_s + prefill_s(prefill, demand, 1.0)
    tokens = prefill.count * prefill.kv_tokens * prefill.pin_share
    return Constraint(name="pinned KV on P", capacity_per_s=tokens / demand.mean_prompt / held_s)


def _decode_constraints(engine: _Decode, before_s: float, tpot_slo_s: float) -> list[Constraint]:
    """Capacities by what bounds the batch of a D: KV, seats, and the bound on TPOT."""
    pool, output = engine.pool, engine.demand.mean_output
    seats, slots = float(pool.max_num_seqs), engine.slots
    is_flat = forms.batch_elasticity(engine.step_s, max(1.0, min(slots, seats))) >= FLAT
    found = [
        Constraint(
            name="decode compute" if is_flat and slots <= seats else "decode KV",
            capacity_per_s=pool.count * engine.through_slots_per_s(before_s),
            detail=f"{slots:.0f} requests on a D",
        ),
        Constraint(
            name="decode compute" if is_flat and seats < slots else "decode seats",
            capacity_per_s=pool.count * forms.decode_per_s(seats, output, engine.step_s(seats)),
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

    def plain_s(rows: float) -> float:
        return pool.decode_step_s(rows, context)

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
    idle = forms.batch_latency_s(rate, each, fixed)
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
