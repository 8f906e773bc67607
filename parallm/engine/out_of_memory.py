"""Whether an error says that the device has no memory left."""

import re

_SIGNS = re.compile(r"out of memory|unable to allocate|insufficient memory|attempting to allocate", re.IGNORECASE)
"""CUDA's, MLX's on a CPU, Metal's command buffers, MLX's on Metal."""


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_SIGNS.search(str(error))))
