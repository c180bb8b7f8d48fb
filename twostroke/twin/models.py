"""Shapes of models by name, so that nothing needs to be fetched to plan for a well-known one."""

import re
from difflib import get_close_matches
from pathlib import Path

from twostroke.errors import ConfigError
from twostroke.shape import ModelShape, from_hf_config

_Sizes = dict[str, tuple[int, ...]]

# name: hidden, MLP width, layers, heads, KV heads, head size, vocabulary, positions, and for a
# mixture of experts: experts, of which a token takes, width of one.
_LLAMA: _Sizes = {
    "llama-2-7b": (4096, 11_008, 32, 32, 32, 128, 32_000, 4096),
    "llama-2-70b": (8192, 28_672, 80, 64, 8, 128, 32_000, 4096),
    "llama-3.1-8b": (4096, 14_336, 32, 32, 8, 128, 128_256, 131_072),
    "llama-3.1-70b": (8192, 28_672, 80, 64, 8, 128, 128_256, 131_072),
    "llama-3.1-405b": (16_384, 53_248, 126, 128, 8, 128, 128_256, 131_072),
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, 64, 128_256, 131_072),
    "llama-3.2-3b": (3072, 8192, 28, 24, 8, 128, 128_256, 131_072),
    "llama-3.3-70b": (8192, 28_672, 80, 64, 8, 128, 128_256, 131_072),
    "smollm2-135m": (576, 1536, 30, 9, 3, 64, 49_152, 8192),
    "smollm2-360m": (960, 2560, 32, 15, 5, 64, 49_152, 8192),
    "smollm2-1.7b": (2048, 8192, 24, 32, 32, 64, 49_152, 8192),
}
_QWEN2: _Sizes = {
    "qwen2.5-7b": (3584, 18_944, 28, 28, 4, 128, 152_064, 32_768),
    "qwen2.5-14b": (5120, 13_824, 48, 40, 8, 128, 152_064, 32_768),
    "qwen2.5-32b": (5120, 27_648, 64, 40, 8, 128, 152_064, 32_768),
    "qwen2.5-72b": (8192, 29_568, 80, 64, 8, 128, 152_064, 32_768),
}
_QWEN3: _Sizes = {
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128, 151_936, 40_960),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, 128, 151_936, 40_960),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 128, 151_936, 40_960),
    "qwen3-8b": (4096, 12_288, 36, 32, 8, 128, 151_936, 40_960),
    "qwen3-14b": (5120, 17_408, 40, 40, 8, 128, 151_936, 40_960),
    "qwen3-32b": (5120, 25_600, 64, 64, 8, 128, 151_936, 40_960),
}
_QWEN3_MOE: _Sizes = {
    "qwen3-30b-a3b": (2048, 6144, 48, 32, 4, 128, 151_936, 262_144, 128, 8, 768),
    "qwen3-coder-30b-a3b": (2048, 5472, 48, 32, 4, 128, 151_936, 262_144, 128, 8, 768),
    "qwen3-235b-a22b": (4096, 12_288, 94, 64, 4, 128, 151_936, 262_144, 128, 8, 1536),
    "qwen3-coder-480b-a35b": (6144, 8192, 62, 96, 8, 128, 151_936, 262_144, 160, 8, 2560),
}
_FAMILIES = {"llama": _LLAMA, "qwen2": _QWEN2, "qwen3": _QWEN3, "qwen3_moe": _QWEN3_MOE}

# These keep no LM head of their own.
_TIED = {"llama-3.2-1b", "llama-3.2-3b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"}
_TIED |= {"smollm2-135m", "smollm2-360m", "smollm2-1.7b"}

KNOWN = {name: family for family, models in _FAMILIES.items() for name in models}

_SUFFIX = re.compile(r"(-(instruct|chat|hf|base|it|thinking|2507|v\d+(\.\d+)?))+$")


def find_shape(model: str) -> ModelShape:
    """The shape of a config.json, a model directory, a GGUF file, or a model known by name.

    Variants of a known model ("org/Name-Instruct-2507") have its shape. Raises ModelError for a
    file that is damaged or not supported, and ConfigError, with what is known, for other names.
    """
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix in (".json", ".gguf") and path.exists():
        from twostroke.checkpoint import open_checkpoint, read_json

        if path.suffix == ".gguf":
            return open_checkpoint(path).shape
        return from_hf_config(read_json(path), source=str(path))
    plain = _SUFFIX.sub("", model.rstrip("/").rpartition("/")[2].lower()).removeprefix("meta-")
    if plain in KNOWN:
        return _known(plain)
    close = get_close_matches(plain, KNOWN, 1)
    meant = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(
        f"the shape of {model!r} is not known",
        hint=f"{meant}name a config.json or a GGUF file, or one of {', '.join(sorted(KNOWN))}",
    )


def _known(name: str) -> ModelShape:
    family = KNOWN[name]
    hidden, width, layers, heads, kv_heads, head_dim, vocab, positions, *experts = _FAMILIES[
        family
    ][name]
    num_experts, per_token, expert_width = experts or (0, 0, 0)
    return ModelShape(
        architecture=family,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        tie_word_embeddings=name in _TIED,
        attention_bias=family == "qwen2",
        qk_norm=family.startswith("qwen3"),
        num_experts=num_experts,
        num_experts_per_token=per_token,
        moe_intermediate_size=expert_width,
    )
