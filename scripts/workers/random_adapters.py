"""Writes `prompts` adapters with random weights, large enough to change what the model says, as zips for an upload.

They lie in the folder `trajectories` as 0.zip, 1.zip and so on.
"""

import json
import math
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
from job import Job, read_job

from parallm.model.adapters.adapter import make_adapter
from parallm.model.adapters.files import write_peft
from parallm.model.adapters.initial import initial_arrays
from parallm.model.load import load_shared_model
from parallm.model.settings import ModelSettings

RANK = 4
SIZE = 0.5
"""Of the change of a layer's output, relative to its input."""


def main(job: Job) -> None:
    model = load_shared_model(ModelSettings(path=job.model))
    assert job.trajectories is not None
    for place in range(job.prompts):
        arrays = initial_arrays(model.targets, RANK, mx.random.key(place))
        for name, array in arrays.items():
            if name.endswith(".lora_b"):
                noise = mx.random.normal(array.shape, key=mx.random.key(len(name) + 1000 * place))
                arrays[name] = noise * (SIZE / math.sqrt(RANK))
        with TemporaryDirectory() as folder:
            adapter = make_adapter(arrays, version=1, rank=RANK, alpha=RANK)
            write_peft(adapter, Path(folder), job.model, model_type=model.model_type)
            with zipfile.ZipFile(Path(job.trajectories) / f"{place}.zip", "w") as archive:
                for path in Path(folder).iterdir():
                    archive.write(path, path.name)


main(read_job(sys.argv[1]))
print(json.dumps({}))
