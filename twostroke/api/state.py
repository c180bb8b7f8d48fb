"""What the routes share: the engine's client, the model's names and text, and the limits."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from twostroke.api.errors import GenerationError
from twostroke.client.chat import ChatTemplate
from twostroke.client.engine import AsyncEngine, RequestOutput
from twostroke.client.tokenizer import Tokenizer
from twostroke.config import Explained
from twostroke.errors import EngineDeadError, EngineLoadingError, ModelNotFoundError
from twostroke.messages import EngineReady
from twostroke.metrics import Metrics

DEFAULT_MODEL = "default"  # always names the model that is served
MAX_BODY_BYTES = 32 << 20
_LOADING_RETRY_S = 2.0


@dataclass(kw_only=True)
class ServerState:
    """Everything that `create_app` needs. A model without a chat template has None."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    model_name: str
    metrics: Metrics
    api_key: str = ""
    explained: Sequence[Explained] = ()
    version: str = ""
    max_num_queued_reqs: int = 512
    max_body_bytes: int = MAX_BODY_BYTES
    call_timeout_s: float = 5.0  # for questions to the core
    started_unix_s: int = field(default_factory=lambda: int(time.time()))

    def served_name(self, asked: str) -> str:
        """The model that `asked` names. Raises ModelNotFoundError."""
        if asked not in ("", DEFAULT_MODEL, self.model_name):
            raise ModelNotFoundError(
                f"model {asked[:200]!r} is not served here; this server has {self.model_name!r}",
                param="model",
                hint=f"send {self.model_name!r}, or {DEFAULT_MODEL!r}",
            )
        return self.model_name

    def require_ready(self) -> EngineReady:
        """Facts of the loaded model. Raises EngineLoadingError or EngineDeadError."""
        if self.engine.dead is not None:
            raise EngineDeadError(self.engine.dead.message, hint=self.engine.dead.hint)
        if self.engine.ready is None:
            raise EngineLoadingError(
                f"the model {self.model_name} is still being loaded",
                retry_after_s=_LOADING_RETRY_S,
                hint="GET /ready says when it is done",
            )
        return self.engine.ready

    async def ask_core(self, method: str) -> object:
        """A question to the engine core, which a core that hangs does not answer in time."""
        self.require_ready()
        try:
            async with asyncio.timeout(self.call_timeout_s):
                answer: object = await self.engine.call(method)
                return answer
        except TimeoutError:
            raise EngineDeadError(
                f"the engine did not answer {method!r} within {self.call_timeout_s:g} s"
            ) from None


def request_ids(request: Request) -> tuple[str, str]:
    """The id that the client sees in the header, and the engine's, which is unique."""
    return request.state.request_id, request.state.unique_id


def check_finish(output: RequestOutput) -> None:
    """Turn an end that is not an answer into an error: no client may take it for a whole one."""
    if output.finish_reason == "error":
        raise GenerationError(output.error or "the engine could not finish this request")
    if output.finish_reason == "abort":
        raise EngineDeadError("the request was aborted because the server is shutting down")
