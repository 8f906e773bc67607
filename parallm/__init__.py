"""ParaLLM: one process serves a language model while it learns from scored completions.

From Python, `load` gives a model to chat with, generate from and serve; `train` and `training` train one, by a recipe
or by objects of your own; `RLServer` serves and trains as two coroutines. `parallm.client` is for a server elsewhere.
`parallm/library/README.md` has an example of each.

Importing this package imports no MLX: `parallm.device.blas` must be able to load a BLAS library first. The names below
are imported when they are used.
"""

from importlib import import_module

__version__ = "0.1.0"

_PLACES = {
    "load": "model",
    "Model": "model",
    "Answer": "answer",
    "Server": "server",
    "train": "training",
    "training": "training",
    "Training": "training",
    "TrainingResult": "training_result",
    "RLServer": "rl_server",
    "LoRAConfig": "rl_server",
    "RLConfig": "rl_server",
}
"""Modules of `parallm.library`, by what they hold."""

__all__ = [*_PLACES, "ParallmError"]  # __init__.pyi shows them to type checkers


def __getattr__(name: str) -> object:
    if name == "ParallmError":
        return getattr(import_module("parallm.errors"), name)
    if name in _PLACES:
        return getattr(import_module(f"parallm.library.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'parallm' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
