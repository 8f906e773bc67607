"""The measurements behind `scripts/figures`."""

from typing import Any

BLAS: Any = None
"""In a worker's process, the report of the BLAS that was loaded."""
