"""A profile: what was measured of one model on one device, and the file that keeps it.

`twostroke profile` writes it; routing by cost, the planner and the twin read it.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from twostroke.config import EngineConfig, cache_dir
from twostroke.cost import HostCost, LinearStepCost, LinkCost, check_numbers
from twostroke.cost_fit import FitError
from twostroke.errors import ConfigError

PROFILE_VERSION = 3


@dataclass(frozen=True, kw_only=True)
class DevicePeaks:
    """What a device reached in plain products and copies: a row of hardware, measured."""

    bf16_flops: float
    memory_bytes_per_s: float
    memory_bytes: int

    def __post_init__(self) -> None:
        check_numbers("device peak", *(self.bf16_flops, self.memory_bytes_per_s), least=1.0)
        check_numbers("device peak", self.memory_bytes, least=1.0)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What was measured of one model on one device; a file of it is JSON.

    `settings` are those that the figures hold for, by name: tensor_parallel_size, dtype, threads.
    `held_out` is the error on a load that the fit has not seen.
    """

    model: str
    device: str
    step: LinearStepCost
    step_error: FitError
    held_out: FitError | None = None
    host: HostCost = HostCost()
    link: LinkCost | None = None
    link_error: FitError | None = None
    peaks: DevicePeaks | None = None
    settings: dict[str, str] = field(default_factory=dict)
    version: int = PROFILE_VERSION

    def save(self, path: Path) -> None:
        """Write it. Raises ConfigError when that fails."""
        text = msgspec.json.format(msgspec.json.encode(self), indent=1)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text + b"\n")
        except OSError as error:
            raise ConfigError(f"cannot write the profile to {path}: {error.strerror}") from None

    @classmethod
    def load(cls, path: Path) -> "Profile":
        """Read and check a profile. Raises ConfigError with what is wrong."""
        hint = "measure anew: twostroke profile"
        try:
            profile = msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise ConfigError(
                f"cannot read the profile {path}: {error.strerror}", hint=hint
            ) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not a profile: {error}", hint=hint) from None
        if profile.version != PROFILE_VERSION:
            raise ConfigError(
                f"the profile {path} has version {profile.version}; this is {PROFILE_VERSION}",
                hint=hint,
            )
        return profile


def profiled_step_cost(config: EngineConfig) -> LinearStepCost | None:
    """What --profile says of steps, where it decides anything. ConfigError when it cannot be read.

    A step cost holds for one tensor-parallel size.
    """
    if not config.profile or config.pd_policy != "cost":
        return None
    profile = Profile.load(Path(config.profile))
    size = profile.settings.get("tensor_parallel_size", "1")
    if size != str(config.tensor_parallel_size):
        raise ConfigError(
            f"--profile {config.profile} was measured with --tensor-parallel-size {size}, and this "
            f"is {config.tensor_parallel_size}",
            hint="measure with the flags that are served with: twostroke profile",
        )
    return profile.step


def default_path(model: str, device: str) -> Path:
    """Where the profile of a model on a device is kept unless a file is named."""
    name = "--".join(re.sub(r"[^A-Za-z0-9._-]+", "-", part).strip("-.") for part in (model, device))
    return cache_dir() / "profiles" / f"{name}.json"
