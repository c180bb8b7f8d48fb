"""Requests that can never run, and why: they are told when they arrive, instead of waiting."""

from twostroke.core.state import EngineState
from twostroke.messages import AddRequest


def refusal(state: EngineState, request: AddRequest) -> str | None:
    """Why a request can never run, or None."""
    config, kv = state.config, state.kv
    num_prompt = len(request.prompt_token_ids)
    if num_prompt == 0:
        return "prompt is empty; limit: at least 1 token; send some text"
    if num_prompt >= config.max_model_len:
        return (
            f"prompt has {num_prompt:,} tokens but at most {config.max_model_len - 1:,} leave "
            f"room for output; limit: max_model_len {config.max_model_len:,}; shorten the "
            "prompt or restart with a larger --max-model-len"
        )
    budget = state.token_budget
    if not config.enable_chunked_prefill and not (
        num_prompt <= budget or 0 < config.long_prefill_token_threshold <= budget
    ):
        return (
            f"prompt has {num_prompt:,} tokens and must run in one step, without chunked "
            f"prefill; limit: {budget:,} tokens a step; shorten the prompt or restart with a "
            "larger --max-num-batched-tokens"
        )
    needed, usable = kv.blocks_at_once(num_prompt), kv.pool.num_usable
    if needed > usable:
        return (
            f"prompt of {num_prompt:,} tokens needs {needed:,} KV blocks; limit: the pool has "
            f"{usable:,} ({usable * config.block_size:,} tokens); shorten the prompt or "
            "restart with a larger KV pool"
        )
    if request.kv_send is None and request.kv_receive is None:
        return None
    if state.handoff is None:
        return (
            "this engine takes no part in hand-offs; limit: engines of a prefill/decode deployment"
        )
    return state.handoff.refusal(request)
