"""The HTTP application: every route in one table, behind the gateway.

    client ──▶ Gateway (id, key, last net) ──▶ route ──▶ parse ──▶ AsyncEngine ──▶ chunks ──▶ client

`create_app` wires nothing that runs: the caller starts the engine's client and the server.
"""

from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from twostroke.api import admin
from twostroke.api.chat import chat_completions
from twostroke.api.completions import completions
from twostroke.api.errors import RouteErrors
from twostroke.api.gateway import Gateway
from twostroke.api.state import ServerState

__all__ = ["ServerState", "create_app"]

_ROUTES = (
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("GET", "/v1/models", admin.list_models),
    ("GET", "/v1/models/{model:path}", admin.get_model),
    ("POST", "/tokenize", admin.tokenize),
    ("POST", "/detokenize", admin.detokenize),
    ("GET", "/health", admin.health),
    ("GET", "/ready", admin.ready),
    ("GET", "/metrics", admin.metrics),
    ("GET", "/version", admin.version),
    ("GET", "/props", admin.props),
    ("GET", "/slots", admin.slots),
    ("GET", "/engines", admin.engines),
    ("POST", "/engines/{engine:int}/role", admin.set_role),
)


def create_app(state: ServerState) -> Starlette:
    """The application over `state`."""
    app = Starlette(
        routes=[
            Route(path, partial(handler, state), methods=[method])
            for method, path, handler in _ROUTES
        ],
        middleware=[Middleware(Gateway, api_key=state.api_key)],
        exception_handlers={HTTPException: RouteErrors(path for _, path, _ in _ROUTES)},
    )
    # A path with a slash too many is an unknown route, not a redirect to another host's idea of us.
    app.router.redirect_slashes = False
    return app
