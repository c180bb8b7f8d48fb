"""Small deployments and loads for the tests of the twin."""

from typing import Any

from twostroke.config import SchedulerConfig
from twostroke.cost import BandwidthCurve, LinearStepCost
from twostroke.kv.sizing import KvLayout
from twostroke.twin.scenario import EngineGroup, Result, Scenario, simulate
from twostroke.twin.transfers import Link
from twostroke.twin.workload import Workload, from_spec

COST = LinearStepCost(base_s=0.004, token_s=2e-5, row_s=1e-5, context_s=1e-9, attended_s=1e-9)
LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=64, block_size=16)
TOKEN_BYTES = LAYOUT.token_bytes
LINK = Link(bandwidth=BandwidthCurve((0.0,), (1e9,)), base_s=0.001)


def group(role: str = "both", count: int = 1, **settings: Any) -> EngineGroup:
    """Engines alike; settings are the scheduler's, or the group's own."""
    own = {
        name: settings.pop(name)
        for name in ("cost", "layout", "host", "max_hold_share")
        if name in settings
    }
    defaults = {"num_blocks": 400, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    config = SchedulerConfig(**(defaults | {"max_model_len": 2048} | settings))
    return EngineGroup(
        role=role, count=count, config=config, **({"cost": COST, "layout": LAYOUT} | own)
    )


def run(engines: list[EngineGroup], load: Workload | str, **fields: Any) -> Result:
    """Simulate; a text is a spec."""
    workload = from_spec(load, seed=1) if isinstance(load, str) else load
    return simulate(Scenario(engines=engines, workload=workload, **({"link": LINK} | fields)))
