"""The first import of MLX and mlx_lm, which keeps the operator's limits of open files; and the first use of CUDA.

mlx_lm sets both limits to 2,048 and 4,096 files when it is imported. A process cannot raise its hard limit again, so
the call is disabled: a server needs files for connections, checkpoints and metrics.
"""

import importlib
import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from threading import Thread
from typing import Any

from parallm.device.module_table import quick_module_table
from parallm.device.own_transformers import hidden_torch, is_worthwhile
from parallm.errors import ConfigError

ENOUGH_FILES = 10_240  # the maximum on macOS

logger = logging.getLogger(__name__)


def load_mlx(*, hides_torch: bool = False) -> None:
    """Import MLX and mlx_lm and raise the soft limit of open files. Call `load_blas` first.

    With `hides_torch`, for a process without other threads, transformers does not import PyTorch.
    Raises ConfigError if MLX is installed without a backend.
    """
    try:
        importlib.import_module("mlx.core")  # not at the top: the BLAS must be loaded first
    except ImportError as error:
        raise ConfigError(
            f"MLX cannot start ({error}). On Linux an extra chooses its build: pip install 'parallm[cpu]', "
            "or 'parallm[cuda12]' or 'parallm[cuda13]' for an NVIDIA GPU"
        ) from error
    first_use()
    hiding = hidden_torch() if hides_torch and is_worthwhile() else nullcontext()
    with _limits_stay(), quick_module_table(), hiding:
        importlib.import_module("mlx_lm")
    _raise_limit()


@cache
def first_use() -> Thread | None:
    """Start the first use of CUDA in this process, in a thread to join before any other; None without CUDA.

    It loads cuBLAS and cuDNN, which takes a second: meanwhile Python imports modules.
    """
    mx = importlib.import_module("mlx.core")
    if not mx.cuda.is_available():
        return None
    thread = Thread(target=_use, args=(mx,), name="first_use", daemon=True)
    thread.start()
    return thread


def _use(mx: Any) -> None:
    x = mx.ones((1, 2, 64, 64), mx.bfloat16)
    try:
        mx.eval(x @ x, mx.fast.scaled_dot_product_attention(x, x, x, scale=0.125, mask="causal"))
    except RuntimeError as error:  # the first load of a model reports it
        logger.debug("the first use of the device: %s", error)
    mx.clear_streams()


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
