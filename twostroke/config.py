"""All settings, once: names, defaults, meanings, and where each value came from.

`EngineConfig` is frozen after resolution. Every field can be set, in rising order of strength, by
its default, a TOML file (`--config`), an environment variable (`TWOSTROKE_<NAME>`) and a flag;
what the engine derives itself (the KV pool's size, say) is recorded with its reason, and
`twostroke config --explain` prints all of it. Flags have vLLM's names.
"""

import dataclasses
import difflib
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from twostroke.config_values import (
    coerce,
    is_loopback,
    parse_address,
    read_toml,
    speculative_settings,
)
from twostroke.errors import ConfigError

Policy = Literal["fcfs", "priority"]
Admission = Literal["head", "loads", "backfill"]
Preemption = Literal["last", "least_lost"]
Role = Literal["prefill", "decode", "both"]  # what the router sends to an engine
Quantization = Literal["auto", "none", "int8", "int4"]
ENV_PREFIX = "TWOSTROKE_"
NGRAM_SPECULATIVE_TOKENS = 7  # a row of 8: the most that weights of few bits take
MAX_SPECULATIVE_TOKENS = 128  # vLLM's bound
MAX_SHUTDOWN_TIMEOUT_S = 86_400
MAX_HANDOFF_TIMEOUT_S = 86_400
ANY_ADDRESS = ("0.0.0.0", "::", "*")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What the sans-I/O core needs to know. The twin builds it too.

    `num_blocks` counts block 0, the null block, which is never used (as in vLLM): usable blocks
    are 1 to num_blocks - 1. A `long_prefill_token_threshold` of 0 is off.
    """

    block_size: int = 16
    num_blocks: int = 1024
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    max_num_scheduled_tokens: int | None = None
    max_model_len: int = 8192
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    policy: Policy = "fcfs"
    num_spec_tokens: int = 0
    spec_method: Literal["ngram", "draft_model", "eagle"] = "ngram"
    async_scheduling: bool = True
    reserve_full_isl: bool = True
    sliding_window: int | None = None
    kv_load_failure_policy: Literal["recompute", "fail"] = "fail"
    # Better rules than vLLM's, off by default; `core.policy` explains them.
    admission: Admission = "head"
    max_backfills: int = 64
    preemption: Preemption = "last"
    reserve_output_tokens: int = 0


def _setting(default: Any, doc: str, *, minimum: int | None = None) -> Any:
    return field(default=default, metadata={"doc": doc, "minimum": minimum})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The resolved settings of one engine and its API process. None means: derived at start."""

    # model
    model: str = _setting("", "a Hugging Face id, a directory or a .gguf file; empty: SmolLM2")
    served_model_name: str = _setting("", "name in the API; default: derived from the model")
    tokenizer: str = _setting(
        "", "tokenizer: a directory or a .gguf file, when not the model's own"
    )
    chat_template: str = _setting("", "file with a jinja2 chat template, when not the model's own")
    revision: str = _setting("main", "branch, tag or commit of a Hugging Face id")
    offline: bool = _setting(False, "never download; say what is missing")
    load_format: Literal["auto", "dummy"] = _setting("auto", "dummy: random weights, no file read")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _setting(
        "auto", "type of weights and arithmetic"
    )
    quantization: Quantization = _setting(
        "auto",
        "4 and 8 bits on a CPU: weights as the file has them; never; int8: weights and activations "
        "rounded (W8A8); int4: weights rounded, multiplied so in steps of few tokens",
    )
    seed: int = _setting(0, "seed of requests that bring none, and of dummy weights")
    # device
    device: Literal["auto", "cpu", "cuda"] = _setting("auto", "where the model runs")
    cpu_threads: int = _setting(
        0, "threads of each engine on a CPU, over all its workers; 0: all cores given", minimum=0
    )
    tensor_parallel_size: int = _setting(1, "workers that share each layer", minimum=1)
    data_parallel_size: int = _setting(
        1, "engines behind one server, each with the whole model", minimum=1
    )
    worker_process: bool = _setting(False, "run the worker in a process of its own")
    # KV pool
    block_size: int = _setting(16, "tokens per KV block", minimum=1)
    gpu_memory_utilization: float = _setting(
        0.9, "share of the device's (on a CPU: of the free) memory that weights and KV may take"
    )
    kv_cache_memory_bytes: int = _setting(0, "size of each worker's KV pool; 0: derived", minimum=0)
    num_gpu_blocks_override: int = _setting(0, "number of KV blocks; 0: derived", minimum=0)
    kv_cache_dtype: Literal["auto", "int8"] = _setting(
        "auto", "type of KV: the model's, or 8 bits with a scale a token and head (on a CPU)"
    )
    enable_prefix_caching: bool = _setting(True, "reuse the KV of equal prefixes")
    # scheduling
    max_model_len: int = _setting(0, "longest prompt plus output; 0: the model's", minimum=0)
    max_num_seqs: int = _setting(64, "requests that run at once (seats)", minimum=1)
    max_num_batched_tokens: int = _setting(2048, "token budget of a step", minimum=1)
    enable_chunked_prefill: bool = _setting(True, "a prompt may take several steps")
    long_prefill_token_threshold: int = _setting(
        0, "most prompt tokens of one request in a step; 0: no bound", minimum=0
    )
    scheduling_policy: Policy = _setting("fcfs", "order of requests")
    async_scheduling: bool = _setting(True, "plan step N+1 while the device runs step N")
    scheduler_reserve_full_isl: bool = _setting(True, "admit only if the whole prompt fits")
    admission: Admission = _setting(
        "head", "who may pass a request that lacks memory: nobody, finished loads, anybody who fits"
    )
    max_backfills: int = _setting(
        64, "requests that may pass one with --admission backfill", minimum=0
    )
    preemption: Preemption = _setting(
        "last", "who loses its blocks: the newest, or who has least work to lose"
    )
    reserve_output_tokens: int = _setting(
        0, "output tokens of each request that admission leaves room for", minimum=0
    )
    check: bool = _setting(False, "verify the engine's own rules at every step (slow)")
    # speculative decoding
    speculative_method: Literal["none", "ngram", "draft_model"] = _setting(
        "none", "where draft tokens come from: the request's own text, or a smaller model"
    )
    num_speculative_tokens: int = _setting(
        4,
        f"most draft tokens a request and step; default with ngram: {NGRAM_SPECULATIVE_TOKENS}",
        minimum=1,
    )
    speculative_model: str = _setting("", "the draft model, named as the model is")
    prompt_lookup_min: int = _setting(1, "ngram: fewest last tokens that must recur", minimum=1)
    prompt_lookup_max: int = _setting(32, "ngram: most last tokens looked for", minimum=1)
    speculative_config: str = _setting("", "the five above as JSON, with vLLM's keys")
    # prefill and decode in engines of their own, which hand KV over
    prefill: int = _setting(0, "engines started here that compute prompts for others", minimum=0)
    decode: int = _setting(0, "engines started here that continue them; 0 of both: off", minimum=0)
    kv_transport: Literal["auto", "shm", "nixl"] = _setting(
        "auto", "how KV is read: shm within a host, nixl also between hosts"
    )
    kv_mode: Literal["pull", "stream"] = _setting(
        "pull", "KV moves once the prompt is computed, or chunk by chunk meanwhile"
    )
    pd_policy: Literal["always", "cost", "never"] = _setting(
        "cost", "hand a prompt over: always, where the estimate says it pays, or never"
    )
    kv_lease_s: float = _setting(30.0, "seconds that KV is held for a reader who is silent")
    kv_hold_share: float = _setting(0.5, "share of the KV pool that held prompts may take")
    handoff_timeout_s: float = _setting(120.0, "seconds after which a hand-off has failed")
    handoff_retries: int = _setting(1, "times a failed hand-off is tried another way", minimum=0)
    kv_recompute_max_tokens: int = _setting(
        16384, "longest prompt that decode computes itself once its hand-off failed", minimum=0
    )
    profile: str = _setting(
        "", "file of `twostroke profile`, for --pd-policy cost; default: learned while running"
    )
    kv_host: str = _setting("", "address at which other hosts reach this engine's KV (nixl)")
    # engines in other places
    engines_listen: str = _setting("", "HOST:PORT where engines may join; empty: none may")
    key: str = _setting("", "file with the key that server and joining engines share")
    join: str = _setting("", "HOST:PORT of the server that this engine joins")
    role: Role = _setting("both", "what a joining engine is for")
    engine_timeout_s: float = _setting(
        15.0, "seconds of silence after which a joined engine counts as dead"
    )
    ray: str = _setting("", "address of the Ray cluster that the engines are placed on")
    # server
    host: str = _setting("127.0.0.1", "address to listen on")
    port: int = _setting(8000, "port to listen on", minimum=0)
    api_key: str = _setting("", "key that clients must send; empty: none")
    max_num_queued_reqs: int = _setting(512, "unfinished requests before 429", minimum=1)
    shutdown_timeout_s: float = _setting(15.0, "seconds that running requests get at shutdown")
    metrics_prefix: Literal["twostroke", "vllm"] = _setting("twostroke", "of Prometheus names")
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "of the log")
    trace: str = _setting("", "write a Chrome trace of the threads to this file")
    save_ledger: str = _setting("", "write each request's ledger to this file, as JSON lines")

    @property
    def local_roles(self) -> tuple[Role, ...]:
        """Roles of the engines that run here, in the order of their numbers."""
        return () if self.ray else self.roles

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles of the engines that this process starts, here or, with Ray, elsewhere.

        A server that others may join has no engine of its own unless it is told to.
        """
        if self.join:
            return (self.role,)
        if self.prefill or self.decode or self.engines_listen:
            counts: list[tuple[Role, int]] = [("prefill", self.prefill), ("decode", self.decode)]
        else:
            counts = [("both", self.data_parallel_size)]
        return tuple(role for role, count in counts for _ in range(count))

    @property
    def hands_off(self) -> bool:
        """Whether KV can move between the engines, so that they need a connector."""
        return bool(self.prefill or self.decode or self.engines_listen or self.join)


SECRET_FIELDS = frozenset({"api_key"})


@dataclass(frozen=True)
class Explained:
    """One setting's value with its source: default, file, env, flag or derived, and why."""

    name: str
    value: Any
    source: str
    reason: str


def field_docs() -> dict[str, str]:
    """Name to one-line meaning, for help texts and docs."""
    return {f.name: f.metadata["doc"] for f in dataclasses.fields(EngineConfig)}


def resolve(
    flags: Mapping[str, Any],
    *,
    config_file: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[EngineConfig, list[Explained]]:
    """Merge defaults, file, environment and flags (None: not given) into one frozen config.

    Raises ConfigError naming the nearest match for an unknown key, and the limit for a bad value.
    """
    environ = os.environ if environ is None else environ
    fields = {f.name: f for f in dataclasses.fields(EngineConfig)}
    kinds = typing.get_type_hints(EngineConfig)
    values: dict[str, Any] = {name: f.default for name, f in fields.items()}
    sources: dict[str, tuple[str, str]] = {
        name: ("default", f.metadata["doc"]) for name, f in fields.items()
    }

    def take(name: str, value: Any, source: str, shown: str) -> None:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {near[0]}?" if near else "see twostroke config --explain"
            raise ConfigError(f"unknown setting {shown}", hint=hint)
        values[name] = coerce(kinds[name], value, shown, fields[name].metadata["minimum"])
        sources[name] = (source, shown)

    if config_file is not None:
        for key, value in read_toml(config_file).items():
            take(key.replace("-", "_"), value, "file", f"{key} in {config_file}")
    for key, text in environ.items():
        if key.startswith(ENV_PREFIX) and key not in OTHER_ENVIRONMENT:
            take(key.removeprefix(ENV_PREFIX).lower(), text, "env", key)
    for name, value in flags.items():
        if value is not None:
            take(name, value, "flag", "--" + name.replace("_", "-"))

    if values["speculative_config"]:
        for name, value in speculative_settings(values["speculative_config"]).items():
            take(name, value, sources["speculative_config"][0], f"{name} of --speculative-config")
    if (
        values["speculative_method"] == "ngram"
        and sources["num_speculative_tokens"][0] == "default"
    ):
        reason = "as many of these as pay are used"
        values["num_speculative_tokens"] = NGRAM_SPECULATIVE_TOKENS
        sources["num_speculative_tokens"] = ("derived", reason)
    config = EngineConfig(**values)
    _check(config)
    if config.hands_off:
        for name, (value, reason) in _derive_handoff(config).items():
            values[name], sources[name] = value, ("derived", reason)
        config = EngineConfig(**values)
    explained = [
        Explained(
            name,
            "***" if name in SECRET_FIELDS and value else value,
            *sources[name],
        )
        for name, value in values.items()
    ]
    return config, explained


# Environment variables that are not settings of an engine.
OTHER_ENVIRONMENT = {
    "TWOSTROKE_CACHE": "directory for downloaded models and compiled kernels",
}


def cache_dir() -> Path:
    """The user's cache directory for models and compiled kernels (not created here)."""
    if path := os.environ.get("TWOSTROKE_CACHE"):
        return Path(path).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "twostroke"


def _check(config: EngineConfig) -> None:
    """Rules over several settings."""
    if not 0 < config.gpu_memory_utilization <= 1:
        raise ConfigError(
            f"--gpu-memory-utilization is {config.gpu_memory_utilization}; it must be in (0, 1]"
        )
    if config.port > 65535:
        raise ConfigError(f"--port is {config.port}; it must be at most 65535")
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens is {config.max_num_batched_tokens}, less than "
            f"--max-num-seqs {config.max_num_seqs}",
            hint="a step must hold one token of each running request",
        )
    if not config.enable_chunked_prefill and (
        config.max_model_len > config.max_num_batched_tokens or config.max_model_len == 0
    ):
        raise ConfigError(
            f"without chunked prefill --max-num-batched-tokens {config.max_num_batched_tokens} "
            f"must hold the longest prompt (--max-model-len {config.max_model_len or 'unset'})",
            hint="set --max-model-len to at most --max-num-batched-tokens",
        )
    _check_speculation(config)
    _check_handoff(config)
    _check_joining(config)
    if not 0 <= config.shutdown_timeout_s <= MAX_SHUTDOWN_TIMEOUT_S:
        raise ConfigError(
            f"--shutdown-timeout-s is {config.shutdown_timeout_s}; it must be at least 0 and at "
            f"most {MAX_SHUTDOWN_TIMEOUT_S} (a day)"
        )


def _check_speculation(config: EngineConfig) -> None:
    drafting = config.speculative_method == "draft_model"
    if drafting != bool(config.speculative_model):
        raise ConfigError(
            f"--speculative-method is {config.speculative_method} and --speculative-model "
            f"{config.speculative_model or 'empty'}",
            hint="a draft model needs both: --speculative-method draft_model and the model",
        )
    if drafting and config.tensor_parallel_size > 1:
        raise ConfigError(
            f"a draft model does not work with --tensor-parallel-size "
            f"{config.tensor_parallel_size}",
            hint="use --speculative-method ngram, or one worker",
        )
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise ConfigError(
            f"--prompt-lookup-min is {config.prompt_lookup_min}, more than "
            f"--prompt-lookup-max {config.prompt_lookup_max}"
        )
    if config.num_speculative_tokens > MAX_SPECULATIVE_TOKENS:
        raise ConfigError(
            f"--num-speculative-tokens is {config.num_speculative_tokens}; it must be at most "
            f"{MAX_SPECULATIVE_TOKENS}"
        )
    if drafting and config.max_num_batched_tokens <= config.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens} leaves no tokens beside a "
            f"draft row for each of --max-num-seqs {config.max_num_seqs}",
            hint="raise --max-num-batched-tokens or lower --max-num-seqs",
        )


def _check_handoff(config: EngineConfig) -> None:
    joinable = config.engines_listen
    if bool(config.prefill) != bool(config.decode) and not joinable:
        given, other = ("prefill", "decode") if config.prefill else ("decode", "prefill")
        raise ConfigError(
            f"--{given} is {getattr(config, given)} and --{other} 0",
            hint=f"give both, or --engines-listen and let engines with --role {other} join",
        )
    if config.data_parallel_size > 1 and config.hands_off:
        why = next(it for it in ("join", "engines_listen", "prefill") if getattr(config, it))
        raise ConfigError(
            f"--data-parallel-size {config.data_parallel_size} does not go with "
            f"--{why.replace('_', '-')}",
            hint="say how many engines there are by --prefill and --decode, and let more join",
        )
    if config.hands_off and config.speculative_method == "draft_model":
        raise ConfigError(
            "a draft model does not work where KV is handed over, for its own KV is not",
            hint="use --speculative-method ngram",
        )
    if not 0 < config.kv_hold_share <= 1:
        raise ConfigError(f"--kv-hold-share is {config.kv_hold_share}; it must be in (0, 1]")
    if not config.kv_lease_s >= 1:
        raise ConfigError(f"--kv-lease-s is {config.kv_lease_s}; it must be at least 1")
    if not config.kv_lease_s < config.handoff_timeout_s <= MAX_HANDOFF_TIMEOUT_S:
        raise ConfigError(
            f"--handoff-timeout-s is {config.handoff_timeout_s}; it must be more than "
            f"--kv-lease-s {config.kv_lease_s} and at most {MAX_HANDOFF_TIMEOUT_S}",
            hint="a lease is renewed while the hand-off lasts",
        )


def _check_joining(config: EngineConfig) -> None:
    for name in ("engines_listen", "join"):
        if text := getattr(config, name):
            parse_address(text, "--" + name.replace("_", "-"))
    if config.join:
        for name in ("engines_listen", "ray", "prefill", "decode"):
            if value := getattr(config, name):
                flag = "--" + name.replace("_", "-")
                raise ConfigError(
                    f"--join {config.join} does not go with {flag} {value}",
                    hint="twostroke engine is one engine of a server that runs elsewhere",
                )
    elif config.role != "both":
        raise ConfigError(
            f"--role is {config.role} without --join",
            hint="twostroke serve has --prefill and --decode",
        )
    if config.ray and not (config.prefill and config.decode and config.engines_listen):
        raise ConfigError(
            f"--ray {config.ray} needs --prefill, --decode and --engines-listen",
            hint="they say how many engines Ray starts, and where those find this server",
        )
    if bool(config.key) != bool(config.engines_listen or config.join):
        raise ConfigError(
            f"--key is {config.key}, but no engine can join"
            if config.key
            else "engines that join over the network need --key FILE",
            hint="--engines-listen of the server and --join of the engine go with the same --key; "
            "twostroke key FILE makes one",
        )
    if not 1 <= config.engine_timeout_s <= 3600:
        raise ConfigError(
            f"--engine-timeout-s is {config.engine_timeout_s}; it must be from 1 to 3600"
        )


def _derive_handoff(config: EngineConfig) -> dict[str, tuple[str, str]]:
    """What follows for --kv-transport and --kv-host, by name, with the reason."""
    derived: dict[str, tuple[str, str]] = {}
    transport: str = config.kv_transport
    if transport == "auto":
        derived["kv_transport"] = transport, _ = _derive_transport(config)
    if transport != "nixl" or config.kv_host or not (config.engines_listen and config.local_roles):
        return derived
    host, _ = parse_address(config.engines_listen, "--engines-listen")
    if host in ANY_ADDRESS:
        raise ConfigError(
            f"--engines-listen {config.engines_listen} does not say at which address others read "
            "the KV of the engines here",
            hint="give it with --kv-host",
        )
    if not is_loopback(host):
        derived["kv_host"] = host, "--engines-listen"
    return derived


def _derive_transport(config: EngineConfig) -> tuple[Literal["shm", "nixl"], str]:
    """shm where all engines must be on this host, on a CPU; nixl everywhere else."""
    if config.device == "cuda":
        return "nixl", "KV is on GPUs"
    if config.ray:
        return "nixl", "engines on the nodes of a Ray cluster"
    for flag, text in (("--engines-listen", config.engines_listen), ("--join", config.join)):
        if text and not is_loopback(parse_address(text, flag)[0]):
            return "nixl", f"{flag} {text} is reached from other hosts"
    return "shm", "all engines are on this host"
