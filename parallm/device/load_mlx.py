"""Imports MLX and mlx_lm, as the first importer of both, and keeps the limits of open files that the operator gave.

mlx_lm sets both limits when it is imported, to 2,048 and 4,096 files. A process cannot raise its hard limit again, so
the call must have no effect. That a server has files left for checkpoints and metrics depends on these limits.
"""

import importlib
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from parallm.errors import ConfigError

ENOUGH_FILES = 10_240  # the most that macOS allows


def load_mlx() -> None:
    """Import both and raise the soft limit of open files. `load_blas` must come first.

    Raises ConfigError where MLX is installed without a backend.
    """
    try:
        importlib.import_module("mlx.core")  # by name and not at the top: the BLAS had to come first
    except ImportError as error:
        raise ConfigError(
            f"MLX cannot start ({error}). On Linux an extra chooses its build: pip install 'parallm[cpu]', "
            "or 'parallm[cuda12]' or 'parallm[cuda13]' for an NVIDIA GPU"
        ) from error
    with _limits_stay():
        importlib.import_module("mlx_lm")
    _raise_limit()


@contextmanager
def _limits_stay() -> Iterator[None]:
    set_limit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = set_limit


def _raise_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))
