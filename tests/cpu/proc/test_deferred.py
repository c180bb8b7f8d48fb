"""What is put off of torch, with the torch that is installed."""

import subprocess
import sys
from importlib.metadata import version

import pytest

from twostroke.proc.deferred import TORCH_VERSION

SCRIPT = """
import sys
from twostroke.proc.deferred import TORCH_MODULES, import_torch
import_torch()
import torch
late = [n for n in TORCH_MODULES if "__getattr__" in vars(sys.modules.get(n, torch))]
print(len(late) == len(TORCH_MODULES) or sorted(set(TORCH_MODULES) - set(late)))
print(torch.randint(1000, (3,), generator=torch.Generator().manual_seed(0)).tolist())
print(torch.optim.Adam.__name__, torch.ao.quantization.__name__, torch.export.export.__name__)
torch._meta_registrations.meta_index_Tensor
print(torch.randint(1000, (3,), generator=torch.Generator().manual_seed(0)).tolist())
try:
    import scipy.linalg
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.mark.skipif(
    not version("torch").startswith(TORCH_VERSION), reason="another torch is imported whole"
)
def test_torch_works_without_what_is_put_off_and_finds_it_when_asked():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120
    )
    assert done.stderr == ""
    complete, before, names, after, hidden = done.stdout.splitlines()
    assert complete == "True"
    assert names == "Adam torch.ao.quantization export"
    assert before == after == "[44, 239, 933]"
    assert hidden in ("scipy.linalg is kept from being imported", "No module named 'scipy'")
