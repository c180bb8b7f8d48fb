"""What a layout does under a load, from closed forms alone: a fraction of a millisecond each.

    arrivals ──▶ P: batches of prompts ──▶ link ──▶ D: a batch that KV and seats bound ──▶ done
                 prefill compute, pins     link     decode KV, seats, compute

Each constraint has a capacity in requests/s; the smallest binds. Below it everything is stable, and
the queueing formulas give times. Where they do not hold (a queue without end, or two constraints
so close that each makes the other worse) the figure says why it does not apply.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from twostroke.advice import closed_form as forms
from twostroke.cost import LinkCost, StepWork
from twostroke.plan.layout import Demand, Layout, Pool

CLEAR = 1.15  # the next constraint's capacity over the binding one's, for that one to bind alone
STABLE = 0.93  # of the capacity: beyond, queues depend on how long one looks
MOST_ROWS = 1 << 16
NO_MORE_FROM_BATCH = 0.9

QUEUE = "queue"  # the part of TTFT that varies from request to request


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
        """The one after, and how far it is used when the first binds."""
        after = self.constraints[1]
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


def _prefill_wait_s(pool: Pool, demand: Demand) -> float:
    """Mean time from arrival at P to the end of the prompt, beyond computing it alone."""
    rate = demand.rate_per_s / pool.count
    alone = prefill_s(pool, demand, 1.0)
    batch = math.floor(prompts_per_step(pool, demand))
    if batch < 2:
        scv = _service_scv(pool, demand, alone)
        return forms.wait_mgc_s(demand.rate_per_s, alone, pool.count, scv)
    each = (prefill_s(pool, demand, float(batch)) - alone) / (batch - 1)
    return forms.batch_latency_s(rate, each, max(0.0, alone - each)) - alone


def _service_scv(pool: Pool, demand: Demand, mean_s: float) -> float:
    """Squared coefficient of variation of prefill times, as if they grew with the tokens."""
    computed = demand.prompt_tokens - demand.cached_tokens
    return float(computed.var() / computed.mean() ** 2)


# ---------------------------------------------------------------- P and D


def _disaggregated(
    prefill: Pool, decode: Pool, demand: Demand, link: LinkCost | None, tpot_slo_s: float
) -> Analysis:
    constraints = [
        Constraint(
            name="prefill compute",
            capacity_per_s=prefill.count * prefill_capacity_per_s(prefill, demand),
        )
    ]
    request_bytes = demand.mean_prompt * decode.kv_token_bytes
    transfer_s = 0.0
    if link is not None:
        ends = min(prefill.count, decode.count)
        capacity = ends * link.bytes_per_s / request_bytes
        constraints.append(Constraint(name="link", capacity_per_s=capacity))
        load = demand.rate_per_s / capacity
        base_s = link.base_s + _messages(decode, demand) * link.message_s
        transfer_s = forms.shared_transfer_s(base_s, request_bytes, link.bytes_per_s, load)
        alone_s = base_s + request_bytes / link.bytes_per_s
        constraints.append(_pins(prefill, demand, alone_s))
    loading_s = transfer_s if math.isfinite(transfer_s) else 0.0
    constraints += _decode_constraints(decode, demand, loading_s, tpot_slo_s)
    constraints.sort(key=lambda it: it.capacity_per_s)

    context = demand.decode_context
    batch = forms.decode_batch(
        demand.rate_per_s / decode.count,
        demand.mean_output,
        lambda rows: decode.decode_step_s(rows, context),
        MOST_ROWS,
    )
    parts = {
        QUEUE: _prefill_wait_s(prefill, demand),
        "prefill": prefill_s(prefill, demand, 1.0),
        "transfer": transfer_s,
        # Whatever arrives on D waits for the step under way, and then for its own.
        "first decode step": 1.5 * decode.decode_step_s(max(1.0, min(batch, MOST_ROWS)), context),
    }
    return _conclude(constraints, demand, parts, batch, decode.decode_step_s)


def _messages(decode: Pool, demand: Demand) -> float:
    """Messages of a transfer when no blocks are adjacent: one a block and rank pair."""
    return math.ceil(demand.mean_prompt / decode.block_size)


def _pins(prefill: Pool, demand: Demand, transfer_s: float) -> Constraint:
    """P stops taking prompts once so much of its pool waits to be fetched."""
    held_s = transfer_s + prefill_s(prefill, demand, 1.0)
    tokens = prefill.count * prefill.kv_tokens * prefill.pin_share
    return Constraint(name="pinned KV on P", capacity_per_s=tokens / demand.mean_prompt / held_s)


def _decode_constraints(
    pool: Pool, demand: Demand, loading_s: float, tpot_slo_s: float
) -> list[Constraint]:
    """Capacities by what bounds the batch of a D: KV, seats, and the bound on TPOT."""
    context, output = demand.decode_context, demand.mean_output

    def step_s(rows: float) -> float:
        return pool.decode_step_s(rows, context)

    slots = pool.kv_tokens / context
    by_kv = pool.count * _slots_per_s(slots, output, step_s, loading_s)
    seats = float(pool.max_num_seqs)
    by_seats = pool.count * forms.decode_per_s(seats, output, step_s(seats))
    bound = min(slots, seats)
    flat = bound >= 1 and forms.batch_elasticity(step_s, bound) >= NO_MORE_FROM_BATCH
    name = "decode compute" if flat and slots <= seats else "decode KV"
    found = [
        Constraint(name=name, capacity_per_s=by_kv, detail=f"{slots:.0f} requests on a D"),
        Constraint(
            name="decode compute" if flat and name == "decode KV" else "decode seats",
            capacity_per_s=by_seats,
            detail=f"{pool.max_num_seqs} requests on a D",
        ),
    ]
    if math.isfinite(tpot_slo_s):
        rows = forms.largest_batch(step_s, tpot_slo_s, MOST_ROWS)
        rate = forms.decode_per_s(rows, output, step_s(rows)) if rows else 0.0
        detail = f"{rows} rows within the bound on TPOT"
        found.append(
            Constraint(name="decode compute", capacity_per_s=pool.count * rate, detail=detail)
        )
    return found


def _slots_per_s(
    slots: float, output_tokens: float, step_s: Callable[[float], float], loading_s: float
) -> float:
    """Requests/s through `slots` places, each loading for `loading_s` and then decoding."""
    if slots < 1:
        return 0.0
    rows = slots
    for _ in range(50):
        decoding_s = output_tokens * step_s(rows)
        rows = max(1.0, slots * decoding_s / (decoding_s + loading_s))
    return slots / (output_tokens * step_s(rows) + loading_s)


# ---------------------------------------------------------------- engines that do both


def _aggregated(pool: Pool, demand: Demand, tpot_slo_s: float) -> Analysis:
    """Steps mix decodes with chunks of prompts: each prompt makes all rows' steps longer."""
    context, output = demand.decode_context, demand.mean_output

    def prompt_s(rows: float) -> float:
        return _prompt_in_steps_s(pool, demand, rows, context)

    def step_s(rows: float) -> float:
        return pool.decode_step_s(rows, context)

    def capacity(rows: float) -> float:
        if rows < 1:
            return 0.0
        return pool.count / (prompt_s(rows) + output * step_s(rows) / rows)

    slots = pool.kv_tokens / context
    constraints = [
        Constraint(name="KV", capacity_per_s=capacity(slots)),
        Constraint(name="seats", capacity_per_s=capacity(float(pool.max_num_seqs))),
        Constraint(name="compute", capacity_per_s=capacity(float(MOST_ROWS))),
    ]
    if math.isfinite(tpot_slo_s):
        rows = _rows_within(tpot_slo_s, pool, output, step_s, prompt_s)
        constraints.append(Constraint(name="compute within the bound on TPOT", capacity_per_s=rows))
    constraints.sort(key=lambda it: it.capacity_per_s)
    rate = demand.rate_per_s / pool.count

    def slowed_s(rows: float, _: float = 0.0) -> float:
        left = 1 - rate * prompt_s(max(1.0, rows))
        return step_s(max(1.0, rows)) / left if left > 0 else math.inf

    batch = forms.decode_batch(rate, output, slowed_s, MOST_ROWS)
    rows = max(1.0, min(batch, MOST_ROWS))
    each, fixed = prompt_s(rows), step_s(rows)
    load = rate * each
    first_s = math.inf
    if load < 1:
        busy = 1.5 * fixed / (1 - load) + each / 2 * (load + 2) / (1 - load * load)
        first_s = busy if batch >= 1 else forms.batch_latency_s(rate, each, fixed)
    parts = {QUEUE: first_s - each - fixed, "prefill": each + fixed}
    return _conclude(constraints, demand, parts, batch, slowed_s)


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


def _rows_within(
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
    step_s: Callable[[float, float], float],
) -> Analysis:
    binding, after = constraints[0], constraints[1]
    load = demand.rate_per_s / binding.capacity_per_s if binding.capacity_per_s > 0 else math.inf
    unclear = ""
    if after.capacity_per_s < CLEAR * binding.capacity_per_s:
        unclear = f"{binding.name} and {after.name} bind at nearly the same rate"
    unstable = ""
    if load >= STABLE:
        unstable = f"{load:.0%} of what {binding.name} lets through is asked for: queues grow"
    overloaded = load > 1
    throughput = min(demand.rate_per_s, binding.capacity_per_s)
    near = "" if overloaded or load < STABLE else unstable
    tpot = step_s(max(1.0, batch), demand.decode_context) if math.isfinite(batch) else math.inf
    ttft = sum(parts.values())
    never = "" if math.isfinite(ttft) else "a queue grows without end"
    return Analysis(
        constraints=tuple(constraints),
        rate_per_s=demand.rate_per_s,
        throughput_per_s=Figure(throughput, near or (unclear if overloaded else "")),
        ttft_s=Figure(ttft, unstable or never),
        tpot_s=Figure(tpot, unstable or ("" if math.isfinite(tpot) else "D does not keep up")),
        batch=batch,
        parts_s=parts,
    )
