"""ParaLLM: one process serves a language model while it learns from scored completions.

Importing this package imports no MLX: `parallm.device.blas` must be able to load a BLAS library first.
"""

__version__ = "0.1.0"
