"""Finds a model and says what it is, before any weight is read and without torch.

A model is named by a Hugging Face id, a local directory (config.json and safetensors), a .gguf
file, or nothing at all: then it is the embedded default. The outcome is a `Checkpoint`: where it
lies, its shape, its chat template and the name the API gives it.
"""

import dataclasses
import errno
import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from twostroke.config import EngineConfig
from twostroke.errors import ModelError, UnsupportedModelError
from twostroke.gguf_header import GgufFile, read_gguf, shape_of
from twostroke.shape import ModelShape, from_hf_config, token_ids

DEFAULT_MODEL_NAME = "smollm2-135m-instruct"

# stage, done, total
Progress = Callable[[str, int, int], None]

_HASHED_BYTES = 1 << 20  # at either end of a file of weights

# Far above any real one; a JSON file larger than this is not a configuration.
MAX_JSON_BYTES = 64 << 20

_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)


@dataclass(frozen=True)
class Checkpoint:
    """A model that was found and understood.

    `path` is a directory, or a .gguf file. `name` is what the user called it. Format "dummy"
    means random weights: only the shape was read.
    """

    name: str
    path: Path
    format: Literal["safetensors", "gguf", "dummy"]
    shape: ModelShape
    chat_template: str | None
    served_name: str


def resolve(config: EngineConfig, progress: Progress | None = None) -> Checkpoint:
    """Find the model that the settings name; downloads it unless `config.offline`.

    Raises ModelError saying what was looked for and where.
    """
    from twostroke import download

    name = config.model
    served_name = config.served_model_name
    if name in ("", "default"):
        path = download.fetch_default_model(offline=config.offline, progress=progress)
        served_name = served_name or DEFAULT_MODEL_NAME
    elif (local := _local_path(name)) is not None:
        path = local
    elif _looks_like_path(name):
        raise ModelError(f"model {name!r} does not exist: no such file or directory")
    elif _HUB_ID.fullmatch(name):
        path = download.fetch_hub_model(
            name, config.revision, offline=config.offline, progress=progress
        )
        served_name = served_name or name
    else:
        raise ModelError(
            f"model {name!r} is neither a directory, a .gguf file nor a Hugging Face id",
            hint="an id has the form owner/name",
        )
    checkpoint = open_checkpoint(path, name=name, load_format=config.load_format)
    return dataclasses.replace(checkpoint, served_name=served_name or checkpoint.served_name)


def with_local_draft(config: EngineConfig, progress: Progress | None = None) -> EngineConfig:
    """The settings with `speculative_model` resolved to its path; downloads it like the model."""
    if not config.speculative_model:
        return config
    theirs = dataclasses.replace(config, model=config.speculative_model, revision="main")
    return dataclasses.replace(config, speculative_model=str(resolve(theirs, progress).path))


def _local_path(name: str) -> Path | None:
    """The existing file or directory of this name, if any."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except RuntimeError:  # ~somebody who has no home
        return None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return None
        raise ModelError(f"cannot read {name}: {error.strerror}") from None


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or name.endswith((".gguf", "/")) or name.count("/") > 1


def open_checkpoint(path: Path, *, name: str = "", load_format: str = "auto") -> Checkpoint:
    """Understand a local checkpoint: a directory, or a .gguf file. Reads no weights.

    With `load_format` "dummy" a directory needs no more than its config.json. Raises ModelError
    or UnsupportedModelError naming the file and key that is wrong.
    """
    path = path.expanduser()
    if not path.exists():
        raise ModelError(f"{path} does not exist")
    if path.is_dir() and not (path / "config.json").exists():
        path = _only_gguf(path)
    dummy = load_format == "dummy"
    if path.is_file():
        file = read_gguf(path)
        return Checkpoint(
            name=name or str(path),
            path=path,
            format="dummy" if dummy else "gguf",
            shape=shape_of(file),
            chat_template=_gguf_chat_template(file),
            served_name=path.stem,
        )
    shape = from_hf_config(read_json(path / "config.json"), source=str(path / "config.json"))
    if not dummy:
        find_weights(path)
    return Checkpoint(
        name=name or str(path),
        path=path,
        format="dummy" if dummy else "safetensors",
        shape=_with_generation_eos(path, shape),
        chat_template=_chat_template(path),
        served_name=path.resolve().name,
    )


def _only_gguf(directory: Path) -> Path:
    """The one .gguf file of a directory that has no config.json."""
    files = sorted(directory.glob("*.gguf"))
    if not files:
        raise ModelError(
            f"{directory} holds no model: neither config.json nor a .gguf file",
            hint="a model directory holds config.json, safetensors and tokenizer.json",
        )
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:5])
        raise ModelError(
            f"{directory} holds {len(files)} .gguf files: {names}",
            hint="name the one to serve by its path",
        )
    return files[0]


def find_weights(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: one, or the shards that its index names.

    Raises ModelError when there is none or a shard is missing, UnsupportedModelError when there
    are pickled weights only.
    """
    index = directory / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index}: weight_map is missing or empty")
        shards = []
        for name in sorted({str(name) for name in weight_map.values()}):
            if Path(name).name != name:  # only files beside the index
                raise ModelError(f"{index}: weight_map names {name!r}; it must be a file name")
            if not (directory / name).is_file():
                raise ModelError(
                    f"{directory}: shard {name}, named by its index, is missing",
                    hint="download the checkpoint again",
                )
            shards.append(directory / name)
        return shards
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    files = sorted(directory.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if files:
        raise ModelError(f"{directory} holds {len(files)} safetensors files but no {index.name}")
    pickled = [file for ending in ("*.bin", "*.pt", "*.pth") for file in directory.glob(ending)]
    if pickled:
        raise UnsupportedModelError(
            f"{directory} holds only pickled weights: {pickled[0].name}",
            hint="they can run code when read; use a checkpoint in safetensors",
        )
    raise ModelError(f"{directory} holds no weights: no model.safetensors")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError when it cannot be read or is something else."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path} is {path.stat().st_size:,} bytes; at most {MAX_JSON_BYTES:,}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also text that is not UTF-8
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}; it must be a JSON object")
    return content


def _with_generation_eos(directory: Path, shape: ModelShape) -> ModelShape:
    """Add the ids of generation_config.json: some chat models name their end of turn only there."""
    path = directory / "generation_config.json"
    if not path.exists():
        return shape
    extra = token_ids(
        read_json(path).get("eos_token_id"), f"{path}: eos_token_id", shape.vocab_size
    )
    return dataclasses.replace(
        shape, eos_token_ids=tuple(dict.fromkeys(shape.eos_token_ids + extra))
    )


def _chat_template(directory: Path) -> str | None:
    """From chat_template.jinja, else tokenizer_config.json: a text, or a list of named ones."""
    file = directory / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read {file}: {error}") from None
    path = directory / "tokenizer_config.json"
    if not path.exists():
        return None
    template = read_json(path).get("chat_template")
    if isinstance(template, list):
        named = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict) and isinstance(entry.get("name"), str)
        }
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{path}: chat_template is neither text nor a list of named templates")
    return template


def _gguf_chat_template(file: GgufFile) -> str | None:
    template = file.metadata.get("tokenizer.chat_template")
    return template if isinstance(template, str) and template else None


def fingerprint(checkpoint: Checkpoint, seed: int) -> str:
    """Equal for models with the same KV, as far as can be said without reading all weights.

    `seed` is that of dummy weights.
    """
    digest = hashlib.blake2b(repr(checkpoint.shape).encode(), digest_size=16)
    if checkpoint.format == "dummy":
        digest.update(f"dummy {seed}".encode())
        return digest.hexdigest()
    path = checkpoint.path
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            digest.update(size.to_bytes(8))
            for start in (0, max(0, size - _HASHED_BYTES)):
                stream.seek(start)
                digest.update(stream.read(_HASHED_BYTES))
    return digest.hexdigest()
