"""Named arrays that requests and policy nets exchange, and what a model says of them. NumPy only.

Axes: N rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

Datatype = Literal[
    "BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "FP16", "BF16", "FP32", "FP64"
]
"""KServe's names. Arrays of FP16 and BF16 are float32 in memory."""
DATATYPES: tuple[Datatype, ...] = get_args(Datatype)
Role = Literal["hidden", "episode_start"]
Array: TypeAlias = np.ndarray[Any, Any]
Arrays: TypeAlias = Mapping[str, Array]

NUMPY_TYPES: Mapping[Datatype, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    **{name: np.dtype(name.lower()) for name in DATATYPES if "INT" in name},
    **dict.fromkeys(("FP16", "BF16", "FP32"), np.dtype("<f4")),
    "FP64": np.dtype("<f8"),
}
"""Types of arrays in memory."""
ITEM_BYTES: Mapping[Datatype, int] = {
    **{name: kind.itemsize for name, kind in NUMPY_TYPES.items()},
    "FP16": 2,
    "BF16": 2,
}
"""Bytes of a number on the wire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, type and shape of one input or output.

    Example: `TensorSpec(name="obs", datatype="FP32", shape=(-1, 4))`.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    """-1 is any size; the first axis is that of rows."""
    role: Role | None = None
    """`hidden`: the state of a recurrent net, an input and an output of the same name; `episode_start`: rows whose
    hidden state is to be zero. Both may be left out of a request."""
    is_optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """All inputs and outputs of a model.

    Example: `Signature(inputs=(TensorSpec(name="obs", ...),), outputs=(TensorSpec(name="logits", ...),))`.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def observations(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for spec in self.inputs if spec.role is None)

    @property
    def hidden(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for spec in self.inputs if spec.role == "hidden")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCard:
    """One version of a policy net in memory.

    Example: `PolicyCard(name="agent", version=3, model_type="mlp_policy", signature=..., num_bytes=18_000,
    is_served=True)`.
    """

    name: str
    version: int
    model_type: str
    signature: Signature
    num_bytes: int
    is_served: bool
    """Whether the bare name means this version."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActRequest:
    """Rows of observations to act on.

    Example: `ActRequest(model="agent@3", inputs={"obs": obs_NO}, seeds_N=seeds_N)`.
    """

    model: str
    inputs: Arrays
    """Arrays by the names of the signature's inputs."""
    seeds_N: Array
    """Seed of each row, uint64: equal rows with equal seeds act alike, whatever stands beside them."""
    is_deterministic: bool = False
    """Take the mode of each distribution instead of a sample."""
    wants_entropy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Actions:
    """The actions of all rows of a request, and what a learner needs of them."""

    actions: Array
    """Integers of discrete spaces, float32 of boxes; the first axis is that of rows."""
    log_probs_N: Array
    """Log-probs of `actions` under the distribution that was sampled from, summed over an action's parts; float32."""
    clipped: Array | None = None
    """Actions within the bounds of a box, where a sample can lie outside; log-probs are not theirs."""
    values_N: Array | None = None
    """Estimates of the value head, float32; None: the net has none."""
    entropy_N: Array | None = None
    hidden: Arrays = field(default_factory=dict)
    """The next hidden states, by name."""


def datatype_of(array: Array) -> Datatype:
    """Return KServe's name of an array's type."""
    return next(name for name in reversed(DATATYPES) if NUMPY_TYPES[name] == array.dtype)
