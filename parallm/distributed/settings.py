"""Settings of a run of several processes."""

from typing import Literal

from pydantic import Field

from parallm.settings import settings


@settings
class DistributedSettings:
    engine: Literal["off", "mlx"] = "off"
    """`mlx`: several processes train one policy, data parallel, over mx.distributed. Each serves, too."""
    workers: int | None = Field(default=None, ge=1)
    """Number of processes. Without a launcher such as mlx.launch this command starts them on this machine; null: one,
    or those that the launcher has started."""
    backend: Literal["auto", "ring", "nccl", "jaccl"] = "auto"
    """Library that sums gradients. `auto`: NCCL with MLX's CUDA build, else the launcher's, else TCP rings."""
    exact: bool = False
    """Sum gradients in an order that does not depend on the number of workers, whose versions are then equal bit for
    bit. Moves `slots` vectors where a plain sum moves two."""
    slots: int = Field(default=8, ge=1)
    """Number of partial sums with `exact`, the most workers that share an update."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Longest wait for another worker; then the process saves and ends with exit code 75."""


@settings
class DivisionSettings:
    """A base that is divided between devices, for serving."""

    tensor_parallel: int = Field(default=1, ge=1)
    """Number of devices that each layer is divided between, each with a process of its own on this machine, or started
    by a launcher such as mlx.launch."""
    backend: Literal["auto", "ring", "nccl", "jaccl"] = "auto"
    """Library that sums outputs of layers. `auto`: NCCL with MLX's CUDA build, else the launcher's, else TCP rings."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Longest wait for another process while they start."""

    @property
    def workers(self) -> DistributedSettings:
        """The processes as workers."""
        return DistributedSettings(
            engine="mlx",
            workers=self.tensor_parallel,
            backend=self.backend,
            timeout_seconds=self.timeout_seconds,
        )
