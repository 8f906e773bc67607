"""Settings of the device that evaluates arrays."""

from typing import Literal

from pydantic import Field

from parallm.settings import settings


@settings
class BlasSettings:
    """Settings of every command."""

    blas: Literal["auto", "mkl", "openblas", "reference"] = "auto"
    """Linux CPUs only: the library behind matrix products. `auto` takes the first that is found, in this order."""
    blas_strict: bool = True
    """MKL only: its reproducible mode, in which a row's product does not depend on the other rows. Log-probs of engine
    and learner are then equal bit for bit for most architectures (tests/engine/test_parity.py)."""


@settings
class ServingDeviceSettings(BlasSettings):
    """Settings of a process that serves."""

    serving_share: float = Field(default=0.7, ge=0, le=1)
    """Share of the engine's device seconds for serving traffic, while rollouts or scoring have work too."""
    serving_latency_target: float | None = Field(default=None, ge=1)
    """In place of shares while serving traffic is live: the mean and the median time between tokens of serving stay
    within this factor of what they are without other work, and other work gets the rest. 1.2 gives it a sixth."""


@settings
class DeviceSettings(ServingDeviceSettings):
    """Settings of a process that serves and trains."""

    engine_share: float = Field(default=0.5, ge=0, le=1)
    """Share of device seconds for the engine, while serving traffic is live and an update is under way."""
