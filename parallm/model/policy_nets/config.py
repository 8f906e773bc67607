"""What `config.json` says of a policy net: its layers, its action space, and so the shapes of all of its tensors.

Names and layouts are those of PyTorch: `actor.0.weight` (outputs, inputs) is the first linear layer of an nn.Sequential
whose activations have the odd numbers, and `rnn.weight_ih_l0` that of an nn.LSTM or nn.GRU.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from parallm.errors import ModelError
from parallm.tensors import Datatype, Signature, TensorSpec

MAX_SIZE = 1 << 20
Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
Sizes: TypeAlias = Annotated[tuple[Size, ...], Field(max_length=16)]
Activation = Literal["tanh", "relu", "elu", "silu"]
GATES: Mapping[str, int] = {"lstm_policy": 4, "gru_policy": 3}
HIDDEN: Mapping[str, tuple[str, ...]] = {"mlp_policy": (), "lstm_policy": ("h", "c"), "gru_policy": ("h",)}
"""Names of hidden states by type of model."""
EPISODE_START = "episode_start"
RESERVED = frozenset({"h", "c", EPISODE_START, "shape", "datatype", "data", "b64"})
"""Names that no observation can have: those of other inputs, and of a tensor's fields."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Discrete(_Part):
    """One of `n` actions."""

    type: Literal["discrete"]
    n: Size

    @property
    def nvec(self) -> tuple[int, ...]:
        return (self.n,)

    @property
    def num_logits(self) -> int:
        return self.n


class MultiDiscrete(_Part):
    """Several choices at once, one of `nvec[i]` each."""

    type: Literal["multi_discrete"]
    nvec: Annotated[tuple[Size, ...], Field(min_length=1, max_length=1024)]

    @property
    def num_logits(self) -> int:
        return sum(self.nvec)


class MultiBinary(_Part):
    """`n` switches."""

    type: Literal["multi_binary"]
    n: Size

    @property
    def num_logits(self) -> int:
        return self.n


class Box(_Part):
    """Real numbers. `low` and `high` bound them: one number for all, or one for each."""

    type: Literal["box"]
    shape: Annotated[tuple[Size, ...], Field(min_length=1, max_length=4)]
    low: float | tuple[float, ...] | None = None
    high: float | tuple[float, ...] | None = None

    @property
    def num_actions(self) -> int:
        return math.prod(self.shape)

    @model_validator(mode="after")
    def _check(self) -> "Box":
        if self.num_actions > MAX_SIZE:
            raise ValueError(f"a box of {self.num_actions} numbers; the limit is {MAX_SIZE}")
        if (self.low is None) != (self.high is None):
            raise ValueError("a box has low and high, or neither")
        for bound in (self.low, self.high):
            if isinstance(bound, tuple) and len(bound) != self.num_actions:
                raise ValueError(f"a box of {self.num_actions} numbers with {len(bound)} bounds")
        if any(low >= high for low, high in zip(*self.bounds, strict=True)):
            raise ValueError("each low of a box has to be below its high")
        return self

    @property
    def bounds(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Lowest and highest number of each action; empty without bounds."""
        if self.low is None or self.high is None:
            return (), ()
        low, high = (
            bound if isinstance(bound, tuple) else (bound,) * self.num_actions for bound in (self.low, self.high)
        )
        return low, high


Part = TypeVar("Part", bound=_Part)
Space = Discrete | MultiDiscrete | MultiBinary | Box


class PolicyConfig(_Part):
    model_type: Literal["mlp_policy", "lstm_policy", "gru_policy"]
    observation_size: Size
    """Numbers of an observation, all of its parts together."""
    action_space: Annotated[Space, Field(discriminator="type")]
    trunk: Sizes = ()
    """Sizes of the layers that actor and critic share, each with an activation; a recurrent layer comes after them."""
    rnn_size: Size | None = None
    """Size of the recurrent layer's hidden state."""
    actor: Sizes = ()
    """Sizes of the actor's own hidden layers; one more layer makes logits or means of the last."""
    critic: Sizes | None = None
    """Sizes of the value head's own hidden layers; null: no value head."""
    activation: Activation = "tanh"
    log_std: Literal["parameter", "output"] = "parameter"
    """Source of a box's standard deviations: a tensor `log_std`, or the second half of the actor's outputs."""
    log_std_range: tuple[float, float] | None = None
    """Bounds that the actor's log_std is clipped to, as in SAC; null: none."""
    squash: bool = False
    """Actions are tanh of the samples, scaled to the box."""

    @model_validator(mode="after")
    def _check(self) -> "PolicyConfig":
        if (self.rnn_size is None) != (self.model_type == "mlp_policy"):
            raise ValueError("rnn_size is the size of lstm_policy and gru_policy, which need it, and of no mlp_policy")
        is_box = isinstance(self.action_space, Box)
        if not is_box and (self.log_std, self.log_std_range, self.squash) != ("parameter", None, False):
            raise ValueError("log_std, log_std_range and squash are for a box")
        if self.log_std_range is not None and self.log_std == "parameter":
            raise ValueError('log_std_range clips what the actor computes; it needs log_std: "output"')
        if self.log_std_range is not None and self.log_std_range[0] >= self.log_std_range[1]:
            raise ValueError("log_std_range should be the lower and the higher bound")
        return self

    @property
    def num_outputs(self) -> int:
        """Numbers that the actor's last layer makes."""
        space = self.action_space
        if isinstance(space, Box):
            return space.num_actions * (2 if self.log_std == "output" else 1)
        return space.num_logits

    @property
    def widest(self) -> int:
        """Numbers of the largest array that a row needs."""
        gates = GATES.get(self.model_type, 0) * (self.rnn_size or 0)
        return max(self.observation_size, self.num_outputs, gates, *self.trunk, *self.actor, *(self.critic or ()), 1)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor by name."""
        shapes: dict[str, tuple[int, ...]] = {}
        size = _add_layers(shapes, "trunk", self.observation_size, self.trunk)
        if self.rnn_size is not None:
            rows, size, inputs = GATES[self.model_type] * self.rnn_size, self.rnn_size, size
            shapes |= {"rnn.weight_ih_l0": (rows, inputs), "rnn.weight_hh_l0": (rows, size)}
            shapes |= {"rnn.bias_ih_l0": (rows,), "rnn.bias_hh_l0": (rows,)}
        _add_layers(shapes, "actor", size, (*self.actor, self.num_outputs))
        if self.critic is not None:
            _add_layers(shapes, "critic", size, (*self.critic, 1))
        if isinstance(self.action_space, Box) and self.log_std == "parameter":
            shapes["log_std"] = (self.action_space.num_actions,)
        return shapes

    def signature(self, observations: tuple[TensorSpec, ...] = ()) -> Signature:
        """Return the signature with these observations, which are joined in their order; without any, one `obs`."""
        own = observations or (TensorSpec(name="obs", datatype="FP32", shape=(-1, self.observation_size)),)
        hidden = tuple(
            TensorSpec(name=name, datatype="FP32", shape=(-1, self.rnn_size or 0), role="hidden", is_optional=True)
            for name in HIDDEN[self.model_type]
        )
        start = TensorSpec(name=EPISODE_START, datatype="BOOL", shape=(-1,), role="episode_start", is_optional=True)
        space = self.action_space
        names = ("mean", "log_std") if isinstance(space, Box) else ("logits",)
        size = space.num_actions if isinstance(space, Box) else space.num_logits
        outputs = [TensorSpec(name=name, datatype="FP32", shape=(-1, size)) for name in names]
        if self.critic is not None:
            outputs.append(TensorSpec(name="value", datatype="FP32", shape=(-1,)))
        return Signature(inputs=(*own, *hidden, *((start,) if hidden else ())), outputs=(*outputs, *hidden))


def _add_layers(shapes: dict[str, tuple[int, ...]], part: str, size: int, sizes: tuple[int, ...]) -> int:
    """Add the linear layers of a part to `shapes`. Returns the size of the last one's outputs."""
    for index, outputs in enumerate(sizes):
        shapes[f"{part}.{2 * index}.weight"] = (outputs, size)
        shapes[f"{part}.{2 * index}.bias"] = (outputs,)
        size = outputs
    return size


class _Tensor(_Part):
    name: Annotated[str, Field(min_length=1, max_length=128)]
    datatype: Datatype
    shape: Annotated[tuple[int, ...], Field(min_length=1, max_length=8)]
    role: Literal["hidden", "episode_start"] | None = None


class _Signature(_Part):
    inputs: Annotated[tuple[_Tensor, ...], Field(min_length=1, max_length=64)]
    outputs: tuple[_Tensor, ...] | None = None


def read_config(text: str) -> PolicyConfig:
    """Return what the text of a config.json says. Raises ModelError that names the first field at fault."""
    return _read(text, PolicyConfig, "config.json")


def read_signature(text: str | None, config: PolicyConfig) -> Signature:
    """Return the signature in the text of a signature.json; None: one observation `obs`.

    The file names the observations; what it says of hidden states and outputs has to be what the net has. Raises
    ModelError.
    """
    if text is None:
        return config.signature()
    given = _read(text, _Signature, "signature.json")
    observations = tuple(_spec(tensor) for tensor in given.inputs if tensor.role is None)
    names = [spec.name for spec in observations]
    if wrong := [name for name in names if name in RESERVED or names.count(name) > 1]:
        raise ModelError(f"signature.json: no observation can be called {wrong[0]!r}, or two of them the same")
    for spec in observations:
        if spec.shape[0] != -1 or any(not 0 < axis <= MAX_SIZE for axis in spec.shape[1:]):
            raise ModelError(f"signature.json: the shape of {spec.name} should be -1 and then sizes above 0")
    sizes = [math.prod(spec.shape[1:]) for spec in observations]
    if sum(sizes) != config.observation_size:
        raise ModelError(
            f"signature.json: the observations have {sum(sizes)} numbers, and observation_size in config.json is "
            f"{config.observation_size}"
        )
    signature = config.signature(observations)
    _check_known([tensor for tensor in given.inputs if tensor.role is not None], signature.inputs, "inputs")
    _check_known(given.outputs or (), signature.outputs, "outputs")
    return signature


def _check_known(tensors: Sequence["_Tensor"], specs: Sequence[TensorSpec], what: str) -> None:
    known = [f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in specs]
    for tensor in tensors:
        if (text := f"{tensor.name} {tensor.datatype} {list(tensor.shape)}") not in known:
            raise ModelError(f"signature.json: {text} is none of this net's {what}, which are {', '.join(known)}")


def _spec(tensor: _Tensor) -> TensorSpec:
    return TensorSpec(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)


def _read(text: str, kind: type[Part], name: str) -> Part:
    try:
        return kind.model_validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:200]
        raise ModelError(
            f"{name}: {where + ': ' if where else ''}{first['msg'].removeprefix('Value error, ')}"
        ) from error
