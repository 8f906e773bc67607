from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.tuner.lora import LoRALinear

from parallm.errors import AdapterError
from parallm.model.adapters.adapter import Adapter, make_adapter, with_arrays
from parallm.model.adapters.initial import initial_arrays
from parallm.model.load import load_shared_model
from parallm.model.lora.concatenated import concatenate_loras
from parallm.model.lora.dora import lora_scaling
from parallm.model.lora.linear import LoraLinear
from parallm.model.lora.selector import training_lora
from parallm.model.lora.single import SingleLora, single_lora
from parallm.model.lora.training import DropoutLora
from parallm.model.settings import ModelSettings
from parallm.model.shared_model import SharedModel

TOKENS = mx.array([[5, 300, 17, 9, 44, 2], [7, 8, 9, 10, 11, 12], [1, 2, 3, 4, 5, 6]])


def random_adapter(model: SharedModel, seed: int, rank: int = 4, targets: set[str] | None = None) -> Adapter:
    key, arrays = mx.random.key(seed), {}
    for target, (inputs, outputs) in model.targets.items():
        if targets is None or target.rsplit(".", 1)[-1] in targets:
            key, key_a, key_b = mx.random.split(key, 3)
            arrays[f"{target}.lora_a"] = mx.random.normal((inputs, rank), key=key_a) * 0.2
            arrays[f"{target}.lora_b"] = mx.random.normal((rank, outputs), key=key_b) * 0.2
    return make_adapter(arrays, version=seed, rank=rank, alpha=2.0 * rank)


def random_view(model: SharedModel, seed: int, rank: int = 4, targets: set[str] | None = None) -> SingleLora:
    return view_of(random_adapter(model, seed, rank, targets), model)


def view_of(adapter: Adapter, model: SharedModel) -> SingleLora:
    return single_lora(adapter.arrays, lora_scaling(adapter, model))


def hidden(model: SharedModel, lora: SingleLora | None, tokens: mx.array = TOKENS) -> mx.array:
    return model.hidden(tokens, None, lora)


@pytest.mark.cpu
def test_a_new_adapter_changes_nothing(load_tiny: Callable[..., SharedModel]) -> None:
    model = load_tiny("llama")
    arrays = initial_arrays(model.targets, 4, mx.random.key(0))
    assert len(arrays) == 28
    adapter = make_adapter(arrays, version=0, rank=4, alpha=8.0)
    assert mx.array_equal(hidden(model, view_of(adapter, model)), hidden(model, None)).item()


def test_initial_arrays_follow_from_the_key(load_tiny: Callable[..., SharedModel]) -> None:
    targets = load_tiny("llama").targets
    one, same, other = (initial_arrays(targets, 4, mx.random.key(seed)) for seed in (0, 0, 1))
    name = "model.layers.0.mlp.down_proj.lora_a"
    assert mx.array_equal(one[name], same[name]).item()
    assert not mx.array_equal(one[name], other[name]).item()
    assert mx.abs(one[name]).max().item() <= 96**-0.5


def test_a_target_computes_what_mlx_lm_computes(load_tiny: Callable[..., SharedModel]) -> None:
    model = load_tiny("llama")
    adapter = random_adapter(model, 1)
    target = "model.layers.0.mlp.up_proj"
    module = dict(model.base.named_modules())[target]
    assert isinstance(module, LoraLinear)
    theirs = LoRALinear.from_base(module.linear, r=4, scale=2.0)
    theirs.lora_a, theirs.lora_b = adapter.arrays[f"{target}.lora_a"], adapter.arrays[f"{target}.lora_b"]
    x = mx.random.normal((2, 5, 64), key=mx.random.key(2))
    with model.lora_context.applied(view_of(adapter, model)):
        ours = module(x)
    assert mx.allclose(ours, theirs(x), atol=1e-5).item()
    assert mx.array_equal(module(x), module.linear(x)).item()


def test_rows_of_mixed_adapters_get_what_they_get_alone(load_tiny: Callable[..., SharedModel]) -> None:
    model = load_tiny("llama")
    views = [random_view(model, 1), random_view(model, 2, rank=2, targets={"q_proj", "down_proj"})]
    together = model.hidden(TOKENS, None, concatenate_loras(views, model.targets).select([1, -1, 0]))
    for row, lora in enumerate((views[1], None, views[0])):
        alone = hidden(model, lora, TOKENS[row : row + 1])
        assert mx.allclose(together[row], alone[0], atol=1e-4).item()


def test_adapters_apply_to_single_tokens_of_a_half_precision_base(tiny_model: Callable[[str], Path]) -> None:
    model = load_shared_model(ModelSettings(path=str(tiny_model("llama")), dtype="bfloat16"))
    mixed = concatenate_loras([random_view(model, 1)], model.targets).select([-1, 0, 0])
    found = model.hidden(TOKENS[:, :1], None, mixed)
    assert found.dtype == mx.bfloat16
    assert mx.array_equal(found[0], hidden(model, None, TOKENS[:1, :1])[0]).item()
    assert not mx.array_equal(found[1], hidden(model, None, TOKENS[1:2, :1])[0]).item()


def test_dropout_follows_from_its_keys_and_keeps_the_mean(load_tiny: Callable[..., SharedModel]) -> None:
    model = load_tiny("llama")
    lora, target = random_view(model, 1), "model.layers.0.mlp.up_proj"
    x = mx.ones((1, 4, 64))
    y = mx.zeros((1, 4, model.targets[target][1]))
    keys = [mx.random.key(seed) for seed in [0, 0, *range(1, 400)]]
    drawn = [DropoutLora(lora, 0.25, {target: key}).apply(target, x, y) for key in keys]
    assert mx.array_equal(drawn[0], drawn[1]).item()
    expected = lora.apply(target, x, y)
    error = mx.abs(mx.stack(drawn).mean(axis=0) - expected).max().item()
    assert error < 0.2 * mx.abs(expected).max().item()
    assert DropoutLora(lora, 0.25, {}).apply(target, x, y) is y


def test_each_target_drops_inputs_of_its_own_choice(load_tiny: Callable[..., SharedModel]) -> None:
    lora = training_lora(random_view(load_tiny("llama"), 1), 0.5, mx.random.key(3))
    assert isinstance(lora, DropoutLora)
    assert len({tuple(key.tolist()) for key in lora.keys.values()}) == len(lora.keys) > 1


def test_an_error_inside_a_forward_takes_the_view_away_again(load_tiny: Callable[..., SharedModel]) -> None:
    model = load_tiny("llama")
    with pytest.raises(RuntimeError, match="broken"), model.lora_context.applied(random_view(model, 1)):
        raise RuntimeError("broken")
    assert model.lora_context.lora is None


def test_targets_with_one_input_are_found_and_share_a_product(load_tiny: Callable[..., SharedModel]) -> None:
    model = load_tiny("llama")
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    assert model.joined[:2] == (
        (f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
        (f"{mlp}.gate_proj", f"{mlp}.up_proj"),
    )
    joined = random_view(model, 1)
    apart = replace(joined, joined={})
    assert joined.joined.keys() == {target for group in model.joined for target in group}
    assert mx.allclose(hidden(model, joined), hidden(model, apart), atol=1e-6).item()


def test_beside_a_base_in_float16_a_young_b_keeps_its_digits(load_tiny: Callable[..., SharedModel]) -> None:
    model = replace(load_tiny("llama"), dtype=mx.float16)
    young = random_adapter(model, 1)
    young = with_arrays(
        young, {name: a * (1e-6 if name.endswith("b") else 1) for name, a in young.arrays.items()}, version=1
    )
    exact, scaling = lora_scaling(young, replace(model, dtype=mx.float32)), lora_scaling(young, model)
    products = [product(single_lora(young.arrays, one)) for one in (exact, scaling, replace(scaling, shift=1.0))]
    error, control = (mx.linalg.norm(one - products[0]).item() for one in products[1:])
    assert error <= 1e-3 * mx.linalg.norm(products[0]).item()
    assert control >= 5e-3 * mx.linalg.norm(products[0]).item()


def product(lora: SingleLora) -> mx.array:
    target = "model.layers.0.mlp.up_proj"
    return lora.a_IR[target].astype(mx.float32) @ lora.b_RO[target].astype(mx.float32)


def test_an_adapter_beyond_the_range_of_a_base_in_float16_is_refused(load_tiny: Callable[..., SharedModel]) -> None:
    model = load_tiny("llama")
    adapter = random_adapter(model, 1)
    large = with_arrays(adapter, {name: array * 2000 for name, array in adapter.arrays.items()}, version=3)
    lora_scaling(large, model)
    with pytest.raises(AdapterError, match=r"policy@3: its B times its scale reaches .*set model\.dtype=bfloat16"):
        lora_scaling(large, replace(model, dtype=mx.float16))
