"""Reading recordings, and comparing traces with them."""

import json
import lzma
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.replay.drive import Replay
from tests.replay.simulation import Json


def first_difference(ours: Json, recorded: Json) -> str | None:
    """Where two traces differ first, in words, or None."""
    for mine, theirs in zip(ours["steps"], recorded["steps"], strict=False):
        for key in sorted(mine.keys() | theirs.keys()):
            if not _same(key, mine.get(key), theirs.get(key)):
                return (
                    f"step {theirs['step']}, {key}: ours {mine.get(key)}, "
                    f"recorded {theirs.get(key)}"
                )
    for key in ("num_steps", "stuck", "finish_order", "outputs", "summary", "config"):
        if ours[key] != recorded[key]:
            return f"{key}: ours {ours[key]}, recorded {recorded[key]}"
    if len(ours["steps"]) != len(recorded["steps"]):
        return f"{len(ours['steps'])} steps, recorded {len(recorded['steps'])}"
    return None


def _same(key: str, mine: Any, theirs: Any) -> bool:
    if key == "sched" and mine and theirs and list(mine) != list(theirs):
        return False  # order matters
    return bool(mine == theirs)


def load_directory(path: Path) -> Iterator[tuple[str, Json]]:
    """Name and content of every .json or .json.xz file, or of those in a .tar.xz archive."""
    if path.is_file():
        with tarfile.open(path) as archive:
            for member in sorted(archive.getnames()):
                file = archive.extractfile(member)
                if file is not None and member.endswith(".json"):
                    yield Path(member).stem, json.load(file)
        return
    for file_path in sorted(path.glob("*.json*")):
        data = file_path.read_bytes()
        name = file_path.name.removesuffix(".xz").removesuffix(".json")
        yield name, json.loads(lzma.decompress(data) if file_path.suffix == ".xz" else data)


def main(workloads: Path, traces: Path) -> int:
    recorded = dict(load_directory(traces))
    equal, different = 0, []
    for name, workload in load_directory(workloads):
        if name not in recorded:
            different.append(f"{name}: no trace")
            continue
        difference = first_difference(Replay(workload).run(), recorded[name])
        if difference is None:
            equal += 1
        else:
            different.append(f"{name}: {difference}")
    print(f"{equal} of {equal + len(different)} equal")
    for line in different:
        print(line)
    return 1 if different else 0
