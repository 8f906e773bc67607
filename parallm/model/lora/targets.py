"""Chooses the linear layers and experts of a base that adapters may change, and their ranks."""

import logging
from collections.abc import Iterable, Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP

from parallm.errors import AdapterError
from parallm.model.lora.experts import Routing
from parallm.model.lora.linear import LoraContext, LoraExperts, LoraLinear
from parallm.model.patches.experts import install_experts
from parallm.model.quantized import UnpackingLinear
from parallm.model.settings import LoraSettings

logger = logging.getLogger(__name__)

EXPERTS = SwitchLinear | QuantizedSwitchLinear
READ = frozenset(
    {
        *("prediction_coefs", "correction_coefs"),  # gemma3n
        *("self_attention_res_proj", "mlp_res_proj", "output_attn_res_proj"),  # kimi_k3
    }
)
"""Names of linear layers whose weights mlx-lm's models read, or set, themselves."""
CALLS = frozenset({nn.Linear.__call__, nn.QuantizedLinear.__call__, UnpackingLinear.__call__})
ALL_LINEAR, ALL_EXPERTS = "all-linear", "experts"
Shape = tuple[int, ...]
"""Inputs and outputs of a target, of experts after their number: (inputs, outputs) or (experts, inputs, outputs)."""
ROUTERS = frozenset({"gate", "router"})
"""Names of the layers that choose experts in mlx-lm's models; `gate_proj` and `shared_expert_gate` are others."""


def install_lora(base: nn.Module, settings: LoraSettings, lora_context: LoraContext) -> dict[str, Shape]:
    """Wrap the layers of `base` that `settings` chooses. Returns the shapes of the targets.

    Warns where the experts of a mixture stay without LoRA. Raises AdapterError naming the targets that no layer of the
    model has, or the layers that it does not have.
    """
    layer_of = {id(module): index for index, layer in enumerate(base.layers) for module in layer.modules()}
    linears = {
        name: module
        for name, module in base.named_modules()
        # neither embedding nor head
        if _is_linear(module) and id(module) in layer_of and name.rpartition(".")[2] not in READ
    }
    experts = _experts(base)
    layers = _layers("all" if settings.layers is None else settings.layers, len(base.layers))
    names = (settings.targets,) if isinstance(settings.targets, str) else settings.targets or (ALL_LINEAR,)
    targeted = _named(base, linears, experts, names)
    chosen = {name: module for name, module in targeted.items() if layer_of[id(module)] in layers}
    if not chosen:
        raise AdapterError(
            f"model.lora.targets={settings.targets or ALL_LINEAR} and model.lora.layers={settings.layers} have no "
            f"layer in common; targets are, for example, {min(targeted)}"
        )
    _check_dora(settings, chosen.keys() & experts.keys())
    if experts:
        install_experts()
    wrapped: list[tuple[str, nn.Module]] = [
        (name, (LoraExperts if name in experts else LoraLinear)(module, name, lora_context))
        for name, module in chosen.items()
    ]
    base.update_modules(tree_unflatten(wrapped))
    if experts and not chosen.keys() & experts.keys():
        logger.warning(
            "LoRA targets are %d linear layers, without the experts of this mixture (%d layers such as %s); for these "
            "set model.lora.targets=[all-linear,experts]",
            *(len(chosen), len(experts), min(experts)),
        )
    return {name: shape_of(module) for name, module in chosen.items()}


def target_ranks(targets: Iterable[str], ranks: Mapping[str, int], rank: int) -> dict[str, int]:
    """Ranks of the targets whose rank is not `rank`. Raises AdapterError for a name in `ranks` that fits no target."""
    fitting = {target: [name for name in ranks if _is_end(name, target)] for target in targets}
    used = {name for names in fitting.values() for name in names}
    if unused := sorted(ranks.keys() - used):
        choices = sorted({target.rsplit(".", 1)[-1] for target in fitting})
        raise AdapterError(f"model.lora.ranks: {unused} are no targets of this run; choices: {choices}")
    own_ranks = {target: ranks[max(names, key=len)] for target, names in fitting.items() if names}
    return {target: own for target, own in own_ranks.items() if own != rank}


class InputRecorder:
    """A binding that changes nothing and notes which targets are called with the same input, one after the other."""

    def __init__(self) -> None:
        self._x: mx.array | None = None
        self._groups: list[list[str]] = []

    def apply(self, target: str, x: mx.array, y: mx.array) -> mx.array:
        if x is not self._x:
            self._groups.append([])
        self._x = x
        self._groups[-1].append(target)
        return y

    def apply_experts(self, target: str, x: mx.array, y: mx.array, _: Routing) -> mx.array:
        return self.apply(target, x, y)

    def dora_scale(self, target: str) -> None:
        return None

    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The groups of two targets or more."""
        return tuple(tuple(group) for group in self._groups if len(group) > 1)


def _layers(layers: int | tuple[int, ...] | str, num_layers: int) -> set[int]:
    if isinstance(layers, int):
        chosen = set(range(num_layers - layers, num_layers))
    elif isinstance(layers, str) and layers != "all":
        first, last = map(int, layers.split("-"))
        chosen = set(range(first, last + 1))
    else:
        chosen = set(range(num_layers)) if layers == "all" else {int(index) for index in layers}
    if not chosen or not chosen <= set(range(num_layers)):
        raise AdapterError(
            f"model.lora.layers={layers}: the model has {num_layers} layers, 0 to {num_layers - 1}; give all, the "
            "number of last layers, a list, or a range such as 8-15"
        )
    return chosen


def _routers(base: nn.Module, linears: Mapping[str, nn.Module]) -> set[str]:
    with_experts = {
        id(module)
        for layer in base.layers
        if any(isinstance(module, EXPERTS) for module in layer.modules())
        for module in layer.modules()
    }
    return {name for name, linear in linears.items() if ROUTERS & set(name.split(".")) and id(linear) in with_experts}


def _experts(base: nn.Module) -> dict[str, nn.Module]:
    """The layers that hold a matrix for each expert, by their names."""
    mixtures = [module for module in base.modules() if isinstance(module, SwitchGLU | SwitchMLP)]
    within = {id(module) for mixture in mixtures for module in mixture.modules()}
    return {
        name: module for name, module in base.named_modules() if isinstance(module, EXPERTS) and id(module) in within
    }


def _named(
    base: nn.Module, linears: Mapping[str, nn.Module], experts: Mapping[str, nn.Module], names: Sequence[str]
) -> dict[str, nn.Module]:
    """The layers that `names` choose, in the order of their paths."""
    layers = {**linears, **experts}
    # all-linear is as PEFT's with transformers 5: experts are asked for by name; an adapted router could reshuffle them
    of_words = {ALL_LINEAR: linears.keys() - _routers(base, linears), ALL_EXPERTS: experts.keys()}
    chosen_by = {
        name: of_words[name] if name in of_words else {path for path in layers if _is_end(name, path)} for name in names
    }
    missing = [name for name, chosen in chosen_by.items() if not chosen]
    if missing or not chosen_by:
        choices = sorted({path.rsplit(".", 1)[-1] for path in layers})
        words = f"{ALL_LINEAR}, {ALL_EXPERTS}" if experts else ALL_LINEAR
        raise AdapterError(f"model.lora.targets: the model has no layer {missing}; choices: {words} or of {choices}")
    return {path: layers[path] for path in sorted(set().union(*chosen_by.values()))}


def _check_dora(settings: LoraSettings, experts: Iterable[str]) -> None:
    if settings.dora and (first := min(experts, default=None)):
        raise AdapterError(
            f"model.lora.dora=true: {first} holds a matrix for each expert, which DoRA has no form for; leave dora "
            "out, or the experts out of model.lora.targets"
        )


def _is_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer, and none that cuts its output into a list (afm7)."""
    return isinstance(module, nn.Linear | nn.QuantizedLinear) and type(module).__call__ in CALLS


def _is_end(name: str, path: str) -> bool:
    return path == name or path.endswith(f".{name}")


def shape_of(layer: nn.Module) -> Shape:
    *stack, outputs, inputs = layer.weight.shape
    if isinstance(layer, nn.QuantizedLinear | QuantizedSwitchLinear):
        inputs = inputs * 32 // layer.bits
    return *stack, inputs, outputs
