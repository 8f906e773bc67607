"""Writes a model folder with random weights of a shape and the embedded model's tokenizer."""

import json
import shutil
from pathlib import Path

from mlx_lm.utils import save_model

from bench.workers.loads import SHAPES
from bench.workers.random_model import random_base
from parallm.model.load import NANO


def main(*, shape: str, folder: str) -> dict[str, str]:
    save_model(folder, random_base(SHAPES[shape]))
    (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(NANO / name, folder)
    return {"folder": folder}
