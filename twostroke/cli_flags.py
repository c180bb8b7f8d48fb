"""Command-line flags made from `EngineConfig`'s fields, so that flags, help and settings agree.

Every flag but a switch arrives as text: `config.resolve` turns it into the right type, so a wrong
value gives the same message from a flag, a file or the environment.
"""

import dataclasses
import functools
import gc
import inspect
import os
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from twostroke import config
from twostroke.config import EngineConfig, Explained
from twostroke.errors import ConfigError

# Settings of an engine that joins a server, which the server itself does not have.
ENGINE_ONLY = frozenset({"join", "role"})
# Settings of the HTTP side and of the choice between engines, which one engine does not have.
SERVER_ONLY = frozenset(
    {"host", "port", "api_key", "max_num_queued_reqs", "metrics_prefix"}
    | {"served_model_name", "chat_template", "data_parallel_size", "prefill", "decode", "ray"}
    | {"pd_policy", "kv_mode", "kv_lease_s", "handoff_timeout_s", "handoff_retries"}
    | {"kv_recompute_max_tokens", "engines_listen", "engine_timeout_s", "profile", "save_ledger"}
)
# What an engine used as a library does not have: it serves nobody else.
ONLINE_ONLY = ENGINE_ONLY.union(
    {"host", "port", "api_key", "max_num_queued_reqs", "shutdown_timeout_s", "metrics_prefix"},
    {"prefill", "decode", "ray", "pd_policy", "kv_mode", "kv_transport", "kv_lease_s"},
    {"handoff_timeout_s", "handoff_retries", "kv_hold_share", "kv_recompute_max_tokens"},
    {"kv_host", "engines_listen", "key", "engine_timeout_s", "profile", "save_ledger"},
)


@dataclasses.dataclass(frozen=True)
class EngineFlags:
    """What the user gave: flags by field name (None: not given), and the file of --config."""

    given: dict[str, Any]
    config_file: Path | None

    def resolve(self) -> tuple[EngineConfig, list[Explained]]:
        """Merge with file, environment and defaults. Raises ConfigError."""
        return config.resolve(self.given, config_file=self.config_file)


@contextmanager
def one_shot() -> Iterator[None]:
    """Around a command that computes in one thread, prints and ends, before it imports NumPy.

    NumPy's threads spin for 50 ms at their start, and nothing here multiplies large matrices; and
    next to nothing is garbage in cycles, but what lives is walked in vain in each collection.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # the process is about to end: what is left is not to be walked at last
        gc.enable()


def with_engine_flags(
    without: frozenset[str] = frozenset(),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command `[MODEL]`, `--config` and a flag for each setting, as its `flags` parameter.

    Those named in `without` are left out. The command's own parameters stay.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = {
            name: parameter
            for name, parameter in inspect.signature(command).parameters.items()
            if name != "flags"
        }
        names = [
            field.name for field in dataclasses.fields(EngineConfig) if field.name not in without
        ]

        def with_flags(model_argument: str | None, config_file: Path | None, **values: Any) -> Any:
            given = {name: values.pop(name) for name in names}
            given["model"] = _one_model(model_argument, given["model"])
            return command(flags=EngineFlags(given, config_file), **values)

        parameters = [_MODEL, *own.values(), _CONFIG_FILE, *map(_option, names)]
        return _disguise(with_flags, command, parameters)

    return decorate


def with_flags_of(options_class: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command a flag for each field of a dataclass, as its `options` parameter."""
    kinds = typing.get_type_hints(options_class)

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command)
        own = [parameter for name, parameter in signature.parameters.items() if name != "options"]
        fields = dataclasses.fields(options_class)
        names = [field.name for field in fields]

        def with_options(**values: Any) -> Any:
            given = {name: values.pop(name) for name in names}
            return command(options=options_class(**given), **values)

        parameters = [_typed_option(field, kinds[field.name]) for field in fields]
        return _disguise(with_options, command, [*parameters, *own])

    return decorate


def _disguise(
    wrapper: Callable[..., Any], command: Callable[..., Any], parameters: list[inspect.Parameter]
) -> Callable[..., Any]:
    """Let typer see the command's name and help, and these parameters."""
    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    wrapper.__annotations__ = {}
    wrapper.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    )
    return wrapper


def _typed_option(field: "dataclasses.Field[Any]", kind: Any) -> inspect.Parameter:
    """A flag that typer itself converts and bounds."""
    flag = "--" + field.name.replace("_", "-")
    default = field.default
    if default is True:
        flag += f"/--no-{flag[2:]}"
    if field.default_factory is not dataclasses.MISSING:  # a list: the flag may be repeated
        default = field.default_factory()
    info = typer.Option(
        flag,
        help=field.metadata["doc"],
        min=field.metadata["minimum"],
        show_default=default not in ("", None, []),
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, info],
    )


def _parameter(name: str, kind: Any, info: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, info],
    )


_MODEL = _parameter(
    "model_argument",
    str,
    typer.Argument(metavar="MODEL", help=config.field_docs()["model"], show_default=False),
)
_CONFIG_FILE = _parameter(
    "config_file",
    Path,
    typer.Option(
        "--config", metavar="FILE", help="TOML file with settings by name; flags override it"
    ),
)


@functools.cache
def _kinds() -> dict[str, Any]:
    """The settings' types by name: looked up once, not once a flag."""
    return typing.get_type_hints(EngineConfig)


def _option(name: str) -> inspect.Parameter:
    """The flag of one field: vLLM's spelling, its type or choices, its default."""
    field = EngineConfig.__dataclass_fields__[name]
    kind = _kinds()[name]
    flag = "--" + name.replace("_", "-")
    help_text = field.metadata["doc"]
    if field.default != "":
        on_off = "on" if field.default else "off"
        default = on_off if kind is bool else field.default
        help_text += f" [default: {default}]"
    if kind is bool:
        declared = f"{flag}/--no-{name.replace('_', '-')}"
        return _parameter(name, bool, typer.Option(declared, help=help_text))
    if typing.get_origin(kind) is Literal:
        metavar = "|".join(typing.get_args(kind))
    else:
        metavar = {int: "N", float: "X"}.get(kind, "TEXT")
    return _parameter(name, str, typer.Option(flag, metavar=metavar, help=help_text))


def _one_model(argument: str | None, flag: str | None) -> str | None:
    if argument is not None and flag is not None and argument != flag:
        raise ConfigError(
            f"two models are given: {argument} and --model {flag}", hint="give one of them"
        )
    return argument if argument is not None else flag
