"""Deployments in the twin whose trouble is known, since it was put there.

One engine computes a prompt of 1,024 tokens in some 21 ms, and a decode step over B rows in
4 ms + 0.08 ms * B. A request's KV is 134 MB: 6.7 ms on a link of 20 GB/s, and worth moving from
6.4 GB/s on.
"""

from dataclasses import dataclass, field, replace

from twostroke.advice.observation import Observation
from twostroke.config import SchedulerConfig
from twostroke.cost import BandwidthCurve, LinearStepCost
from twostroke.kv.sizing import KvLayout
from twostroke.plan.twin_observation import observe
from twostroke.router.jobs import DispatchSettings
from twostroke.twin.scenario import EngineGroup, Scenario, simulate
from twostroke.twin.transfers import Link
from twostroke.twin.workload import from_spec

KV = KvLayout(num_layers=32, num_kv_heads=8, head_dim=128)
USUAL = LinearStepCost(base_s=4e-3, token_s=2e-5, row_s=2e-5, context_s=4e-8)
ROWS_COST_ALL = LinearStepCost(base_s=2e-4, token_s=2e-5, row_s=3e-4, context_s=1e-7)


def steady(rate: float) -> BandwidthCurve:
    return BandwidthCurve((0.0,), (rate,))


def fluctuating(high: float, low: float, share: float = 0.2) -> BandwidthCurve:
    """`low` for a share of each two seconds."""
    return BandwidthCurve((0.0, 2.0 * (1 - share)), (high, low), 2.0)


@dataclass(frozen=True, kw_only=True)
class Known:
    """A deployment, and what must and must not be said of it: answers by verdict.

    `slots`: requests that a D's KV holds; `pool`: prompts that a P's KV holds.
    """

    name: str
    expects: dict[str, str]
    prefill: int = 1
    decode: int = 1
    prompt: int = 1024
    output: int = 128
    rate: float = 15.0
    num_requests: int = 250
    slots: int = 200
    pool: int = 200
    seats: int = 512
    link: BandwidthCurve = field(default_factory=lambda: steady(20e9))
    message_s: float = 0.0
    cost: LinearStepCost = USUAL
    facts: dict[str, float] = field(default_factory=dict)

    def observe(self) -> Observation:
        """What the twin sees of it."""
        spec = f"poisson:{self.rate}/s,in={self.prompt},out={self.output},n={self.num_requests}"
        total = self.prompt + self.output
        config = SchedulerConfig(
            max_num_seqs=self.seats, max_num_batched_tokens=8192, max_model_len=total + 1
        )
        block = config.block_size
        decoder = replace(config, num_blocks=self.slots * -(-total // block) + 2)
        prefiller = replace(config, num_blocks=self.pool * -(-self.prompt // block) + 2)
        engines = [
            EngineGroup(
                role="prefill", cost=self.cost, config=prefiller, layout=KV, count=self.prefill
            ),
            EngineGroup(
                role="decode", cost=self.cost, config=decoder, layout=KV, count=self.decode
            ),
        ]
        scenario = Scenario(
            engines=engines,
            workload=from_spec(spec, seed=1),
            link=Link(bandwidth=self.link, base_s=1e-3, message_s=self.message_s),
            settings=DispatchSettings(handoff_timeout_s=1e4, lease_s=1e4),
            name=self.name,
        )
        facts = {"prefix_tokens": float(self.prompt)} | self.facts
        return observe(simulate(scenario)).with_facts(**facts)


HEALTHY = {
    "decode_bound": "nothing",
    "message_size": "good",
    "link_limit": "far",
    "prefill_blocked": "no",
    "decode_waits": "neither",
    "move_prefix": "move",
}
KNOWN = [
    # Nothing is short: P computes a third of the time, D has room, the link idles.
    Known(name="healthy", expects=HEALTHY | {"ratio": "fits", "layout": "keep"}, slots=48),
    Known(
        name="healthy, two and two",
        expects=HEALTHY | {"ratio": "fits", "layout": "keep"},
        prefill=2, decode=2, rate=25.0, slots=48,
    ),
    Known(
        name="healthy, long answers",
        expects=HEALTHY | {"ratio": "fits", "layout": "keep"},
        decode=2, output=512, rate=12.0, slots=200, num_requests=300,
    ),
    # D's KV holds few, and more come than it lets through.
    Known(
        name="KV for 8",
        expects={"decode_bound": "kv", "decode_waits": "decode", "ratio": "more_decode",
                 "link_limit": "far"},
        slots=8, rate=25.0,
    ),
    Known(
        name="KV for 24, long answers",
        expects={"decode_bound": "kv", "decode_waits": "decode", "ratio": "more_decode",
                 "layout": "keep"},
        slots=24, output=512, rate=12.0,
    ),
    Known(
        name="KV for 10 on each of two",
        expects={"decode_bound": "kv", "decode_waits": "decode", "message_size": "good"},
        slots=10, decode=2, output=256, rate=25.0,
    ),
    # Each row costs as much as the last: a larger batch brings nothing.
    Known(
        name="rows cost all",
        expects={"decode_bound": "compute", "decode_waits": "decode", "ratio": "more_decode"},
        cost=ROWS_COST_ALL, slots=40, output=256, rate=20.0,
    ),
    Known(
        name="TPOT over its bound",
        expects={"decode_bound": "compute", "decode_waits": "decode"},
        output=256, rate=40.0, prefill=2, facts={"tpot_slo_s": 0.006},
    ),
    Known(
        name="rows cost all, two",
        expects={"decode_bound": "compute", "decode_waits": "decode"},
        cost=ROWS_COST_ALL, slots=30, decode=2, output=256, rate=40.0, prefill=2,
    ),
    # The link carries less than is asked for.
    Known(
        name="link of 1 GB/s",
        expects={"link_limit": "near", "decode_waits": "waits", "layout": "change",
                 "move_prefix": "recompute", "message_size": "good"},
        link=steady(1e9), slots=60,
    ),
    Known(
        name="link of 1.5 GB/s, two and two",
        expects={"link_limit": "near", "decode_waits": "waits", "layout": "change",
                 "move_prefix": "recompute"},
        link=steady(1.5e9), prefill=2, decode=2, rate=30.0, slots=60,
    ),
    Known(
        name="link at nine tenths",
        expects={"link_limit": "near", "move_prefix": "recompute", "decode_bound": "nothing"},
        link=steady(2.3e9), rate=15.0,
    ),
    # The link is fast, but not always.
    Known(
        name="link that falls to 1 GB/s",
        expects={"link_limit": "near", "layout": "change", "move_prefix": "recompute",
                 "message_size": "good"},
        link=fluctuating(20e9, 1e9),
    ),
    # Each message costs more than its bytes.
    *(
        Known(
            name=f"messages of {cost * 1e3:g} ms",
            expects={"message_size": "small", "prefill_blocked": "no"},
            message_s=cost, rate=rate, slots=48,
        )
        for cost, rate in ((0.01, 8.0), (0.02, 5.0), (0.05, 4.0))
    ),
    # P has room for few prompts, and D fetches them slowly.
    *(
        Known(
            name=f"P has room for {pool}, link of {link / 1e9:g} GB/s",
            expects={"prefill_blocked": "yes"},
            pool=pool, link=steady(link), rate=rate, slots=200,
        )
        for pool, link, rate in ((6, 1e9, 12.0), (8, 1.2e9, 12.0), (4, 1e9, 10.0))
    ),
    # Prompts are long and answers short, or the reverse.
    *(
        Known(
            name=f"{prompt} in, {output} out",
            expects={"ratio": "more_prefill", "layout": layout},
            prompt=prompt, output=output, rate=rate, prefill=1, decode=decode, num_requests=150,
        )
        for prompt, output, rate, decode, layout in (
            (8192, 16, 4.0, 3, "change"), (4096, 32, 8.0, 3, "change"), (8192, 64, 5.0, 1, "keep"),
        )
    ),
    # The next turn is short and D decodes few; or long, and many.
    *(
        Known(
            name=f"a turn of {tokens}, {rate:g}/s",
            expects={"append_on_decode": answer},
            rate=rate, facts={"turn_tokens": tokens, "tpot_slo_s": 0.05}, output=output,
        )
        for tokens, rate, output, answer in (
            (16, 5.0, 64, "append"), (64, 5.0, 64, "append"), (32, 15.0, 128, "append"),
            (4096, 20.0, 256, "prefill"), (8192, 20.0, 256, "prefill"),
            (4096, 25.0, 256, "prefill"),
        )
    ),
]  # fmt: skip
