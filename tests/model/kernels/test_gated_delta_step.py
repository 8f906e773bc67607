"""The kernels of a decode step of gated delta layers: their source on a CPU, the kernels on a GPU, against operations.

Expected are the operations that other devices compute. In float32 the two differ in the order of sums.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from unittest.mock import Mock

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.gated_delta import normalize_qk
from mlx_lm.models.olmo_hybrid import RMSNormGated
from mlx_lm.models.qwen3_5 import GatedDeltaNet, TextModelArgs
from mlx_lm.models.qwen3_next import ModelArgs, Qwen3NextGatedDeltaNet

from parallm.model.kernels import conv_step as conv_module
from parallm.model.kernels import gated_delta_step as delta_module
from parallm.model.kernels import gated_norm as norm_module
from parallm.model.kernels.columns import columns_of
from parallm.model.kernels.conv_step import conv_step
from parallm.model.kernels.cuda import on_cuda
from parallm.model.kernels.gated_delta_step import Gates, OutputNorm, gated_delta_step, lanes_of
from parallm.model.kernels.gated_norm import gated_norm, plain_gated_norm
from parallm.model.patches import decode_step, recurrence
from parallm.model.patches.decode_step import REPLACED, unit_norm
from parallm.model.recurrence.short_conv import ShortConv, short_conv
from tests.model.kernels.cuda_on_cpu import CpuKernels, needs_compiler

pytestmark = [] if on_cuda() else [needs_compiler]
TOLERANCES = {mx.float32: 2e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}
DTYPES = [mx.float32, mx.bfloat16 if on_cuda() else mx.float16]
Arrays = tuple[mx.array, mx.array]


@pytest.fixture
def kernels(compiled: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> CpuKernels:
    compiled.mutation = "", "", ""
    if not on_cuda():
        for module in (conv_module, delta_module, norm_module):
            monkeypatch.setattr(module, "kernel", compiled)
            monkeypatch.setattr(module, "has_kernels", lambda: True)
        for patched in (decode_step, recurrence):
            monkeypatch.setattr(patched, "has_kernels", lambda: True)
    return compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    rows: int = 3
    key_heads: int = 2
    heads: int = 4
    keys: int = 32
    values: int = 16
    is_by_channel: bool = False
    lower_bound: float | None = None
    allow_neg_eigval: bool = False
    gates: mx.Dtype = mx.float32

    @property
    def widths(self) -> list[int]:
        return [self.key_heads * self.keys, self.key_heads * self.keys, self.heads * self.values]


SIZES = {
    "heads of one size": Sizes(heads=2, keys=16),
    "grouped key heads": Sizes(),
    "many lines of a state": Sizes(rows=2, key_heads=1, heads=3, keys=64, values=72),
    "heads of 256": Sizes(rows=1, key_heads=1, heads=2, keys=256, values=256, gates=mx.float16),
    "a gate per channel": Sizes(key_heads=4, is_by_channel=True),
    "a bound": Sizes(lower_bound=-5.0),
    "a bound per channel, twice": Sizes(key_heads=4, is_by_channel=True, lower_bound=-5.0, allow_neg_eigval=True),
    "negative eigenvalues": Sizes(allow_neg_eigval=True, gates=mx.float16),
}


@dataclass(frozen=True, slots=True)
class Given:
    q: mx.array
    k: mx.array
    v: mx.array
    gates: Gates
    state: mx.array
    output_norm: OutputNorm


def given(sizes: Sizes, dtype: mx.Dtype) -> Given:
    """Random inputs, queries, keys and values as columns of one array."""
    keys = iter(mx.random.split(mx.random.key(0), 9))

    def normal(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=next(keys))

    rows, heads = sizes.rows, sizes.heads
    whole = normal(rows, 1, sum(sizes.widths)).astype(dtype)
    mx.eval(whole)
    parts = zip(columns_of(whole, sizes.widths), (sizes.keys, sizes.keys, sizes.values), strict=True)
    q, k, v = (part.reshape(rows, 1, -1, size) for part, size in parts)
    of_channels = (sizes.keys,) if sizes.is_by_channel else ()
    gates = Gates(
        a=normal(rows, 1, heads, *of_channels).astype(dtype),
        b=normal(rows, 1, heads).astype(dtype),
        A_log=normal(heads, *([1] if of_channels else [])),
        dt_bias=normal(heads, *of_channels).astype(sizes.gates),
        lower_bound=sizes.lower_bound,
        allow_neg_eigval=sizes.allow_neg_eigval,
    )
    weight = normal(sizes.values).astype(dtype)
    norm = OutputNorm(weight=weight, gate=normal(rows, 1, heads, sizes.values).astype(dtype), eps=1e-6)
    return Given(q, k, v, gates, normal(rows, heads, sizes.values, sizes.keys), norm)


def by_operations(one: Given, *, is_normed: bool) -> Arrays:
    """What other devices compute."""
    q, k = normalize_qk(one.q, one.k, inv_scale=one.q.shape[-1] ** -0.5, eps=1e-6)
    gates = one.gates
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrence, "has_kernels", lambda: False)
        outputs, state = recurrence.gated_delta_update(
            *(q, k, one.v, gates.a, gates.b, gates.A_log, gates.dt_bias, one.state),
            lower_bound=gates.lower_bound,
            allow_neg_eigval=gates.allow_neg_eigval,
        )
    norm = one.output_norm
    return plain_gated_norm(outputs, norm.gate, norm.weight, norm.eps) if is_normed else outputs, state


def by_kernel(one: Given, *, is_normed: bool) -> Arrays:
    norm = one.output_norm if is_normed else None
    assert delta_module.fits(one.q, one.k, one.v, one.gates, one.state, norm)
    unit = unit_norm(one.q.shape[-1] ** -0.5, 1e-6)
    return gated_delta_step(one.q, one.k, one.v, one.gates, one.state, unit_norm=unit, output_norm=norm)


def error(found: mx.array, expected: mx.array) -> float:
    """The largest difference, by the largest number."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    wide, other = found.astype(mx.float32), expected.astype(mx.float32)
    return float((mx.abs(wide - other).max() / mx.abs(other).max()).item())


def worst(found: Arrays, expected: Arrays) -> float:
    return max(map(error, found, expected))


# what takes seconds to compile for a CPU is tried in some forms alone
IN_HALF = [
    name for name, sizes in SIZES.items() if on_cuda() or sizes.gates == mx.float16 or name == "a gate per channel"
]
CASES = [*((name, mx.float32) for name in SIZES), *((name, DTYPES[1]) for name in IN_HALF)]


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.usefixtures("kernels")
def test_a_token_is_that_of_the_operations(name: str, dtype: mx.Dtype) -> None:
    one = given(SIZES[name], dtype)
    for is_normed in (False, True) if on_cuda() else (not SIZES[name].allow_neg_eigval,):
        found, expected = by_kernel(one, is_normed=is_normed), by_operations(one, is_normed=is_normed)
        assert worst(found, expected) <= TOLERANCES[dtype]
        assert error(found[1], one.state) > 0.1, "the state changes"


MUTATIONS = {
    "a state of the head before": ("int64_t(blockIdx.x) * DV * DK;", "int64_t(max(0, blockIdx.x - 1)) * DV * DK;"),
    "no key heads in groups": ("q_pitch + head / J * DK", "q_pitch + head % HK * DK"),
    "a gate forgotten": ("part[n][i] *= gate;", ";"),
    "what is read is not taken away": ("(float(values[line]) - read)", "float(values[line])"),
    "outputs without the token": ("T(seen + written * product)", "T(seen)"),
    "keys that are not normalized": ("T(scale_k * float(T(key[i] * of_key)))", "key[i]"),
    "a norm of sums": ("squares / DV + eps", "squares + eps"),
    "a gate of another row": ("z_start + row * z_pitch", "z_start"),
}


MUTANTS = [pytest.param(name, marks=[pytest.mark.slow] if place >= 4 else []) for place, name in enumerate(MUTATIONS)]
"""Each compiles a kernel for a CPU; all but the first ones are slow."""


@pytest.mark.cpu
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_line_is_found(name: str, kernels: CpuKernels) -> None:
    kernels.mutation = ("gated_delta_step", *MUTATIONS[name])
    one = given(SIZES["grouped key heads"], mx.float32)
    assert worst(by_kernel(one, is_normed=True), by_operations(one, is_normed=True)) > 0.01


def test_states_of_other_sizes_and_types_are_left_to_the_operations(kernels: CpuKernels) -> None:
    one = given(SIZES["grouped key heads"], mx.float32)

    def fits(one: Given) -> bool:
        return delta_module.fits(one.q, one.k, one.v, one.gates, one.state, one.output_norm)

    assert fits(one)
    assert not fits(replace(one, state=one.state.astype(mx.float16)))
    assert not fits(replace(one, v=one.v.astype(mx.float16)))
    assert not fits(replace(one, gates=replace(one.gates, A_log=mx.zeros(3))))
    assert not fits(given(Sizes(keys=40), mx.float32))
    assert not fits(given(Sizes(values=264), mx.float32))
    assert not delta_module.fits(one.q, one.k, one.v, one.gates, None)
    assert [lanes_of(keys) for keys in (128, 96, 16, 40)] == [16, 8, 4, None]


def convolution(dtype: mx.Dtype, *, width: int, has_bias: bool) -> tuple[mx.array, mx.array, mx.array, mx.array | None]:
    """Tokens that are columns of one array, a state, weights and a bias."""
    keys = iter(mx.random.split(mx.random.key(1), 4))
    whole = mx.random.normal((5, 1, 64 + 48), key=next(keys)).astype(dtype)
    mx.eval(whole)
    state = mx.random.normal((5, width - 1, 48), key=next(keys)).astype(dtype)
    weight = mx.random.normal((48, width, 1), key=next(keys)).astype(dtype)
    bias = mx.random.normal((48,), key=next(keys)).astype(dtype) if has_bias else None
    return columns_of(whole, [64, 48])[1], state, weight, bias


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "has_bias", "has_silu"), [(4, False, True), (3, True, False), (2, True, True)])
@pytest.mark.usefixtures("kernels")
def test_a_token_of_a_convolution_is_that_of_the_operations(
    width: int, has_bias: bool, has_silu: bool, dtype: mx.Dtype
) -> None:
    x, state, weight, bias = convolution(dtype, width=width, has_bias=has_bias)
    assert conv_module.fits(x, state, weight, bias)
    found, after = conv_step(x, state, weight, bias, has_silu=has_silu)
    padded = mx.concatenate([state, x], axis=1)
    summed = short_conv(padded, weight, bias)
    assert error(found, nn.silu(summed) if has_silu else summed) <= TOLERANCES[dtype]
    assert mx.array_equal(after, padded[:, 1:]).item()


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("old", "new"),
    [("j * K + i", "i * K + j % K"), ("= tokens[i + 1]", "= tokens[i]"), ("start + row * pitch", "row * pitch")],
)
def test_a_wrong_line_of_the_convolution_is_found(kernels: CpuKernels, old: str, new: str) -> None:
    kernels.mutation = "conv_step", old, new
    x, state, weight, bias = convolution(mx.float32, width=4, has_bias=False)
    found, after = conv_step(x, state, weight, bias)
    padded = mx.concatenate([state, x], axis=1)
    wrong = error(found, nn.silu(short_conv(padded, weight, bias))), error(after, padded[:, 1:])
    assert max(wrong) > 0.01


@pytest.mark.usefixtures("kernels")
def test_convolutions_of_other_shapes_are_left_to_the_operations() -> None:
    x, state, weight, bias = convolution(mx.float32, width=4, has_bias=False)
    assert not conv_module.fits(x, None, weight, bias)
    assert not conv_module.fits(x, state[:, 1:], weight, bias)
    assert not conv_module.fits(mx.concatenate([x, x], axis=1), state, weight, bias)
    assert not conv_module.fits(x[..., :46], state[..., :46], weight[:46], bias)
    assert not conv_module.fits(x, state, weight.astype(mx.float16), bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 128, 264])
@pytest.mark.usefixtures("kernels")
def test_a_gated_norm_and_its_gradient_are_those_of_the_operations(size: int, dtype: mx.Dtype) -> None:
    keys = mx.random.split(mx.random.key(2), 4)
    x, gate, cotangent = (mx.random.normal((3, 2, 3, size), key=key).astype(dtype) for key in keys[:3])
    norm = RMSNormGated(size)
    norm.weight = mx.random.normal((size,), key=keys[3]).astype(dtype)
    assert norm_module.fits(x, gate, norm.weight)
    found, found_back = mx.vjp(lambda x, gate: gated_norm(x, gate, norm.weight, norm.eps), [x, gate], [cotangent])
    wanted, wanted_back = mx.vjp(lambda x, gate: norm(x, gate), [x, gate], [cotangent])
    for one, other in zip([*found, *found_back], [*wanted, *wanted_back], strict=True):
        assert error(one, other) <= TOLERANCES[dtype]


@pytest.mark.cpu
def test_a_norm_of_another_head_is_found(kernels: CpuKernels) -> None:
    kernels.mutation = "gated_norm", "gate + head * SIZE", "gate"
    x, gate = (mx.random.normal((3, 64), key=mx.random.key(seed)) for seed in (1, 2))
    ones = mx.ones(64)
    assert error(gated_norm(x, gate, ones, 1e-6), plain_gated_norm(x, gate, ones, 1e-6)) > 0.01


SHAPE = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
UNREAD = dict.fromkeys(
    (
        *("num_hidden_layers", "intermediate_size", "num_experts", "num_experts_per_tok", "decoder_sparse_step"),
        *("shared_expert_intermediate_size", "moe_intermediate_size", "vocab_size", "num_key_value_heads"),
        *("max_position_embeddings", "head_dim"),
    ),
    1,
)
QWEN3_NEXT = {**UNREAD, **SHAPE, "model_type": "", "mlp_only_layers": [], "rms_norm_eps": 1e-6, "rope_theta": 1e4}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "qwen3_5": lambda: GatedDeltaNet(TextModelArgs(**SHAPE)),
    "qwen3_next": lambda: Qwen3NextGatedDeltaNet(ModelArgs(**{**QWEN3_NEXT, "partial_rotary_factor": 0.25})),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.usefixtures("kernels")
def test_steps_of_a_layer_are_those_of_mlx_lm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mx.random.seed(3)
    layer = LAYERS[name]()
    layer.eval()
    layer.conv1d.__class__ = ShortConv
    layer.norm.weight = mx.random.normal(layer.norm.weight.shape)
    inputs = mx.random.normal((3, 7, 64))
    step = Mock(wraps=decode_step._layer_step)
    monkeypatch.setattr(decode_step, "_layer_step", step)
    outputs = []
    for has_kernel in (False, True):
        cache = ArraysCache(2)
        call = type(layer).__call__
        with_step = REPLACED[type(layer)][1](call) if has_kernel else call
        parts = [with_step(layer, inputs[:, :5], None, cache)]
        parts += [with_step(layer, inputs[:, place : place + 1], None, cache) for place in (5, 6)]
        outputs.append([mx.concatenate(parts, axis=1), *cache.cache])
    assert step.call_count == 2
    for found, expected in zip(outputs[1], outputs[0], strict=True):
        assert error(found, expected) <= 1e-4
