"""A step in the form that workers run."""

import numpy as np

from twostroke.core.request import Request
from twostroke.core.state import EngineState
from twostroke.core.step import Step
from twostroke.messages import NewRequest, StepPlan


def plan_of(step: Step, state: EngineState) -> StepPlan:
    """What the worker is told of a step; what it is told of transfers, it is told once."""
    plan = StepPlan(
        step=step.number,
        slots=step.slots.astype(np.int32),
        num_computed=step.num_computed,
        num_scheduled=step.num_scheduled,
        samples=step.samples,
    )
    if step.freed_slots:
        plan.freed_slots = np.array(step.freed_slots, np.int32)
    if step.grown:
        plan.grown_slots = np.array(list(step.grown), np.int32)
        plan.grown_counts = np.array([len(new) for new in step.grown.values()], np.int32)
        plan.grown_blocks = np.concatenate(list(step.grown.values())).astype(np.int32)
    if state.config.num_spec_tokens and np.count_nonzero(step.num_drafts):
        plan.num_drafts = step.num_drafts
        drafts = state.seats.drafts[step.slots]
        within = np.arange(drafts.shape[1]) < step.num_drafts[:, None]
        plan.draft_token_ids = drafts[within]
    plan.new = [_new_request(admission.request) for admission in step.admitted]
    if state.connector is not None:
        plan.kv = state.connector.build_connector_meta()
    return plan


def _new_request(request: Request) -> NewRequest:
    return NewRequest(
        slot=request.slot,
        request_id=request.request_id,
        token_ids=request.tokens,
        num_prompt_tokens=request.num_prompt_tokens,
        params=request.params,
        stop_token_ids=request.stop_ids.all,
        block_ids=np.array(request.table.blocks, np.int32),
    )
