"""Experts in adapters of PEFT's format, which adapts them as parameters (`target_parameters`). Called by `files.py`.

transformers keeps the experts of a layer in one module with two parameters, gate_up_proj and down_proj. PEFT adapts
each by one pair of matrices for all experts: A (E x r, inputs) has the rows of expert e at e x r, B (outputs, r x E)
the column j of expert e at j x E + e. Our gate and up have an A of their own each. Written, they become one pair of
twice the rank, with zeros in B where gate and up do not meet; read, both get the same A. PEFT wraps the module once for
each parameter: gate_up_proj is inside of down_proj.

Axes: E experts, I inputs, O outputs, R rank.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from parallm.errors import AdapterError
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.module_names import KNOWN, names_to_read
from parallm.model.lora.joined import padded
from parallm.model.lora.targets import Shape

GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
GATE_UP = "gate_up_proj"
PARAMETERS = (GATE_UP, DOWN)
"""In the order in which PEFT wraps them."""
EXPERT_TARGET = re.compile(
    r"(?P<layer>.*\.layers\.\d+)\.(?P<block>\w+)\.(?P<module>\w+)\.(?P<part>gate_proj|up_proj|down_proj)"
)
WRAPPED = ".base_layer"
BLOCKS = {"granitemoe": "block_sparse_moe", "granitemoehybrid": "block_sparse_moe", "lfm2_moe": "feed_forward"}
"""The module of transformers' layers that holds the experts; else it is mlp."""
INTERLEAVED = frozenset({"gpt_oss"})
"""Types whose outputs of gate and up take turns; else all of gate come first."""
FIRST_ORIENTED = (0, 19)
"""From this version on PEFT takes the last axis of a parameter for its inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertModule:
    """The experts of one layer: the targets by their parts, and the module's name in transformers."""

    name: str
    targets: Mapping[str, str]

    def present(self, targets: Iterable[str]) -> dict[str, str]:
        """The parts that are among `targets`."""
        chosen = set(targets)
        return {part: target for part, target in self.targets.items() if target in chosen}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLora:
    """What PEFT's format has for one parameter."""

    name: str
    """In transformers' class, e.g. model.layers.0.mlp.experts.down_proj."""
    rank: int
    alpha: float
    tensors: Mapping[str, mx.array]
    """Arrays by their names in the file."""


def expert_modules(targets: Iterable[str], model_type: str) -> list[ExpertModule]:
    """The modules of the `targets`, which are experts. Raises AdapterError for a type, or a layer, that transformers
    does not keep so."""
    if model_type not in KNOWN:
        raise AdapterError(
            f"the experts of {model_type} are not written in PEFT's format: their names in transformers are not known "
            "here; export the adapter with formats=[mlx,fused]"
        )
    by_name: dict[str, dict[str, str]] = {}
    for target in targets:
        match = EXPERT_TARGET.fullmatch(target)
        if match is None:
            raise AdapterError(
                f"{target} is not written in PEFT's format: transformers keeps the experts of {model_type} in another "
                "way; export the adapter with formats=[mlx,fused]"
            )
        block = f"{match['layer']}.{BLOCKS.get(model_type, 'mlp')}.experts"
        by_name.setdefault(KNOWN[model_type].to_peft(block), {})[match["part"]] = target
    return [ExpertModule(name=name, targets=parts) for name, parts in by_name.items()]


def to_parameters(adapter: Adapter, model_type: str) -> list[ParameterLora]:
    """The experts of `adapter` as PEFT has them. Raises AdapterError where its format cannot hold them."""
    experts = [target for target in adapter.targets if adapter.arrays[f"{target}.lora_a"].ndim == 3]
    parameters = []
    for module in expert_modules(experts, model_type) if experts else ():
        parts = module.present(experts)
        chosen = [parameter for parameter in PARAMETERS if parts.keys() & _parts_of(parameter)]
        for parameter in chosen:
            is_inner = parameter != chosen[-1]
            own = {part: target for part, target in parts.items() if part in _parts_of(parameter)}
            a_ERI, b_EOR, rank = _joined(adapter, own, parameter, is_interleaved=model_type in INTERLEAVED)
            prefix = f"base_model.model.{module.name}{WRAPPED if is_inner else ''}"
            parameters.append(
                ParameterLora(
                    name=f"{module.name}.{parameter}",
                    rank=rank,
                    alpha=_alpha(adapter, own, rank),
                    tensors={f"{prefix}.lora_A.weight": _flat_a(a_ERI), f"{prefix}.lora_B.weight": _flat_b(b_EOR)},
                )
            )
    return parameters


def from_parameters(
    tensors: Mapping[str, mx.array],
    parameters: Sequence[str],
    ranks: Mapping[str, int],
    shapes: Mapping[str, Shape],
    model_type: str,
    version: str | None,
    only: Iterable[str] | None,
) -> tuple[dict[str, mx.array], dict[str, str], set[str]]:
    """The experts in `tensors` of PEFT's format as arrays of an adapter.

    Returns the arrays, the parameter that each target was read from, and the names of the tensors that were read.
    `parameters` are the config's `target_parameters`, `ranks` gives that of a parameter by its whole name, `shapes`
    are the base's targets, `version` is PEFT's, or None where the file was written here. `only`: the targets that the
    adapter had when it was written here, where gate and up have their own halves of the rank. Raises AdapterError.
    """
    experts = [target for target, shape in shapes.items() if len(shape) == 3]
    names = names_to_read(model_type, is_ours=only is not None)
    written = None if only is None else set(only)
    arrays: dict[str, mx.array] = {}
    origins: dict[str, str] = {}
    used: set[str] = set()
    for module in expert_modules(experts, model_type) if experts else ():
        chosen = [one for one in PARAMETERS if _is_named(f"{module.name}.{one}", parameters)]
        for parameter in chosen:
            pair = _pair(tensors, module.name, names.from_peft(module.name), is_inner=parameter != chosen[-1])
            if pair is None:
                continue
            used |= pair.keys()
            own = {part: target for part, target in module.targets.items() if part in _parts_of(parameter)}
            own = {part: target for part, target in own.items() if written is None or target in written}
            name = f"{module.name}.{parameter}"
            shape = shapes[module.targets[_first(parameter)]]
            a_ERI, b_EOR = _oriented(*_values(pair), ranks[name], shape, parameter, version)
            halves = _parted(a_ERI, b_EOR, own, parameter, model_type, is_ours=written is not None)
            for target, (a_EIR, b_ERO) in halves.items():
                arrays[f"{target}.lora_a"], arrays[f"{target}.lora_b"] = a_EIR, b_ERO
                origins[target] = name
    return arrays, origins, used


def parameter_names(targets: Iterable[str], model_type: str) -> list[str]:
    """The names of all parameters that hold the experts `targets`."""
    return [f"{module.name}.{parameter}" for module in expert_modules(targets, model_type) for parameter in PARAMETERS]


def _parts_of(parameter: str) -> set[str]:
    return {GATE, UP} if parameter == GATE_UP else {DOWN}


def _first(parameter: str) -> str:
    return GATE if parameter == GATE_UP else DOWN


def _is_named(name: str, parameters: Sequence[str]) -> bool:
    return any(name == one or name.endswith(f".{one}") for one in parameters)


def _joined(
    adapter: Adapter, own: Mapping[str, str], parameter: str, *, is_interleaved: bool
) -> tuple[mx.array, mx.array, int]:
    """A (E, R, I) and B (E, O, R) of a parameter, and R."""
    a = {part: adapter.arrays[f"{target}.lora_a"].swapaxes(-1, -2) for part, target in own.items()}
    b = {part: adapter.arrays[f"{target}.lora_b"].swapaxes(-1, -2) for part, target in own.items()}
    if parameter == DOWN:
        return a[DOWN], b[DOWN], a[DOWN].shape[1]
    forms = {(adapter.ranks.get(target, adapter.rank), adapter.scales[target]) for target in own.values()}
    if len(forms) > 1:
        raise AdapterError(
            f"{own[GATE]} and {own[UP]} have different ranks or alphas, and PEFT's format has one of each for both; "
            "give them one rank in model.lora.ranks, or export with formats=[mlx,fused]"
        )
    present = [part for part in (GATE, UP) if part in own]
    rank = sum(a[part].shape[1] for part in present)
    before = 0
    halves = []
    for part in (GATE, UP):
        if part in own:
            halves.append(padded(b[part], -1, before, rank))
            before += a[part].shape[1]
        else:
            halves.append(mx.zeros_like(b[present[0]]))
    return mx.concatenate([a[part] for part in present], axis=1), _outputs_joined(halves, is_interleaved), rank


def _outputs_joined(halves: Sequence[mx.array], is_interleaved: bool) -> mx.array:
    """Outputs (E, O, R) of gate and up as transformers orders them."""
    if is_interleaved:
        return mx.stack(list(halves), axis=2).flatten(1, 2)
    return mx.concatenate(list(halves), axis=1)


def _alpha(adapter: Adapter, own: Mapping[str, str], rank: int) -> float:
    scale = adapter.scales[next(iter(own.values()))]
    return scale * (math.sqrt(rank) if adapter.rslora else rank)


def _flat_a(a_ERI: mx.array) -> mx.array:
    return mx.contiguous(a_ERI.flatten(0, 1))


def _flat_b(b_EOR: mx.array) -> mx.array:
    return mx.contiguous(b_EOR.transpose(1, 2, 0).flatten(1, 2))


def _pair(tensors: Mapping[str, mx.array], module: str, ours: str, *, is_inner: bool) -> dict[str, mx.array] | None:
    """A and B of a parameter by their names in the file, where the module may have mlx-lm's name."""
    for name in (module, ours):
        for prefix in ("base_model.model.", ""):
            path = f"{prefix}{name}{WRAPPED if is_inner else ''}"
            for end in ("weight", "default.weight"):
                names = [f"{path}.lora_{part}.{end}" for part in "AB"]
                if all(one in tensors for one in names):
                    return {one: tensors[one] for one in names}
    return None


def _values(pair: Mapping[str, mx.array]) -> tuple[mx.array, mx.array]:
    a, b = pair.values()
    return a, b


def _oriented(
    a: mx.array, b: mx.array, rank: int, shape: Shape, parameter: str, version: str | None
) -> tuple[mx.array, mx.array]:
    """A (E, R, I) and B (E, O, R) of PEFT's A and B. Raises AdapterError where they do not fit, or could be either."""
    num_experts, inputs, outputs = shape
    outputs *= 2 if parameter == GATE_UP else 1
    rows = num_experts * rank
    found = (a.shape, b.shape)
    expected, turned = ((rows, inputs), (outputs, rows)), ((rows, outputs), (inputs, rows))
    if found not in (expected, turned):
        raise AdapterError(
            f"the experts' {parameter} has lora_A {a.shape} and lora_B {b.shape}; {num_experts} experts and rank "
            f"{rank} of this base need {expected[0]} and {expected[1]}"
        )
    is_turned = found == turned and (found != expected or (version is not None and _is_before(version)))
    a_ERX = a.reshape(num_experts, rank, -1)
    b_EXR = b.reshape(b.shape[0], rank, num_experts).transpose(2, 0, 1)
    return (b_EXR.swapaxes(1, 2), a_ERX.swapaxes(1, 2)) if is_turned else (a_ERX, b_EXR)


def _is_before(version: str) -> bool:
    """Whether PEFT's `version` is older than the order of axes that is written today."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        raise AdapterError(
            "the experts' matrices are square, and adapter_config.json does not say which peft_version wrote them; "
            "save the adapter again with PEFT 0.19 or later"
        )
    return (int(numbers[1]), int(numbers[2])) < FIRST_ORIENTED


def _parted(
    a_ERI: mx.array, b_EOR: mx.array, own: Mapping[str, str], parameter: str, model_type: str, *, is_ours: bool
) -> dict[str, tuple[mx.array, mx.array]]:
    """A (E, I, R) and B (E, R, O) of each target."""
    if parameter == DOWN:
        return {target: _turned(a_ERI, b_EOR) for target in own.values()}
    if model_type in INTERLEAVED:
        b_of = {GATE: b_EOR[:, ::2], UP: b_EOR[:, 1::2]}
    else:
        b_of = dict(zip((GATE, UP), mx.split(b_EOR, 2, axis=1), strict=True))
    if not is_ours or len(own) == 1:
        return {target: _turned(a_ERI, b_of[part]) for part, target in own.items()}
    half = a_ERI.shape[1] // 2
    columns = {GATE: slice(0, half), UP: slice(half, None)}
    return {target: _turned(a_ERI[:, columns[part]], b_of[part][..., columns[part]]) for part, target in own.items()}


def _turned(a_ERI: mx.array, b_EOR: mx.array) -> tuple[mx.array, mx.array]:
    return mx.contiguous(a_ERI.swapaxes(1, 2)), mx.contiguous(b_EOR.swapaxes(1, 2))
