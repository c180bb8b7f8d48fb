import importlib
import subprocess
import sys
import threading

import pytest

from twostroke.proc.deferred import defer


@pytest.fixture
def imports(tmp_path, monkeypatch):
    """Writes modules that can be imported, and forgets them after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = set(sys.modules)

    def write(texts: dict[str, str]) -> None:
        for path, text in texts.items():
            file = tmp_path / f"{path}.py"
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        importlib.invalidate_caches()

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_code_runs_when_a_name_is_asked_for_and_only_once(imports, capsys):
    imports({"late_one": "print('runs')\nvalue = 3\n"})
    defer(["late_one"])
    module = importlib.import_module("late_one")
    assert not hasattr(module, "__wrapped__")  # inspect asks every module for such
    assert capsys.readouterr().out == ""
    assert module.value == 3
    assert module.value == 3
    assert capsys.readouterr().out == "runs\n"
    with pytest.raises(AttributeError, match="module 'late_one' has no attribute 'other'"):
        _ = module.other


def test_from_imports_load_at_once(imports):
    imports({"late_two": "value = 3\n"})
    defer(["late_two"])
    scope: dict[str, int] = {}
    exec("from late_two import value", scope)
    assert scope["value"] == 3


def test_a_package_keeps_its_modules_and_its_own_lazy_names(imports):
    imports(
        {
            "late_package/__init__": "def __getattr__(name):\n    return f'lazy {name}'\n",
            "late_package/inner": "from late_package import missing\n",
        }
    )
    defer(["late_package"])
    assert importlib.import_module("late_package.inner").missing == "lazy missing"


def test_modules_that_need_each_other_see_what_is_there_so_far(imports):
    imports(
        {
            "late_three": "first = 1\nimport late_four\nsecond = late_four.seen\n",
            "late_four": "import late_three as it\nseen = hasattr(it, 'second') or not it.first\n",
        }
    )
    defer(["late_three"])
    assert importlib.import_module("late_three").second is False


def test_other_threads_wait_until_the_code_has_run(imports):
    imports({"late_five": "ready.set()\ngo.wait(10)\nvalue = 3\n"})
    defer(["late_five"])
    module = importlib.import_module("late_five")
    module.ready, module.go = ready, go = threading.Event(), threading.Event()
    seen: list[int] = []
    threads = [threading.Thread(target=lambda: seen.append(module.value)) for _ in range(2)]
    threads[0].start()
    assert ready.wait(10)
    threads[1].start()
    go.set()
    for thread in threads:
        thread.join(10)
    assert seen == [3, 3]


def test_what_does_not_exist_is_missing_as_ever(imports):
    defer(["no_such_module_at_all"])
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_at_all")


def test_a_torch_of_another_version_is_left_alone(tmp_path):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("from torch import optim\n")
    (package / "version.py").write_text("__version__ = '9.9.0'\n")
    (package / "optim.py").write_text("value = 3\n")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from twostroke.proc.deferred import import_torch\n"
        "import_torch()\n"
        "print(vars(sys.modules['torch.optim'])['value'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("3\n", "")
