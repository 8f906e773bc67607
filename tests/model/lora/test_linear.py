from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from parallm.model.adapters.initial import initial_arrays
from parallm.model.kernels import add_norm, segmented_lora, small_batch_gemm
from parallm.model.kernels import swiglu as swiglu_kernels
from parallm.model.kernels.compiler import Defines
from parallm.model.kernels.cuda import on_cuda
from parallm.model.kernels.segmented_lora import ShrinkOutput
from parallm.model.lora.linear import LoraBinding, LoraContext, LoraLinear, merge_linears
from parallm.model.lora.segmented import SegmentedLora, order_rows, pack_lora, stack_packed
from parallm.model.lora.single import LoraScaling, SingleLora, single_lora
from parallm.model.lora.training import TrainingLora
from parallm.model.patches import forward
from parallm.model.patches.forward import fuse_norms, origin_of, swiglu
from tests.model.kernels.cuda_on_cpu import CpuKernels, needs_compiler

needs_cuda = pytest.mark.skipif(not on_cuda(), reason="needs MLX's CUDA build")
WIDTHS = {"q": 64, "k": 32, "v": 32, "o": 64}
TOLERANCE = 2e-3  # of the largest output: products of float32 are TF32's on a GPU
CALLED = [("q", "k", "v")]


class Layers(nn.Module):
    """Four targets, of which three get the same input."""

    def __init__(self, lora_context: LoraContext, *, bias: bool, bits: int | None = None) -> None:
        super().__init__()
        for name, width in WIDTHS.items():
            linear: nn.Module = nn.Linear(64, width, bias=bias)
            if bits is not None:
                linear = nn.QuantizedLinear.from_linear(linear, group_size=32, bits=bits)
            setattr(self, name, LoraLinear(linear, name, lora_context))

    def __call__(self, x: mx.array) -> list[mx.array]:
        return [self.q(x), self.k(x), self.v(x), self.o(x + 1)]


@pytest.mark.parametrize(("bias", "bits"), [(False, None), (True, None), (True, 4)])
def test_joined_layers_keep_their_weights_as_views_of_one_array(bias: bool, bits: int | None) -> None:
    layers = Layers(LoraContext(), bias=bias, bits=bits)
    x = mx.random.normal((2, 3, 64))
    before = [name.linear(x) for name in (layers.q, layers.k, layers.v)]

    groups = merge_linears(layers, CALLED)

    assert groups == (("q", "k", "v"), ("o",))
    after = [name.linear(x) for name in (layers.q, layers.k, layers.v)]
    assert all(mx.allclose(one, other, atol=1e-5).item() for one, other in zip(before, after, strict=True))
    joined = layers.q.merged._joined(x)
    assert mx.allclose(mx.concatenate(before, axis=-1), joined, atol=1e-5).item()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(4, 1, 64), (0, 1, 64), (64,)])
def test_outputs_of_joined_layers_are_those_of_the_layers(shape: tuple[int, ...], bias: bool) -> None:
    if on_cuda() and bias and 0 in shape:
        pytest.skip("MLX's product of no rows with a bias ends the process on CUDA")
    layers, x = Layers(LoraContext(), bias=bias), mx.random.normal(shape)
    wanted = layers(x)
    merge_linears(layers, CALLED)
    for found, expected in zip(layers(x), wanted, strict=True):
        assert found.shape == expected.shape
        assert mx.allclose(found, expected, atol=1e-5).item()


def test_layers_that_are_not_alike_stay_apart() -> None:
    layers = Layers(LoraContext(), bias=True)
    layers.v.linear = nn.Linear(64, 32, bias=False)

    assert sorted(merge_linears(layers, CALLED)) == [("k",), ("o",), ("q",), ("v",)]


def test_gradients_take_the_way_of_single_layers() -> None:
    lora_context = LoraContext()
    layers = Layers(lora_context, bias=False)
    merge_linears(layers, CALLED)
    arrays = initial_arrays(dict.fromkeys(WIDTHS, (64, 32)), 8, mx.random.key(0))
    lora = single_lora({name: array for name, array in arrays.items() if name.startswith("v.")}, scaling())

    assert layers.q.merged.serves(None)
    assert not layers.q.merged.serves(lora)


class PlainProducts:
    """In place of the kernel that adds up parts, for rows of the base."""

    def __init__(self, y_SBTO: mx.array, dtype: mx.Dtype, widths: Sequence[int], lora: None) -> None:
        self._y, self._widths = y_SBTO.sum(axis=0).astype(dtype), widths

    def split(self) -> list[mx.array]:
        return mx.split(self._y, [sum(self._widths[:count]) for count in range(1, len(self._widths))], axis=-1)

    def added_to(self, other: mx.array) -> mx.array:
        return self._y + other + 100


@pytest.mark.parametrize("splits", [1, 2])
def test_sums_in_parts_are_added_up_with_what_they_are_added_to(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, x = Layers(LoraContext(), bias=True), mx.random.normal((4, 1, 64))
    wanted = layers(x)
    merge_linears(layers, CALLED)

    def multiply(x: mx.array, linear: nn.Linear, _: None, *, is_whole: bool) -> tuple[mx.array, None]:
        return mx.stack([linear(x)] if is_whole or splits == 1 else [linear(x) / splits] * splits), None

    monkeypatch.setattr("parallm.model.lora.linear.fits", lambda *_: True)
    monkeypatch.setattr("parallm.model.lora.linear.small_batch_gemm", multiply)
    monkeypatch.setattr("parallm.model.lora.linear.GroupOutput", PlainProducts)

    for found, expected in zip(layers(x), wanted, strict=True):
        assert mx.allclose(found, expected, atol=1e-5).item()
    by_kernel = 100 if splits > 1 else 0
    assert mx.allclose(x + layers.o(x + 1), x + wanted[-1] + by_kernel, atol=1e-4).item()


@needs_cuda
@pytest.mark.parametrize(("bias", "bits"), [(False, None), (True, None), (True, 4)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_rows_get_the_outputs_that_each_gets_with_its_adapter_alone(bias: bool, bits: int | None, tokens: int) -> None:
    lora_context = LoraContext()
    layers = Layers(lora_context, bias=bias, bits=bits)
    x = mx.random.normal((4, tokens, 64))
    adapters = [random_arrays(seed) for seed in (1, 2)]
    views = [single_lora(arrays, scaling()) for arrays in adapters]
    plain = [outputs_of(layers, lora_context, x, lora) for lora in (None, *views)]

    groups = merge_linears(layers, CALLED)
    flats = [flat for arrays in adapters if (flat := pack_lora(arrays, scaling(), groups, mx.float32)) is not None]
    rows = SegmentedLora(weights=stack_packed(flats), order_B2=order_rows([1, -1, 0, 0], 2))

    for target, found in enumerate(outputs_of(layers, lora_context, x, rows)):
        wanted = mx.stack([plain[choice][target][row] for row, choice in enumerate([2, 0, 1, 1])])
        assert mx.abs(found - wanted).max().item() <= TOLERANCE * mx.abs(wanted).max().item()
    for one, other in zip(outputs_of(layers, lora_context, x, None), plain[0], strict=True):
        assert mx.abs(one - other).max().item() <= TOLERANCE * mx.abs(other).max().item()


@needs_cuda
@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("tokens", [1, 255, 256, 700])
def test_a_prompt_of_any_length_gets_the_outputs_of_its_adapter(tokens: int, is_flat: bool) -> None:
    lora_context = LoraContext()
    layers = Layers(lora_context, bias=False, bits=None)
    x, lora = mx.random.normal((1, tokens, 64)), single_lora(random_arrays(1), scaling())
    plain = outputs_of(layers, lora_context, x, lora)
    flat = pack_lora(random_arrays(1), scaling(), merge_linears(layers, CALLED), mx.float32)
    assert flat is not None
    rows = SegmentedLora(weights=flat, order_B2=order_rows([0] * tokens if is_flat else [0], 1), is_flat=is_flat)
    found = outputs_of(layers, lora_context, x.reshape(-1, 1, 64) if is_flat else x, rows)
    for one, other in zip(found, plain, strict=True):
        wanted = other.reshape(one.shape)
        assert mx.abs(one - wanted).max().item() <= TOLERANCE * mx.abs(wanted).max().item()


class GatedLayers(nn.Module):
    """Two targets of one input, and a gate between them."""

    def __init__(self, lora_context: LoraContext) -> None:
        super().__init__()
        self.gate, self.up = (LoraLinear(nn.Linear(64, 48, bias=False), name, lora_context) for name in ("gate", "up"))

    def __call__(self, x: mx.array) -> mx.array:
        return swiglu(self.gate(x), self.up(x))


@needs_cuda
@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (2, 7)])
def test_halves_of_one_product_are_gated_where_they_are(shape: tuple[int, int]) -> None:
    layers, x = GatedLayers(LoraContext()), mx.random.normal((*shape, 64))
    wanted = layers(x)
    assert merge_linears(layers, [("gate", "up")]) == (("gate", "up"),)
    gate, up = layers.gate(x), layers.up(x)
    assert origin_of(gate).gated is origin_of(up).gated  # type: ignore[attr-defined]
    found = swiglu(gate, up)
    assert found.shape == wanted.shape
    assert mx.abs(found - wanted).max().item() <= TOLERANCE * mx.abs(wanted).max().item()
    swapped = swiglu(up, gate)
    assert mx.abs(swapped - wanted).max().item() > TOLERANCE * mx.abs(wanted).max().item()


BLOCK = {"o": (64, 64), "q": (64, 96), "k": (64, 32), "v": (64, 32), "gate": (64, 64), "up": (64, 64), "down": (64, 64)}
BLOCK_CALLED = [("q", "k", "v"), ("gate", "up")]


class Block(nn.Module):
    """A layer without attention, whose norms stand between residual adds and targets of one input."""

    def __init__(self, lora_context: LoraContext) -> None:
        super().__init__()
        for name, (inputs, width) in BLOCK.items():
            setattr(self, name, LoraLinear(nn.Linear(inputs, width, bias=name in "qkv"), name, lora_context))
        self.norms = [nn.RMSNorm(64), nn.RMSNorm(64)]
        self.set_dtype(mx.float16)
        fuse_norms(self)

    def __call__(self, x: mx.array) -> list[mx.array]:
        stream = x + self.o(x)
        r = self.norms[0](stream)
        q, k, v = self.q(r), self.k(r), self.v(r)
        stream = stream + self.o(q[..., :64])
        r = self.norms[1](stream)
        return [q, k, v, stream + self.down(swiglu(self.gate(r), self.up(r)))]


class PlainOutput:
    """In place of `GroupOutput`, whose kernel is not run on a CPU."""

    def __init__(self, y_SBTO: mx.array, dtype: mx.Dtype, widths: Sequence[int], lora: ShrinkOutput | None) -> None:
        self._y, self._dtype, self._widths = y_SBTO.astype(mx.float32).sum(axis=0), dtype, widths
        if lora is None:
            return
        b_VKO, count = lora.weights.joined_b().astype(mx.float32), lora.weights.array_VN.shape[0]
        hidden_BVK = lora.hidden_PBTK.sum(axis=0).reshape(len(self._y), count, -1)
        pairs: list[list[int]] = lora.order_B2.tolist()
        own = {row: hidden_BVK[row, version] @ b_VKO[version] for row, version in pairs if version >= 0}
        zeros = mx.zeros(self._y.shape[-1])
        self._y += mx.stack([own.get(row, zeros) for row in range(len(self._y))])[:, None]

    def split(self) -> list[mx.array]:
        cuts = [sum(self._widths[:count]) for count in range(1, len(self._widths))]
        return mx.split(self._y.astype(self._dtype), cuts, axis=-1)

    def gated(self) -> mx.array:
        gate, up = self.split()
        return nn.silu(gate) * up

    def added_to(self, other: mx.array) -> mx.array:
        return (self._y + other).astype(self._dtype)


class NotedKernels(CpuKernels):
    """Notes which kernels are asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked: list[tuple[str, Defines]] = []

    def __call__(self, name: str, defines: Defines = (), *, shared_memory: int = 0) -> Any:
        self.asked.append((name, defines))
        return super().__call__(name, defines, shared_memory=shared_memory)


@pytest.fixture
def believe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], NotedKernels]:
    """Lets layers believe from now on that they are on a Hopper GPU, whose kernels run here."""

    def patch() -> NotedKernels:
        kernels = NotedKernels(tmp_path)
        for module in (add_norm, segmented_lora, small_batch_gemm, swiglu_kernels):
            monkeypatch.setattr(module, "kernel", kernels)
        for module in (add_norm, segmented_lora, small_batch_gemm, forward):
            monkeypatch.setattr(module, "has_kernels", lambda: True)
        monkeypatch.setattr(small_batch_gemm, "architecture", lambda: "sm_90")
        monkeypatch.setattr(add_norm, "max_shared_bytes", lambda: 227 << 10)
        monkeypatch.setattr("parallm.model.lora.linear.GroupOutput", PlainOutput)
        return kernels

    return patch


@needs_compiler
@pytest.mark.cpu
@pytest.mark.parametrize("versions", [1, 2])
def test_a_block_computes_the_same_with_lora_in_its_norms_and_products(
    versions: int, believe: Callable[[], NotedKernels]
) -> None:
    lora_context, chosen = LoraContext(), LoraScaling(dict.fromkeys(BLOCK, 2.0), {}, mx.float16, BLOCK_CALLED)
    mx.random.seed(3)
    block, x = Block(lora_context), mx.random.normal((5, 1, 64)).astype(mx.float16)
    adapters = [
        {
            name: mx.random.normal(shape) / 8
            for target, (inputs, width) in BLOCK.items()
            for name, shape in ((f"{target}.lora_a", (inputs, 8)), (f"{target}.lora_b", (8, width)))
        }
        for _ in range(versions)
    ]
    singles = [single_lora(arrays, chosen) for arrays in adapters]
    plain = [outputs_of(block, lora_context, x, lora) for lora in (None, *singles)]
    index = [0, -1, 0, versions - 1, 0]
    wanted = [mx.stack([plain[version + 1][place][row] for row, version in enumerate(index)]) for place in range(4)]

    kernels = believe()
    groups = merge_linears(block, BLOCK_CALLED)
    packed = [one for arrays in adapters if (one := pack_lora(arrays, chosen, groups, mx.float16)) is not None]
    rows = SegmentedLora(weights=stack_packed(packed), order_B2=order_rows(index, versions))
    found = outputs_of(block, lora_context, x, rows)

    for one, other in zip(found, wanted, strict=True):
        assert mx.abs(one - other).max().item() <= 1e-2 * mx.abs(other).max().item()
    products = [dict(defines) for name, defines in kernels.asked if name == "small_batch_gemm"]
    assert [product["PLUS"] for product in products].count(True) == (3 if versions == 1 else 0), "one is gated"


@needs_cuda
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_gated_targets_are_trained_as_one_product(dtype: mx.Dtype) -> None:
    layers, lora_context = GatedLayers(LoraContext()), LoraContext()
    layers.set_dtype(dtype)
    for layer in (layers.gate, layers.up):
        layer.lora_context = lora_context
    shapes = {"gate": (64, 48), "up": (64, 48)}
    arrays = {name: array / 4 + 0.1 for name, array in initial_arrays(shapes, 8, mx.random.key(0)).items()}
    chosen = LoraScaling(dict.fromkeys(shapes, 2.0), {}, dtype, [("gate", "up")])
    lora = single_lora(arrays, chosen, widens=True)
    x, structure = mx.random.normal((5, 7, 64)).astype(dtype), lora.structure()

    def gradients(make: Callable[[SingleLora], LoraBinding]) -> list[mx.array]:
        def total(weights: list[mx.array], x: mx.array) -> mx.array:
            with lora_context.applied(make(structure.lora(weights))):
                y = layers(x)
            return (y * mx.sin(mx.arange(y.size).reshape(y.shape))).sum()

        value, (found, of_x) = mx.value_and_grad(total, argnums=(0, 1))(lora.arrays(), x)
        return [value, of_x, *found]

    wanted = gradients(lambda adapter: adapter)
    merge_linears(layers, [("gate", "up")])
    apart = gradients(TrainingLora)
    layers(x)
    together = gradients(TrainingLora)
    tolerance = 2e-2 if dtype == mx.bfloat16 else 1e-2
    for one, other, expected in zip(apart, together, wanted, strict=True):
        largest = mx.abs(expected).max().item()
        assert mx.abs(one - expected).max().item() <= tolerance * largest
        assert mx.abs(other - expected).max().item() <= tolerance * largest


def outputs_of(layers: Layers, lora_context: LoraContext, x: mx.array, lora: object) -> Sequence[mx.array]:
    with lora_context.applied(lora):  # type: ignore[arg-type]
        found = layers(x)
    mx.eval(found)
    return found


def random_arrays(seed: int) -> dict[str, mx.array]:
    mx.random.seed(seed)
    sizes = {target: {"lora_a": (64, 4), "lora_b": (4, width)} for target, width in WIDTHS.items()}
    return {
        f"{target}.{name}": mx.random.normal(shape) for target, parts in sizes.items() for name, shape in parts.items()
    }


def scaling() -> LoraScaling:
    return LoraScaling(dict.fromkeys(WIDTHS, 2.0), {}, mx.float32, CALLED)
