"""Code that a model folder brings along. It runs with the rights of the process, and only where that was asked for."""

import json
from pathlib import Path

from parallm.errors import ModelError

KEY = "model.trust_remote_code"


def own_class(folder: Path) -> str | None:
    """Return the file with the model's own class, which mlx-lm would run in place of a class that it knows."""
    config = json.loads((folder / "config.json").read_text())
    name = config.get("model_file") if isinstance(config, dict) else None
    return None if name is None else str(name)


def refuse_code(folder: Path, path: str) -> None:
    """Raise ModelError for a model that cannot be loaded without code of its own."""
    name = own_class(folder)
    if name is not None:
        raise ModelError(f"model.path={path}: {folder} {way_out(name)}")


def way_out(name: str) -> str:
    """Return the end of an error about a folder whose code `name` does not run."""
    return f"brings code of its own ({name}), which is not run; read it, then set {KEY}=true to run it with your rights"
