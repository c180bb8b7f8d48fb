"""GPUs as numbers: what their makers say, and what share of it kernels were measured to reach.

Peaks are dense (no sparsity), one way for links. The shares are fitted to the kernel tables of
aiconfigurator-core 0.12 (vLLM backend; Llama-3.1-8B and 70B, Qwen3-0.6B, 32B, 30B-A3B and
235B-A22B at the tensor-parallel sizes that have tables, 328 to 574 steps a GPU), whose steps they
then give within 3 to 6 % in the median. `benchmarks/roofline_vs_measured.py` prints how far off
they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from twostroke.cost_profile import Profile
from twostroke.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device and its links. Rates are per second and device, shares are of those rates."""

    name: str
    bf16_flops: float
    fp8_flops: float | None = None  # None: computes fp8 weights in bf16
    memory_bytes: int
    memory_bytes_per_s: float
    peer_bytes_per_s: float  # between devices of a node: NVLink, or PCIe where there is none
    pcie_bytes_per_s: float
    nic_bytes_per_s: float | None = None  # None: no network card of its own
    devices_per_node: int = 8

    memory_share: float  # of memory_bytes_per_s, when reading weights and KV
    gemm_share: float  # of the flops, in large dense products
    attention_share: float  # of the flops, in prefill attention
    expert_memory_share: float  # reading experts
    expert_gemm_share: float  # grouped products
    layer_s: float  # a layer's launches and its kernels' ends, when there is next to no work
    reduce_s: float  # an all-reduce of nothing
    reduce_share: float  # of peer_bytes_per_s, in all-reduce (a ring's bytes)

    source: str


_AIC = "AIC systems/*.yaml; shares fitted to its kernel tables"
_RECALLED = "peaks from the data sheet, from memory; shares taken from the nearest relative"

_ROWS = (
    Hardware(
        name="A100",
        bf16_flops=312e12,
        memory_bytes=80 * GIB,
        memory_bytes_per_s=2.039e12,
        peer_bytes_per_s=300e9,
        pcie_bytes_per_s=32e9,
        nic_bytes_per_s=25e9,
        memory_share=0.76,
        gemm_share=0.91,
        attention_share=0.58,
        expert_memory_share=0.83,
        expert_gemm_share=0.50,
        layer_s=56e-6,
        reduce_s=10e-6,
        reduce_share=0.76,
        source=_AIC,
    ),
    Hardware(
        name="H100",
        bf16_flops=989e12,
        fp8_flops=1978e12,
        memory_bytes=80 * GIB,
        memory_bytes_per_s=3.35e12,
        peer_bytes_per_s=450e9,
        pcie_bytes_per_s=64e9,
        nic_bytes_per_s=50e9,
        memory_share=0.94,
        gemm_share=0.87,
        attention_share=0.69,
        expert_memory_share=0.83,
        expert_gemm_share=0.65,
        layer_s=45e-6,
        reduce_s=7.4e-6,
        reduce_share=0.82,
        source=_AIC,
    ),
    Hardware(
        name="H200",
        bf16_flops=989e12,
        fp8_flops=1978e12,
        memory_bytes=141 * GIB,
        memory_bytes_per_s=4.8e12,
        peer_bytes_per_s=450e9,
        pcie_bytes_per_s=64e9,
        nic_bytes_per_s=50e9,
        memory_share=0.94,
        gemm_share=0.84,
        attention_share=0.68,
        expert_memory_share=0.79,
        expert_gemm_share=0.48,
        layer_s=49e-6,
        reduce_s=6.6e-6,
        reduce_share=0.76,
        source=_AIC,
    ),
    Hardware(
        name="H20",
        bf16_flops=148e12,
        fp8_flops=296e12,
        memory_bytes=96 * GIB,
        memory_bytes_per_s=4.0e12,
        peer_bytes_per_s=450e9,
        pcie_bytes_per_s=64e9,
        nic_bytes_per_s=50e9,
        memory_share=0.94,
        gemm_share=0.87,
        attention_share=0.69,
        expert_memory_share=0.83,
        expert_gemm_share=0.65,
        layer_s=45e-6,
        reduce_s=7.4e-6,
        reduce_share=0.82,
        source=_RECALLED + " (H100)",
    ),
    Hardware(
        name="B200",
        bf16_flops=2250e12,
        fp8_flops=4500e12,
        memory_bytes=180 * GIB,
        memory_bytes_per_s=7.7e12,
        peer_bytes_per_s=900e9,
        pcie_bytes_per_s=128e9,
        nic_bytes_per_s=100e9,
        memory_share=0.93,
        gemm_share=0.79,
        attention_share=0.55,
        expert_memory_share=0.70,
        expert_gemm_share=0.56,
        layer_s=36e-6,
        reduce_s=11.6e-6,
        reduce_share=0.37,
        source=_AIC,
    ),
    Hardware(
        name="L40S",
        bf16_flops=362e12,
        fp8_flops=733e12,
        memory_bytes=46_068 << 20,
        memory_bytes_per_s=0.864e12,
        peer_bytes_per_s=32e9,
        pcie_bytes_per_s=32e9,
        nic_bytes_per_s=50e9,
        memory_share=0.80,
        gemm_share=0.76,
        attention_share=0.60,
        expert_memory_share=0.90,
        expert_gemm_share=1.0,
        layer_s=7.3e-6,
        reduce_s=2.7e-6,
        reduce_share=0.60,
        source=_AIC + " (those of TP4 and TP8 left out: prefill slower than on one GPU)",
    ),
    Hardware(
        name="RTX PRO 6000",
        bf16_flops=468e12,
        fp8_flops=936e12,
        memory_bytes=97_887 << 20,
        memory_bytes_per_s=1.792e12,
        peer_bytes_per_s=64e9,
        pcie_bytes_per_s=64e9,
        nic_bytes_per_s=50e9,
        memory_share=0.87,
        gemm_share=1.0,
        attention_share=0.69,
        expert_memory_share=0.88,
        expert_gemm_share=0.64,
        layer_s=23e-6,
        reduce_s=27e-6,
        reduce_share=0.40,
        source=_AIC,
    ),
    Hardware(
        name="RTX 4090",
        bf16_flops=165e12,
        fp8_flops=330e12,
        memory_bytes=24 * GIB,
        memory_bytes_per_s=1.01e12,
        peer_bytes_per_s=32e9,
        pcie_bytes_per_s=32e9,
        memory_share=0.98,
        gemm_share=1.0,
        attention_share=0.70,
        expert_memory_share=0.92,
        expert_gemm_share=1.0,
        layer_s=7.3e-6,
        reduce_s=2.7e-6,
        reduce_share=0.60,
        source="peaks from memory; shares so that a run of vLLM with Llama-3.1-8B comes out",
    ),
)

GPUS: Mapping[str, Hardware] = {row.name: row for row in _ROWS}

# Other names that people and tools give them.
_ALIASES = {"a100sxm": "A100", "h100sxm": "H100", "h200sxm": "H200", "b200sxm": "B200"}
_ALIASES |= {"a10080gb": "A100", "h10080gb": "H100", "rtxpro6000server": "RTX PRO 6000"}
_ALIASES |= {"rtxpro6000blackwell": "RTX PRO 6000"}


def find_gpu(name: str) -> Hardware:
    """The row of a GPU, however its name is spelled. ConfigError, naming what there is, if none."""
    known = {_plain(row): row for row in GPUS} | _ALIASES
    plain = _plain(name).removeprefix("nvidia")
    if plain in known:
        return GPUS[known[plain]]
    close = get_close_matches(plain, known, 1)
    meant = f"did you mean {known[close[0]]}? " if close else ""
    raise ConfigError(f"--gpu is {name!r}", hint=f"{meant}known: {', '.join(GPUS)}")


def of_profile(profile: Profile) -> Hardware:
    """The row of the device that a profile was measured on, for other models on it.

    Peaks are what plain products and copies reached, so kernels are given all of them but in
    attention, which was not measured: half. Links are taken as fast as memory. Raises ConfigError
    for a profile without peaks.
    """
    peaks = profile.peaks
    if peaks is None:
        raise ConfigError(
            f"the profile of {profile.device} has no peaks of the device",
            hint="measure it here: twostroke profile",
        )
    return Hardware(
        name=profile.device,
        bf16_flops=peaks.bf16_flops,
        memory_bytes=peaks.memory_bytes,
        memory_bytes_per_s=peaks.memory_bytes_per_s,
        peer_bytes_per_s=peaks.memory_bytes_per_s,
        pcie_bytes_per_s=peaks.memory_bytes_per_s,
        devices_per_node=1,
        memory_share=1.0,
        gemm_share=1.0,
        attention_share=0.5,
        expert_memory_share=1.0,
        expert_gemm_share=1.0,
        layer_s=30e-6,
        reduce_s=30e-6,
        reduce_share=1.0,
        source="measured here by twostroke profile",
    )


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
