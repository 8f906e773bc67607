"""How a quantized base is kept, and what tells it from others."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.convert import convert
from mlx_lm.utils import load_model

from parallm.errors import ModelError
from parallm.model import quantized
from parallm.model.kernels import quantized_gemm, unpack
from parallm.model.load import NANO, load_shared_model
from parallm.model.lora.experts import Routing
from parallm.model.quantized import UnpackingLinear, unpacked_bytes
from parallm.model.settings import LoraSettings, ModelSettings
from parallm.model.shared_model import SharedModel

TOKENS = mx.array([[5, 9, 17, 33, 65]])


def load(folder: Path, quantized: str = "auto") -> SharedModel:
    settings = ModelSettings(path=str(folder), quantized=quantized, lora=LoraSettings(rank=4))  # type: ignore[arg-type]
    return load_shared_model(settings)


def kind(model: SharedModel) -> type[nn.Module]:
    return type(model.base.layers[0].mlp.up_proj.linear)


@pytest.mark.cpu
def test_a_cpu_unpacks_weights_where_memory_allows_it(
    tiny_quantized: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_quantized("llama", bits=4)
    needed = unpacked_bytes(load_model(folder)[0], mx.float32)
    monkeypatch.setattr("parallm.model.quantized.free_memory", lambda: 2 * needed)
    assert kind(load(folder)) is nn.Linear
    monkeypatch.setattr("parallm.model.quantized.free_memory", lambda: 2 * needed - 2)
    assert kind(load(folder)) is UnpackingLinear
    assert kind(load(folder, "unpacked")) is nn.Linear


def test_a_way_to_keep_quantized_weights_is_refused_where_there_are_none(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match=r"model\.quantized=packed: no layer of this model is quantized"):
        load(tiny_model("llama"), "packed")


def test_packed_weights_take_the_memory_that_they_take_on_disk(tiny_quantized: Callable[..., Path]) -> None:
    folder = tiny_quantized("llama", bits=4)
    on_disk = (folder / "model.safetensors").stat().st_size
    assert load(folder, "packed").base_bytes < on_disk < 0.3 * load(folder, "unpacked").base_bytes


def test_the_fingerprint_is_of_what_is_stored(tiny_quantized: Callable[..., Path]) -> None:
    four, eight = (tiny_quantized("llama", bits=bits) for bits in (4, 8))
    assert load(four, "packed").sha256 == load(four, "unpacked").sha256
    assert load(four).sha256 != load(eight).sha256


@pytest.mark.cpu
@pytest.mark.parametrize("architecture", ["llama", "starcoder2", "gemma"])
def test_gradients_of_inputs_are_those_of_unpacked_weights(
    architecture: str, tiny_quantized: Callable[..., Path]
) -> None:
    """Through linear layers with and without biases, and an embedding as the head."""
    gradients = []
    for how in ("packed", "unpacked"):
        model = load(tiny_quantized(architecture, bits=4), how)

        def loss(scale: mx.array, model: SharedModel = model) -> mx.array:
            hidden_TH = model.hidden(TOKENS, model.make_cache(), _Scaled(scale))[0]
            return mx.logsumexp(model.head(hidden_TH), axis=-1).sum()

        gradients.append(mx.grad(loss)(mx.array(1.0)).item())
    assert gradients[0] == gradients[1] != 0


def arrays_of(layer: nn.Module) -> list[mx.array]:
    return [layer.weight, layer.scales, layer.biases]


@pytest.mark.parametrize("has_kernel", [False, True])
def test_cuda_unpacks_weights_for_products_of_many_rows(
    has_kernel: bool, tiny_quantized: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And has the gradient of the inputs from the unpacked ones."""
    layer = load(tiny_quantized("llama", bits=4), "packed").base.layers[0].mlp.up_proj.linear
    monkeypatch.setattr(quantized, "on_cuda", lambda: True)
    many = quantized.MANY_ROWS_OF_KERNEL if has_kernel else quantized.MANY_ROWS
    for rows, times in ((many - 1, 0), (many, 2)):
        monkeypatch.setattr(unpack, "fits", lambda *_: has_kernel)
        unpacked = Mock(side_effect=lambda layer, _: mx.dequantize(*arrays_of(layer), group_size=32, bits=4))
        monkeypatch.setattr(quantized, "unpacked", unpacked)
        x = mx.random.normal((1, rows, layer.weight.shape[1] * 8))
        found, expected = (
            mx.grad(lambda x, product=product: mx.sin(product(x)).sum())(x)
            for product in (layer, partial(nn.QuantizedLinear.__call__, layer))
        )
        assert mx.allclose(found, expected, atol=1e-4, rtol=1e-4)
        assert unpacked.call_count == times


def test_cuda_multiplies_the_rows_of_a_step_as_one_matrix(
    tiny_quantized: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = load(tiny_quantized("llama", bits=4), "packed").base.layers[0].mlp.up_proj.linear
    monkeypatch.setattr(quantized, "on_cuda", lambda: True)
    product = Mock(side_effect=mx.quantized_matmul)
    monkeypatch.setattr(mx, "quantized_matmul", product)
    x = mx.random.normal((4, 1, layer.weight.shape[1] * 8))
    found, expected = layer(x), nn.QuantizedLinear.__call__(layer, x)
    assert mx.array_equal(found, expected)
    assert [call.args[0].ndim for call in product.call_args_list] == [2, 3]


def test_products_by_a_kernel_have_a_gradient(
    tiny_quantized: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = load(tiny_quantized("starcoder2", bits=4), "packed").base.layers[0].mlp.c_fc.linear
    x = mx.random.normal((2, 3, layer.weight.shape[1] * 8))

    def multiply(x: mx.array, layer: nn.QuantizedLinear, *, is_whole: bool) -> mx.array:
        return nn.QuantizedLinear.__call__(layer, x)[None]

    monkeypatch.setattr(quantized, "on_cuda", lambda: True)
    monkeypatch.setattr(quantized_gemm, "fits", lambda *_: True)
    monkeypatch.setattr(quantized_gemm, "quantized_gemm", multiply)
    plain = partial(nn.QuantizedLinear.__call__, layer)
    assert mx.allclose(layer(x), plain(x), atol=1e-5)
    found, expected = (mx.grad(lambda x, product=product: mx.sin(product(x)).sum())(x) for product in (layer, plain))
    assert mx.allclose(found, expected, atol=1e-4, rtol=1e-4)


def test_a_backward_keeps_no_unpacked_weights(tmp_path: Path) -> None:
    convert(str(NANO), str(tmp_path / "nano"), quantize=True, q_bits=4, q_group_size=32)
    model = load(tmp_path / "nano", "packed")

    def loss(scale: mx.array) -> mx.array:
        hidden_TH = model.hidden(TOKENS, model.make_cache(), _Scaled(scale))[0]
        return mx.logsumexp(model.head(hidden_TH), axis=-1).sum()

    gradient = mx.grad(loss)(mx.array(1.0))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(gradient)
    assert mx.get_peak_memory() - before < 0.75 * unpacked_bytes(model.base, mx.float32)


class _Scaled:
    """Multiplies the outputs of all targets."""

    def __init__(self, scale: mx.array) -> None:
        self._scale = scale

    def apply(self, target: str, x: mx.array, y: mx.array) -> mx.array:
        return y * self._scale

    def apply_experts(self, target: str, x: mx.array, y: mx.array, _: Routing) -> mx.array:
        return self.apply(target, x, y)

    def dora_scale(self, target: str) -> None:
        return None
