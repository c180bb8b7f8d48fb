"""The routes beside generation: what is served, how it is, what it does, and the tokenizer."""

import asyncio
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from twostroke.api.chat import encode_chat
from twostroke.api.errors import GenerationError, error_response, json_response
from twostroke.api.parse import members, parse
from twostroke.api.protocol import (
    DetokenizeRequest,
    RoleRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from twostroke.api.state import ServerState, check_finish
from twostroke.api.streaming import read_body
from twostroke.errors import EngineDeadError, EngineLoadingError, RequestError
from twostroke.messages import SamplingParams
from twostroke.metrics import CONTENT_TYPE

_DEEP_TIMEOUT_S = 30.0


# ---------------------------------------------------------------- models


def _model(state: ServerState) -> dict[str, Any]:
    ready = state.engine.ready
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.started_unix_s,
        "owned_by": "twostroke",
        "root": state.model_name,
        "parent": None,
        "max_model_len": None if ready is None else ready.max_model_len,
    }


async def list_models(state: ServerState, request: Request) -> Response:
    """The one model; answers while it is still being loaded."""
    return json_response({"object": "list", "data": [_model(state)]})


async def get_model(state: ServerState, request: Request) -> Response:
    """One model by its name, which may hold slashes."""
    name = request.path_params["model"]
    if not name:  # /v1/models/, from a base URL that ends in a slash
        return await list_models(state, request)
    state.served_name(name)
    return json_response(_model(state))


# ---------------------------------------------------------------- health


async def health(state: ServerState, request: Request) -> Response:
    """200 while the process can serve or will; `?deep=1` makes one token to prove it.

    Where engines have roles it may have to do without some: then it is degraded, and says which.
    Nothing is asked of any engine, so none of them can make the answer late.
    """
    if request.query_params.get("deep", "0") not in ("", "0", "false"):
        await _make_one_token(state)
        return json_response({"status": "ok", "deep": True})
    if state.engine.dead is not None:
        return error_response(state.engine.dead)
    if state.engine.ready is None:
        return json_response({"status": "loading"})
    if gone := state.engine.gone:
        return json_response({"status": "degraded", "gone": {str(i): gone[i] for i in gone}})
    return json_response({"status": "ok"})


async def ready(state: ServerState, request: Request) -> Response:
    """200 once the model is loaded, as long as the core answers."""
    await state.ask_core("ping")
    return json_response({"status": "ready"})


async def _make_one_token(state: ServerState) -> None:
    state.require_ready()
    tokenizer = state.tokenizer
    start = 0 if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    outputs = state.engine.generate(
        [start],
        SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        request_id=f"health-{uuid.uuid4().hex}",
        final_only=True,
    )
    try:
        async with asyncio.timeout(_DEEP_TIMEOUT_S):
            async for output in outputs:
                check_finish(output)
    except TimeoutError:
        raise EngineDeadError(f"no token within {_DEEP_TIMEOUT_S:g} s") from None
    except GenerationError as error:
        raise EngineDeadError(error.message) from None
    finally:
        await outputs.aclose()


# ---------------------------------------------------------------- what it is and does


async def metrics(state: ServerState, request: Request) -> Response:
    """Prometheus text."""
    return Response(state.metrics.render(), headers={"content-type": CONTENT_TYPE})


async def version(state: ServerState, request: Request) -> Response:
    """The version of twostroke."""
    return json_response({"version": state.version})


async def props(state: ServerState, request: Request) -> Response:
    """The resolved settings with their reasons, the limits, and the chat template."""
    engine_ready = state.engine.ready
    template = state.chat_template
    facts = [] if engine_ready is None else engine_ready.facts
    return json_response(
        {
            "model": state.model_name,
            "version": state.version,
            "status": _status(state),
            "limits": {
                "max_model_len": None if engine_ready is None else engine_ready.max_model_len,
                "max_request_tokens": (
                    None if engine_ready is None else state.engine.max_request_tokens
                ),
                "max_num_queued_reqs": state.max_num_queued_reqs,
                "max_body_bytes": state.max_body_bytes,
                "vocab_size": state.engine.vocab_size,
            },
            "kv": {
                "num_blocks": None if engine_ready is None else engine_ready.num_blocks,
                "block_size": None if engine_ready is None else engine_ready.block_size,
            },
            "chat_template": None if template is None else template.source,
            "config": [
                {"name": it.name, "value": it.value, "source": it.source, "reason": it.reason}
                for it in state.explained
            ],
            "facts": [
                {"name": name, "value": value, "reason": reason} for name, value, reason in facts
            ],
        }
    )


def _status(state: ServerState) -> str:
    try:
        state.require_ready()
    except EngineLoadingError:
        return "loading"
    except EngineDeadError:
        return "dead"
    return "degraded" if state.engine.gone else "ok"


async def slots(state: ServerState, request: Request) -> Response:
    """What each live request does."""
    return json_response(await state.ask_core("slots"))


# ---------------------------------------------------------------- engines


async def engines(state: ServerState, request: Request) -> Response:
    """Every engine: its role, its state and what it last said of itself."""
    return json_response({"engines": state.engine.engines})


async def set_role(state: ServerState, request: Request) -> Response:
    """Give an engine another role. It drains first: the answer says how far it is."""
    ask = parse(await read_body(request, state.max_body_bytes), RoleRequest)
    state.require_ready()
    index = int(request.path_params["engine"])
    state.engine.set_role(index, ask.role)
    (engine,) = (it for it in state.engine.engines if it["engine"] == index)
    return json_response(engine)


# ---------------------------------------------------------------- tokenizer


async def tokenize(state: ServerState, request: Request) -> Response:
    """Token ids of a text, or of messages as the chat template renders them."""
    body = await read_body(request, state.max_body_bytes)
    ask: TokenizeRequest | TokenizeChatRequest
    if "messages" in members(body):
        ask = parse(body, TokenizeChatRequest)
        state.served_name(ask.model)
        token_ids = await encode_chat(state, ask)
    else:
        ask = parse(body, TokenizeRequest)
        state.served_name(ask.model)
        token_ids = await state.tokenizer.encode_async(
            ask.prompt, add_special_tokens=ask.add_special_tokens
        )
    names = [state.tokenizer.token_text(i) for i in token_ids] if ask.return_token_strs else None
    return json_response(
        {
            "count": len(token_ids),
            "max_model_len": state.engine.max_model_len,
            "tokens": token_ids,
            "token_strs": names,
        }
    )


async def detokenize(state: ServerState, request: Request) -> Response:
    """The text of token ids, special tokens included."""
    ask = parse(await read_body(request, state.max_body_bytes), DetokenizeRequest)
    state.served_name(ask.model)
    size = state.engine.vocab_size
    if ask.tokens and max(ask.tokens) >= size:
        raise RequestError(
            f"tokens holds {max(ask.tokens)}; the vocabulary has ids 0 to {size - 1}",
            param="tokens",
        )
    return json_response({"prompt": state.tokenizer.decode(ask.tokens, skip_special_tokens=False)})
