"""ParaLLM: one process serves a language model while it learns from scored completions.

From Python, `load` returns a model to chat with, generate from and serve; `train` and `training` train one by a recipe
or by objects of a program; `RLServer` serves and trains as two coroutines. `parallm.client` talks to a server.
`parallm/library/README.md` has an example of each.

Importing this package imports no MLX: `parallm.device.blas` must load a BLAS library first. The names below are
imported when they are used.
"""

from importlib import import_module

__version__ = "0.1.0"

_MODULES = {
    "load": "model",
    "Model": "model",
    "Answer": "answer",
    "Server": "model",
    "train": "training",
    "training": "training",
    "Training": "training",
    "TrainingResult": "session",
    "RLServer": "rl_server",
    "LoRAConfig": "rl_server",
    "RLConfig": "rl_server",
}
"""Module of `parallm.library` by name."""

__all__ = [*_MODULES, "ParallmError"]  # __init__.pyi shows them to type checkers


def __getattr__(name: str) -> object:
    if name == "ParallmError":
        return getattr(import_module("parallm.errors"), name)
    if name in _MODULES:
        return getattr(import_module(f"parallm.library.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'parallm' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
