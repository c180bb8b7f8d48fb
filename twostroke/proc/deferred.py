"""Puts modules off that others import and that we never use: a start waits for every one of them.

`import torch` imports its exporter, optimizers, profilers and quantizers too: a quarter of its
1,200 modules, a third of its time and 40 MB. A module that is put off stands in `sys.modules` as
always, empty; the first who asks it for a name has it loaded then. So a wrong guess costs time and
nothing else. What is lost is torch.compile, whose imports need the order that they are made in.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

# `_meta_registrations` tell torch.compile the shapes of operators' results, by way of a thousand
# decompositions; the others are no less far from here. With another version than the one that this
# order of imports was tried with nothing is put off.
TORCH_VERSION = "2.14."
TORCH_MODULES = (
    "torch._meta_registrations",
    "torch.ao",
    "torch.cuda.graph_annotations",
    "torch.distributed._meta_registrations",
    "torch.distributions",
    "torch.export",
    "torch.masked",
    "torch.mtia",
    "torch.nn.intrinsic",
    "torch.nn.qat",
    "torch.nn.quantizable",
    "torch.nn.quantized",
    "torch.optim",
    "torch.profiler",
    "torch.quantization",
    "torch.xpu",
)


# numba looks whether scipy is there for the matrix products of a kernel. Ours have none.
HIDDEN_MODULE = "scipy.linalg"


def import_torch() -> None:
    """`import torch`, without what is not needed of it. Call it before anybody else imports it.

    What numba, whose turn is next, imports needlessly is not there for it.

    An installation that cannot be imported is left to those who need it: they say so.
    """
    sys.meta_path.insert(0, _Absent())
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return
    with contextlib.suppress(OSError, ImportError):
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
        if f"__version__ = '{TORCH_VERSION}" not in text:
            importlib.import_module("torch")
            return
        defer(TORCH_MODULES)
        torch = importlib.import_module("torch")
        # `_meta_registrations` import what does this, without which there are no generators.
        meta = importlib.import_module("torch._custom_class_base").CustomClassBaseMeta
        torch._C._set_generator_metaclass(meta)


def defer(names: Iterable[str]) -> None:
    """Load these modules when they are first asked for something, not when they are imported."""
    sys.meta_path.insert(0, _Finder(frozenset(names)))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Later(spec.loader)
        return spec


class _Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, *_: object) -> None:
        if name == HIDDEN_MODULE:
            raise ModuleNotFoundError(f"{name} is kept from being imported", name=name)


class _Later(importlib.abc.Loader):
    """Runs a module's code when somebody misses a name in it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._lock = threading.RLock()  # others wait until the code has run; the code itself cannot
        self._begun = False

    def exec_module(self, module: ModuleType) -> None:
        def miss(name: str) -> Any:
            if name.startswith("__"):  # inspect asks all modules for such
                raise AttributeError(name)
            with self._lock:
                if not self._begun:
                    self._begun = True
                    self._loader.exec_module(module)
            if name in module.__dict__:
                return module.__dict__[name]
            own = module.__dict__["__getattr__"]  # the code may have brought one
            if own is not miss:
                return own(name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__dict__["__getattr__"] = miss
