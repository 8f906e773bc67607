"""Writes adapters with random weights, large enough to change what the model says, as 0.zip, 1.zip and so on."""

import math
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx

from parallm.model.adapters.adapter import make_adapter
from parallm.model.adapters.files import write_peft
from parallm.model.adapters.initial import initial_arrays
from parallm.model.load import load_shared_model
from parallm.model.settings import ModelSettings

RANK = 4
SIZE = 0.5
"""Of the change of a layer's output, relative to its input."""


def main(*, model: str, folder: str, number: int) -> dict[str, Any]:
    shared = load_shared_model(ModelSettings(path=model))
    for place in range(number):
        arrays = initial_arrays(shared.targets, RANK, mx.random.key(place))
        for name, array in arrays.items():
            if name.endswith(".lora_b"):
                noise = mx.random.normal(array.shape, key=mx.random.key(len(name) + 1000 * place))
                arrays[name] = noise * (SIZE / math.sqrt(RANK))
        with TemporaryDirectory() as files:
            adapter = make_adapter(arrays, version=1, rank=RANK, alpha=RANK)
            write_peft(adapter, Path(files), model, model_type=shared.model_type)
            with zipfile.ZipFile(Path(folder) / f"{place}.zip", "w") as archive:
                for path in Path(files).iterdir():
                    archive.write(path, path.name)
    return {}
