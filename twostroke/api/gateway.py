"""What every HTTP request passes, outside the routes: its id, the API key, and the last net.

    x-request-id  ▶ taken over when it is harmless, else made; sent back with every answer
    API key       ▶ compared in constant time, on every route but plain /health
    exception     ▶ an answer in OpenAI's shape; a bug of ours is logged with its traceback

It is plain ASGI: Starlette's own wrapper would put a queue between a stream and the socket.
"""

import hmac
import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twostroke.api.errors import error_response, internal_error
from twostroke.errors import AuthenticationError, TwostrokeError

logger = logging.getLogger("twostroke.api")

REQUEST_ID_HEADER = "x-request-id"
# Printable, no blanks, nothing that a log or a header could take for its own syntax.
_HARMLESS_ID = re.compile(r"[A-Za-z0-9._:/@+=-]{1,128}")


class Gateway:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._api_key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given_id = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        is_harmless = _HARMLESS_ID.fullmatch(given_id) is not None
        request_id = given_id if is_harmless else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        # An id of the client's need not be unique, and the engine's must be.
        scope["state"]["unique_id"] = (
            f"{request_id}-{uuid.uuid4().hex[:8]}" if is_harmless else request_id
        )
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            self._authenticate(scope)
            await self._app(scope, receive, send_with_id)
            return
        except ClientDisconnect:
            return  # in the middle of its body: nobody is there to answer
        except TwostrokeError as error:
            if started:
                raise
            response = error_response(error)
        except Exception:
            logger.exception("request %s failed: %s", request_id, scope["path"])
            if started:
                raise
            response = error_response(internal_error(request_id))
        await response(scope, receive, send_with_id)

    def _authenticate(self, scope: Scope) -> None:
        # A deep health check costs a token, so it needs the key like any request.
        is_open = scope["path"] == "/health" and not scope["query_string"]
        if not self._api_key or is_open:
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1")  # as Starlette decodes headers
        if scheme.lower() != "bearer" or not hmac.compare_digest(given, self._api_key):
            what = "wrong API key" if scheme else "no API key"
            raise AuthenticationError(what, hint="send the header Authorization: Bearer <key>")
