"""Experts of mlx-lm's mixtures whose products are our kernel's, against mlx-lm's own; the kernel runs on a CPU."""

from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear

from parallm.model.kernels import cuda, grouped_gemm
from parallm.model.kernels.compiler import Defines
from parallm.model.kernels.cuda import on_cuda
from parallm.model.lora.experts import Routing, expert_lora
from parallm.model.patches import experts
from parallm.model.patches.experts import GroupedExperts, install_experts, install_products
from tests.model.kernels.cuda_on_cpu import CpuKernels, needs_compiler

pytestmark = [] if on_cuda() else [needs_compiler, pytest.mark.cpu]
INPUTS, HIDDEN, EXPERTS, CHOSEN = 32, 48, 6, 2


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> CpuKernels:
    return CpuKernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def launched(compiled: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were launched."""
    names: list[str] = []
    kernel: Any = cuda.kernel if on_cuda() else compiled

    def launch(name: str, defines: Defines, **more: int) -> Any:
        names.append(name)
        return kernel(name, defines, **more)

    monkeypatch.setattr(grouped_gemm, "kernel", launch)
    monkeypatch.setattr(grouped_gemm, "MIN_ROWS", 100)
    monkeypatch.setattr(experts, "try_grouped_gemm", lambda _: None)
    if not on_cuda():
        monkeypatch.setattr("parallm.model.kernels.cuda.has_kernels", lambda: True)
        monkeypatch.setattr(grouped_gemm, "architecture", lambda: "sm_90")
    install_experts()
    return names


def mixture(*, bias: bool = False) -> SwitchGLU:
    layer = SwitchGLU(INPUTS, HIDDEN, EXPERTS, bias=bias)
    for index, (name, array) in enumerate(tree_flatten(layer.parameters())):
        value = mx.random.normal(array.shape, key=mx.random.key(index)) / INPUTS**0.5
        projection, parameter = name.split(".")
        layer[projection][parameter] = value.astype(mx.float16)
    layer.freeze()
    return layer


def both_ways(layer: SwitchGLU, tokens: int, dtype: mx.Dtype) -> list[mx.array]:
    """The outputs of a mixture and the gradient of its inputs."""
    x = mx.random.normal((1, tokens, INPUTS), key=mx.random.key(7)).astype(mx.float16).astype(dtype)
    chosen = mx.argpartition(mx.random.normal((1, tokens, EXPERTS), key=mx.random.key(8)), CHOSEN)[..., :CHOSEN]
    slopes = mx.random.normal((1, tokens, CHOSEN, INPUTS), key=mx.random.key(9)).astype(mx.float16).astype(dtype)
    outputs, gradients = mx.vjp(lambda x: layer(x, chosen), [x], [slopes])
    return [outputs[0].astype(mx.float32), gradients[0].astype(mx.float32)]


def in_float32(layer: SwitchGLU) -> SwitchGLU:
    wide = mixture(bias="bias" in layer.gate_proj)
    wide.set_dtype(mx.float32)
    return wide


@pytest.mark.parametrize("bias", [False, True])
def test_a_mixture_of_many_rows_computes_as_before(bias: bool, launched: list[str]) -> None:
    layer = mixture(bias=bias)
    install_products(layer, mx.float16)
    assert isinstance(layer.gate_proj, GroupedExperts)
    found, wanted = both_ways(layer, 80, mx.float16), both_ways(in_float32(layer), 80, mx.float32)
    assert launched == ["grouped_gemm_tiles", *["grouped_gemm"] * 6]
    for one, other in zip(found, wanted, strict=True):
        assert mx.abs(one - other).max().item() < 5e-3 * mx.abs(other).max().item()


@pytest.mark.parametrize("bias", [False, True])
def test_lora_is_added_in_the_product(bias: bool, launched: list[str]) -> None:
    layer = mixture(bias=bias)
    install_products(layer, mx.float16)
    x = mx.random.normal((120, 1, INPUTS), key=mx.random.key(7)).astype(mx.float16)
    experts_N = mx.sort(mx.random.randint(0, EXPERTS, (120,), key=mx.random.key(8))).astype(mx.uint32)
    a = mx.random.normal((EXPERTS, INPUTS, 8), key=mx.random.key(9)).astype(mx.float16) / INPUTS**0.5
    b = mx.random.normal((EXPERTS, 8, HIDDEN), key=mx.random.key(10)).astype(mx.float16)
    y = layer.up_proj(x, experts_N, sorted_indices=True)
    lora = expert_lora({"up": a}, {"up": b}, ())
    found = lora.apply("up", x, y, Routing(experts=experts_N, is_sorted=True))
    mx.eval(found)
    wide = in_float32(layer).up_proj(x.astype(mx.float32), experts_N)
    wanted = wide + x.astype(mx.float32) @ a.astype(mx.float32)[experts_N] @ b.astype(mx.float32)[experts_N]
    assert launched.count("grouped_gemm") == 3, "the base's own product, which nobody asks for, A's, and the sum"
    assert mx.abs(found.astype(mx.float32) - wanted).max().item() < 5e-3 * mx.abs(wanted).max().item()


def test_other_experts_are_left_as_they_are(launched: list[str]) -> None:
    layer = mixture()
    install_products(layer, mx.float32)
    assert type(layer.gate_proj) is SwitchLinear
    with grouped_gemm.without_kernel():
        install_products(layer, mx.float16)
    assert type(layer.gate_proj) is SwitchLinear
    layer.gate_proj = QuantizedSwitchLinear(64, 32, EXPERTS)
    install_products(layer, mx.float16)
    assert type(layer.gate_proj) is QuantizedSwitchLinear
    assert type(layer.down_proj) is GroupedExperts


def test_weights_that_are_trained_are_left_to_mlx(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def multiply(self: SwitchLinear, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        asked.append(sorted_indices)
        return x @ mx.zeros((x.shape[-1], self.output_dims), x.dtype)

    monkeypatch.setattr(SwitchLinear, "__call__", multiply)
    layer = mixture()
    install_products(layer, mx.float16)
    layer.gate_proj.unfreeze()
    both_ways(layer, 80, mx.float16)
    assert asked == [True]
    both_ways(layer, 40, mx.float16)  # too few rows
    assert asked == [True] * 4
