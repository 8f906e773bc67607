"""Gradients that add to one another, against plain differentiation."""

import copy
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest

from parallm.model.adapters.initial import initial_arrays
from parallm.model.lora.linear import LoraBinding, LoraContext, LoraLinear, merge_linears
from parallm.model.lora.single import LoraScaling, SingleLora, single_lora
from parallm.model.lora.training import DropoutLora, TrainingLora
from parallm.model.quantized import UnpackingLinear

SHAPES = {"q": (64, 64), "k": (64, 32), "gate": (64, 96), "up": (64, 96), "down": (96, 64)}
GROUPS = (("q", "k"), ("gate", "up"))
RANKS = {"q": 8, "k": 24}


class Block(nn.Module):
    def __init__(self, lora_context: LoraContext, *, bias: bool, is_packed: bool = False) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            linear: nn.Module = nn.Linear(*shape, bias=bias)
            if is_packed:
                linear = nn.QuantizedLinear.from_linear(linear, group_size=32, bits=4)
                linear.__class__ = UnpackingLinear
            setattr(self, name, LoraLinear(linear, name, lora_context))

    def __call__(self, x: mx.array) -> mx.array:
        y = x + self.q(x) + mx.concatenate([self.k(x)] * 2, axis=-1)
        return y + self.down(nn.silu(self.gate(y)) * self.up(y))


def random_arrays() -> dict[str, mx.array]:
    arrays = initial_arrays(SHAPES, 16, mx.random.key(0), ranks=RANKS)
    keys = mx.random.split(mx.random.key(1), len(arrays))
    return {name: mx.random.normal(arrays[name].shape, key=key) / 8 for name, key in zip(arrays, keys, strict=True)}


def adapter_of(arrays: dict[str, mx.array], *, widens: bool = True, stretched: tuple[str, ...] = ()) -> SingleLora:
    norms = {name: mx.ones((SHAPES[name][1],)) for name in stretched}
    arrays = arrays | {f"{name}.m": mx.ones((SHAPES[name][1],)) for name in stretched}
    return single_lora(arrays, LoraScaling(dict.fromkeys(SHAPES, 2.0), norms, joined=GROUPS), widens=widens)


def gradients(
    layers: Block, lora_context: LoraContext, x: mx.array, lora: Callable[[list[mx.array]], LoraBinding]
) -> list[mx.array]:
    def total(arrays: list[mx.array], x: mx.array) -> mx.array:
        with lora_context.applied(lora(arrays)):
            y = layers(x)
        return (y * mx.sin(mx.arange(y.size).reshape(y.shape))).sum()

    value, (found, of_x) = mx.value_and_grad(total, argnums=(0, 1))(adapter_of(random_arrays()).arrays(), x)
    return [value, of_x, *found]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_are_those_of_plain_differentiation(bias: bool, is_packed: bool) -> None:
    lora_context = LoraContext()
    layers = Block(lora_context, bias=bias, is_packed=is_packed)
    x, structure = mx.random.normal((2, 5, 64)), adapter_of(random_arrays()).structure()
    expected = gradients(layers, lora_context, x, structure.lora)
    merge_linears(layers, GROUPS)
    found = gradients(layers, lora_context, x, lambda arrays: TrainingLora(structure.lora(arrays)))
    tolerance = 1e-2 if mx.default_device() != mx.Device(mx.cpu) else 2e-5  # a GPU's products of float32 are TF32's
    for one, other in zip(found, expected, strict=True):
        assert mx.abs(one - other).max().item() <= tolerance * mx.abs(other).max().item()


def test_groups_that_lack_a_target_or_do_more_than_multiply_take_the_plain_way() -> None:
    layers = Block(LoraContext(), bias=False)
    merge_linears(layers, GROUPS)
    arrays = random_arrays()

    def served(adapter: SingleLora) -> list[str]:
        return [name for name in SHAPES if getattr(layers, name).merged.serves(TrainingLora(adapter))]

    assert served(adapter_of(arrays)) == list(SHAPES)
    assert served(adapter_of(arrays, widens=False)) == ["down"]
    assert served(adapter_of(arrays, stretched=("k", "down"))) == ["gate", "up"]
    without = {name: one for name, one in arrays.items() if not name.startswith("k.")}
    assert served(adapter_of(without)) == ["gate", "up", "down"]
    layers.down.linear.weight = layers.down.linear.weight.astype(mx.bfloat16)
    assert served(adapter_of(arrays)) == ["q", "k", "gate", "up"]


def test_packed_weights_of_another_type_take_the_plain_way() -> None:
    layers = Block(LoraContext(), bias=False, is_packed=True)
    merge_linears(layers, GROUPS)
    assert layers.down.merged.serves(TrainingLora(adapter_of(random_arrays())))
    layers.down.linear.scales = layers.down.linear.scales.astype(mx.bfloat16)
    assert not layers.down.merged.serves(TrainingLora(adapter_of(random_arrays())))


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_targets_that_are_one_product_have_the_outputs_and_gradients_of_several(bias: bool, is_packed: bool) -> None:
    layers, x = Block(LoraContext(), bias=bias, is_packed=is_packed), mx.random.normal((2, 5, 64))
    linears = [layers.gate.linear, layers.up.linear]
    joined = copy.copy(layers.gate.linear)
    for name in (name for name in ("weight", "scales", "biases", "bias") if name in joined):
        joined[name] = mx.concatenate([linear[name] for linear in linears])
    adapter = adapter_of(random_arrays())
    structure = adapter.structure()

    def gradients(outputs: Callable[[TrainingLora, mx.array], mx.array]) -> list[mx.array]:
        def total(arrays: list[mx.array], x: mx.array) -> mx.array:
            y = outputs(TrainingLora(structure.lora(arrays)), x)
            return (y * mx.sin(mx.arange(y.size).reshape(y.shape))).sum()

        value, (found, of_x) = mx.value_and_grad(total, argnums=(0, 1))(adapter.arrays(), x)
        return [value, of_x, *found]

    targets = ("gate", "up")
    expected = gradients(lambda lora, x: mx.concatenate(lora.outputs(targets, linears, x), axis=-1))
    found = gradients(lambda lora, x: lora.joined_output(targets, joined, x))
    tolerance = 1e-2 if mx.default_device() != mx.Device(mx.cpu) else 2e-5
    for one, other in zip(found, expected, strict=True):
        assert mx.abs(one - other).max().item() <= tolerance * max(mx.abs(other).max().item(), 1e-30)


def test_only_lora_in_training_is_differentiated() -> None:
    lora_context, adapter = LoraContext(), adapter_of(random_arrays(), widens=False)
    dropped = DropoutLora(adapter, 0.5, {})
    for lora, is_trained in ((None, False), (adapter, False), (TrainingLora(adapter), True), (dropped, True)):
        with lora_context.applied(lora):
            assert lora_context.is_trained == is_trained
    assert not lora_context.is_trained
