"""Settings of the device that evaluates arrays."""

from typing import Literal

from parallm.settings import settings


@settings
class DeviceSettings:
    blas: Literal["auto", "mkl", "openblas", "reference"] = "auto"
    """Linux CPUs only: the library behind matrix products. `auto` takes the first that is found, in this order."""
    blas_strict: bool = True
    """MKL only: its reproducible mode, in which a row's product does not depend on the other rows. Log-probs of engine
    and learner are then equal bit for bit for most architectures (tests/engine/test_parity.py)."""
