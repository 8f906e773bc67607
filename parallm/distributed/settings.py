"""Settings of a run of several processes."""

from typing import Literal

from pydantic import Field

from parallm.settings import settings


@settings
class FrontSettings:
    enabled: bool = True
    """Answer on `server.port` for all workers, which then listen on ports of their own."""
    hold_seconds: float = Field(default=60.0, ge=0)
    """Seconds that a request may wait for a worker while none is there; then it gets 503."""


@settings
class DistributedSettings:
    engine: Literal["off", "mlx", "ray"] = "off"
    """`mlx`: several processes train one policy, data parallel, over mx.distributed. Each serves, too. `ray`: the same
    processes, started on the nodes of a Ray cluster."""
    workers: int | None = Field(default=None, ge=1)
    """Number of processes. Without a launcher such as mlx.launch this command starts them on this machine; null: one,
    or those that the launcher has started."""
    min_workers: int | None = Field(default=None, ge=1)
    """Number of workers to train with while Ray has no nodes for more; null: `workers`."""
    restarts: int = Field(default=0, ge=0)
    """Number of times that the command starts all workers again after one was lost, to go on from the last finished
    step."""
    rejoin_seconds: float = Field(default=600.0, ge=0)
    """Longest time until a node that joins Ray late is taken in; an evaluation before takes it in, too."""
    address: str | None = None
    """Ray cluster: `auto` (the one that this machine has joined) or HOST:PORT; null: one of this machine alone."""
    backend: Literal["auto", "ring", "nccl", "jaccl"] = "auto"
    """Library that sums gradients. `auto`: NCCL with MLX's CUDA build, else the launcher's, else TCP rings."""
    exact: bool = False
    """Sum gradients in an order that does not depend on the number of workers, whose versions are then equal bit for
    bit. Moves `slots` vectors where a plain sum moves two."""
    slots: int = Field(default=8, ge=1)
    """Number of partial sums with `exact`, the most workers that share an update."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Longest wait for another worker; then the process saves and ends with exit code 75. With Ray also for nodes."""
    front: FrontSettings = FrontSettings()
    """One address before all workers, where this command starts them."""


@settings
class ServingSettings:
    """Several processes that serve one model."""

    workers: int = Field(default=1, ge=1)
    """Number of servers of the model on this machine, each with a GPU or a share of the cores, behind one address."""
    front: FrontSettings = FrontSettings()
    """One address before all servers."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Number of devices that each layer is divided between, each with a process of its own on this machine, or started
    by a launcher such as mlx.launch."""
    backend: Literal["auto", "ring", "nccl", "jaccl"] = "auto"
    """Library that sums outputs of layers. `auto`: NCCL with MLX's CUDA build, else the launcher's, else TCP rings."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Longest wait for another process, while they start or in a step; then all end with exit code 75."""

    @property
    def ranks(self) -> DistributedSettings:
        """The processes between which a base is divided, as workers."""
        return DistributedSettings(
            engine="mlx",
            workers=self.tensor_parallel,
            backend=self.backend,
            timeout_seconds=self.timeout_seconds,
        )
