"""Errors as answers: OpenAI's error object, its status and the headers that clients obey."""

import difflib
import math
from collections.abc import Iterable

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from twostroke.api.protocol import ErrorBody, ErrorDetail
from twostroke.errors import (
    AuthenticationError,
    EngineLoadingError,
    QueueFullError,
    RequestError,
    TwostrokeError,
)

JSON = "application/json"
# openai-python retries these by itself, and is right to.
_WORTH_RETRYING = frozenset((408, 409, 429, 503))


class GenerationError(TwostrokeError):
    """A request that the engine accepted and could not finish. The same again would fail again."""

    code = "generation_failed"


def error_body(error: TwostrokeError) -> ErrorBody:
    """OpenAI's error object; the message ends in the hint."""
    param = error.param if isinstance(error, RequestError) else None
    return ErrorBody(ErrorDetail(str(error), error.error_type, param, error.code))


def error_response(error: TwostrokeError) -> Response:
    """Status, headers and body of an error that is the client's to read."""
    headers = {}
    if isinstance(error, QueueFullError | EngineLoadingError):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    if error.http_status not in _WORTH_RETRYING:
        headers["x-should-retry"] = "false"
    return json_response(error_body(error), error.http_status, headers)


def internal_error(request_id: str) -> TwostrokeError:
    """What a client may know of a bug of ours; the log has the rest under the same id."""
    return TwostrokeError(
        "internal error; this is not your request's fault",
        hint=f"the server's log has the details under request id {request_id}",
    )


def json_response(
    content: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A JSON answer written by msgspec."""
    return Response(msgspec.json.encode(content), status, headers, media_type=JSON)


class RouteErrors:
    """404 and 405 in OpenAI's shape, with the nearest route."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = sorted(set(paths))

    def __call__(self, request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        path = request.url.path[:200]
        if exc.status_code == 404:
            near = difflib.get_close_matches(path, self._paths, n=1)
            hint = f"did you mean {near[0]}?" if near else "routes: " + ", ".join(self._paths)
            detail = f"no route {path}; {hint}"
        elif exc.status_code == 405:
            allowed = (exc.headers or {}).get("Allow", "another method")
            detail = f"{path} does not answer {request.method}; use {allowed}"
        else:
            detail = str(exc.detail)
        code = {404: "route_not_found", 405: "method_not_allowed"}.get(exc.status_code)
        body = ErrorBody(ErrorDetail(detail, "invalid_request_error", None, code))
        headers = {**(exc.headers or {}), "x-should-retry": "false"}
        return json_response(body, exc.status_code, headers)
