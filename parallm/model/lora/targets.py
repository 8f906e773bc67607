"""Chooses the linear layers of a base that adapters may change, and their ranks."""

import logging
from collections.abc import Iterable, Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from parallm.errors import AdapterError
from parallm.model.lora.linear import LoraContext, LoraLinear
from parallm.model.settings import LoraSettings

logger = logging.getLogger(__name__)

EXPERTS = SwitchLinear | QuantizedSwitchLinear
ROUTERS = frozenset({"gate", "router"})
"""Names of the layers that choose experts in mlx-lm's models; `gate_proj` and `shared_expert_gate` are others."""
NEVER_CALLED = frozenset({"self_attention_res_proj", "mlp_res_proj"})
"""Names of linear layers of which kimi_k3 reads the weights as vectors."""


def install_lora(base: nn.Module, settings: LoraSettings, lora_context: LoraContext) -> dict[str, tuple[int, int]]:
    """Wrap the linear layers of `base` that `settings` chooses. Returns target -> (inputs, outputs).

    Warns where the experts of a mixture stay without LoRA. Raises AdapterError naming the targets that no linear layer
    of the model has, or the layers that it does not have.
    """
    layer_of = {id(module): index for index, layer in enumerate(base.layers) for module in layer.modules()}
    linears = {
        name: module
        for name, module in base.named_modules()
        if isinstance(module, nn.Linear | nn.QuantizedLinear)
        and id(module) in layer_of  # neither embedding nor head
        and name.rpartition(".")[2] not in NEVER_CALLED
    }
    layers = _layers("all" if settings.layers is None else settings.layers, len(base.layers))
    if settings.targets in (None, "all-linear"):
        # as PEFT's all-linear with transformers 5; beside frozen experts an adapted router could only reshuffle them
        targeted = sorted(linears.keys() - _routers(base, linears))
    else:
        targeted = _named(linears, settings.targets, _experts(base))
    chosen = [name for name in targeted if layer_of[id(linears[name])] in layers]
    if not chosen:
        raise AdapterError(
            f"model.lora.targets={settings.targets or 'all-linear'} and model.lora.layers={settings.layers} have no "
            f"layer in common; targets are, for example, {targeted[0]}"
        )
    wrapped = [(name, LoraLinear(linears[name], name, lora_context)) for name in chosen]
    base.update_modules(tree_unflatten(wrapped))
    if experts := _experts(base):
        logger.warning(
            "LoRA targets are %d linear layers, without the experts of this mixture (%d layers such as %s)",
            *(len(chosen), len(experts), experts[0]),
        )
    return {name: _linear_shape(linears[name]) for name in chosen}


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


def _experts(base: nn.Module) -> list[str]:
    """The layers that hold a matrix for each expert."""
    return sorted(name for name, module in base.named_modules() if isinstance(module, EXPERTS))


def _named(linears: Mapping[str, nn.Module], targets: str | tuple[str, ...], experts: Sequence[str]) -> list[str]:
    names = (targets,) if isinstance(targets, str) else targets
    chosen = [name for name in linears if any(_is_end(end, name) for end in names)]
    missing = [end for end in names if not any(_is_end(end, name) for name in chosen)]
    if missing or not chosen:
        choices = sorted({name.rsplit(".", 1)[-1] for name in linears})
        if expert := next((end for end in missing if any(_is_end(end, name) for name in experts)), None):
            raise AdapterError(
                f"model.lora.targets: {expert} names experts of a mixture, which get no LoRA here; choices: all-linear "
                f"or of {choices}"
            )
        raise AdapterError(
            f"model.lora.targets: the model has no linear layer {missing}; choices: all-linear or of {choices}"
        )
    return sorted(chosen)


def _is_end(name: str, path: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _linear_shape(linear: nn.Module) -> tuple[int, int]:
    outputs, inputs = linear.weight.shape
    if isinstance(linear, nn.QuantizedLinear):
        inputs = inputs * 32 // linear.bits
    return inputs, outputs
