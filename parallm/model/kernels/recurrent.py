"""Whether the kernels of recurrent layers are used: only where they have agreed with MLX's operations.

`patches/kernel_trial.py` compares them once in a process.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from parallm.model.kernels import cuda


class _Use:
    is_off = False


_use = _Use()


def has_kernels() -> bool:
    """Whether these kernels run on this device, and have not been turned off."""
    return not _use.is_off and cuda.has_kernels()


def turn_off() -> None:
    """Compute recurrent layers by MLX's operations from now on."""
    _use.is_off = True


@contextmanager
def without_kernels() -> Iterator[None]:
    """Inside the block recurrent layers are computed by MLX's operations."""
    before, _use.is_off = _use.is_off, True
    try:
        yield
    finally:
        _use.is_off = before
