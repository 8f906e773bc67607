"""What tells one base from another, without reading all of it."""

import hashlib

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

NUM_VALUES = 16  # of each array


def fingerprint(base: nn.Module) -> str:
    """SHA-256 over names, shapes, types and a few values of the arrays of a model."""
    arrays = dict(tree_flatten(base.parameters()))
    values = {
        name: array.reshape(-1)[:: max(1, array.size // NUM_VALUES)].astype(mx.float32)
        for name, array in arrays.items()
    }
    mx.eval(values)
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.shape} {array.dtype} {values[name].tolist()}".encode())
    return digest.hexdigest()
