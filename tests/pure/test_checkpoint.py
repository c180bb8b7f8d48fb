"""Finding checkpoints: directories, files, ids, and what is said when there is none."""

import json
from pathlib import Path
from typing import Any

import pytest

from twostroke import download
from twostroke.checkpoint import DEFAULT_MODEL_NAME, find_weights, open_checkpoint, resolve
from twostroke.config import EngineConfig
from twostroke.errors import ModelError, UnsupportedModelError
from twostroke.testing.tiny_model import CHAT_TEMPLATE, write_tiny_checkpoint


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "tiny-llama", num_hidden_layers=1)


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


# ---------------------------------------------------------------- directories


def test_directory(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    assert checkpoint.format == "safetensors"
    assert checkpoint.path == tiny
    assert checkpoint.served_name == "tiny-llama"
    assert checkpoint.chat_template == CHAT_TEMPLATE
    assert checkpoint.shape.num_layers == 1


def test_dummy_weights_need_only_the_config(tiny: Path) -> None:
    for path in tiny.iterdir():
        if path.name != "config.json":
            path.unlink()
    checkpoint = open_checkpoint(tiny, load_format="dummy")
    assert checkpoint.format == "dummy"
    assert checkpoint.chat_template is None
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        open_checkpoint(tiny)


def test_pickled_weights_are_refused_by_name(tiny: Path) -> None:
    (tiny / "model.safetensors").rename(tiny / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin.*safetensors"):
        open_checkpoint(tiny)


def test_generation_config_adds_end_tokens(tiny: Path) -> None:
    (tiny / "generation_config.json").write_text('{"eos_token_id": [257, 258]}')
    assert open_checkpoint(tiny).shape.eos_token_ids == (258, 257)


def test_end_tokens_outside_the_vocabulary_are_an_error(tiny: Path) -> None:
    (tiny / "generation_config.json").write_text('{"eos_token_id": 300}')
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id is 300.*259"):
        open_checkpoint(tiny)


def test_chat_template_file_wins(tiny: Path) -> None:
    (tiny / "chat_template.jinja").write_text("from the file ✓", encoding="utf-8")
    assert open_checkpoint(tiny).chat_template == "from the file ✓"


def test_chat_template_list_gives_the_default_one(tiny: Path) -> None:
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    edit_json(tiny / "tokenizer_config.json", chat_template=named)
    assert open_checkpoint(tiny).chat_template == "b"
    edit_json(tiny / "tokenizer_config.json", chat_template=[{"name": ["x"]}, 3])
    assert open_checkpoint(tiny).chat_template is None


@pytest.mark.parametrize("template", [3, {"default": "x"}, [{"name": "default", "template": 1}]])
def test_bad_chat_template(tiny: Path, template: Any) -> None:
    edit_json(tiny / "tokenizer_config.json", chat_template=template)
    with pytest.raises(ModelError, match="chat_template"):
        open_checkpoint(tiny)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 200_000, "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b'{"hidden_size": ' + b"9" * 10_000 + b"}", "not valid JSON"),
    ],
)
def test_damaged_config(tiny: Path, content: bytes, named: str) -> None:
    (tiny / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=rf"config\.json.*{named}"):
        open_checkpoint(tiny)


def test_missing_and_empty_places(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"neither config\.json nor a \.gguf file"):
        open_checkpoint(tmp_path)


def test_a_directory_with_several_gguf_files_asks_which(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=r"a\.gguf, b\.gguf.*by its path"):
        open_checkpoint(tmp_path)


# ---------------------------------------------------------------- weight files


def test_shards(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "m", num_shards=3)
    assert [file.name for file in find_weights(path)] == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"shard model-00002-of-00003\.safetensors.* is missing"):
        find_weights(path)


@pytest.mark.parametrize("weight_map", [None, {}, [], {"a": "../../etc/passwd"}, {"a": 3}])
def test_bad_index(tmp_path: Path, weight_map: Any) -> None:
    path = write_tiny_checkpoint(tmp_path / "m", num_shards=2)
    edit_json(path / "model.safetensors.index.json", weight_map=weight_map)
    with pytest.raises(ModelError):
        find_weights(path)


def test_one_file_of_another_name_is_fine_two_are_not(tiny: Path) -> None:
    (tiny / "model.safetensors").rename(tiny / "weights.safetensors")
    assert find_weights(tiny) == [tiny / "weights.safetensors"]
    (tiny / "more.safetensors").touch()
    with pytest.raises(ModelError, match="2 safetensors files but no"):
        find_weights(tiny)


# ---------------------------------------------------------------- resolving names


def test_resolve_a_directory(tiny: Path) -> None:
    assert resolve(EngineConfig(model=str(tiny))).served_name == "tiny-llama"
    named = resolve(EngineConfig(model=str(tiny), served_model_name="mine"))
    assert named.served_name == "mine"
    assert named.name == str(tiny)


@pytest.mark.parametrize(
    "name", ["/no/such/place", "./x", "~/x", "x.gguf", "a/b/c", "models/", "~nobody-here/x"]
)
def test_a_path_that_does_not_exist(name: str) -> None:
    with pytest.raises(ModelError, match="no such file or directory"):
        resolve(EngineConfig(model=name))


@pytest.mark.parametrize(
    "name", ["llama", "owner/na me", "owner/ünï", "a" * 97 + "/b", "a" * 5000, "a\0b"]
)
def test_neither_a_path_nor_an_id(name: str) -> None:
    with pytest.raises(ModelError, match=r"neither a directory.*owner/name"):
        resolve(EngineConfig(model=name))


def test_a_hub_id_is_fetched(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(repo_id: str, revision: str, *, offline: bool, progress: object) -> Path:
        asked.append((repo_id, revision, offline))
        return tiny

    monkeypatch.setattr(download, "fetch_hub_model", fetch)
    checkpoint = resolve(EngineConfig(model="Owner/Model-1.5", revision="v2", offline=True))
    assert asked == [("Owner/Model-1.5", "v2", True)]
    assert checkpoint.served_name == "Owner/Model-1.5"
    assert checkpoint.path == tiny


@pytest.mark.parametrize("name", ["", "default"])
def test_the_default_model(name: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "fetch_default_model", lambda **options: tiny)
    assert resolve(EngineConfig(model=name)).served_name == DEFAULT_MODEL_NAME
