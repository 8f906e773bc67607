"""What the gated delta rule takes of a layer's projections: the kernels' source on a CPU, the kernels on a GPU, against
the operations of mlx-lm's layers."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import qwen3_5

from parallm.model.kernels import delta_chunks
from parallm.model.kernels import delta_inputs as module
from parallm.model.kernels import gated_norm as norm_module
from parallm.model.kernels import short_conv as conv_module
from parallm.model.kernels.cuda import on_cuda
from parallm.model.kernels.delta_inputs import DeltaLayer, delta_inputs, fits
from parallm.model.patches import decode_step, recurrence
from parallm.model.patches.decode_step import UNIT_EPS, mlx_lm_normalize_qk, unit_norm
from parallm.model.recurrence import gated_delta
from parallm.model.recurrence.rows import PackedRows, Row
from parallm.model.recurrence.short_conv import packed_short_conv, packed_windows
from tests.model.kernels.cuda_on_cpu import CpuKernels, needs_compiler

pytestmark = [] if on_cuda() else [needs_compiler]
ROWS = PackedRows([Row(1, 6), Row(7, 1), Row(8, 9, after=0), Row(17, 2)], 21)
WIDTH = 4
KERNELS = (module, norm_module, delta_chunks, decode_step)
"""Modules that ask whether there are kernels."""


@pytest.fixture
def kernels(compiled: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> CpuKernels:
    compiled.mutation = "", "", ""
    if not on_cuda():
        for one in (module, conv_module):
            monkeypatch.setattr(one, "kernel", compiled)
        monkeypatch.setattr(module, "has_kernels", lambda: True)
    return compiled


def layer_of(dtype: mx.Dtype, *, key_heads: int = 2, heads: int = 4, sizes: tuple[int, int] = (64, 32)) -> DeltaLayer:
    channels = 2 * key_heads * sizes[0] + heads * sizes[1]
    return DeltaLayer(
        conv_NK1=mx.random.normal((channels, WIDTH, 1)).astype(dtype),
        A_log_H=mx.random.normal((heads,)),
        dt_bias_H=mx.random.normal((heads,)).astype(dtype),
        unit_norm=unit_norm(sizes[0] ** -0.5, UNIT_EPS),
        key_heads=key_heads,
        key_size=sizes[0],
        value_size=sizes[1],
    )


def by_operations(layer: DeltaLayer, x: mx.array, a: mx.array, b: mx.array) -> list[mx.array]:
    convolved = nn.silu(packed_short_conv(x, layer.conv_NK1, None, ROWS))
    keys = layer.key_heads * layer.key_size
    q, k, v = mx.split(convolved, [keys, 2 * keys], axis=-1)
    q, k = (array.reshape(len(x), layer.key_heads, -1) for array in (q, k))
    q, k = mlx_lm_normalize_qk(q, k, inv_scale=layer.key_size**-0.5, eps=UNIT_EPS)
    log_a = -mx.exp(layer.A_log_H) * nn.softplus(a.astype(mx.float32) + layer.dt_bias_H)
    return [q, k, v.reshape(len(x), layer.heads, -1), log_a, mx.sigmoid(b)]


def errors(dtype: mx.Dtype, layer: DeltaLayer) -> list[float]:
    """Relative errors of all outputs and gradients."""
    channels = len(layer.conv_NK1)
    arrays = [
        mx.random.normal((ROWS.num_tokens, width)).astype(dtype) for width in (channels, layer.heads, layer.heads)
    ]
    windows = packed_windows(ROWS, WIDTH, 0)

    def forward(x: mx.array, a: mx.array, b: mx.array) -> list[mx.array]:
        return list(delta_inputs(layer, x, a, b, windows))

    cotangents = [mx.random.normal(array.shape).astype(array.dtype) for array in forward(*arrays)]
    found = [array for part in mx.vjp(forward, arrays, cotangents) for array in part]
    operations = mx.vjp(lambda *given: by_operations(layer, *given), arrays, cotangents)
    expected = [array for part in operations for array in part]
    return [
        float((mx.linalg.norm(one - other) / mx.linalg.norm(other)).item()) for one, other in _wide(found, expected)
    ]


def _wide(found: list[mx.array], expected: list[mx.array]) -> list[tuple[mx.array, mx.array]]:
    pairs = zip(found, expected, strict=True)
    return [(one.astype(mx.float32), other.astype(mx.float32)) for one, other in pairs]


@pytest.fixture(autouse=True)
def seeded() -> None:
    mx.random.seed(6)


@pytest.mark.parametrize(
    ("dtype", "allowed"), [(mx.float32, 1e-5), pytest.param(mx.float16, 3e-3, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("sizes", [(64, 32), pytest.param((32, 128), marks=pytest.mark.slow)])
@pytest.mark.usefixtures("kernels")
def test_outputs_and_gradients_are_those_of_the_operations(
    dtype: mx.Dtype, allowed: float, sizes: tuple[int, int]
) -> None:
    assert max(errors(dtype, layer_of(dtype, sizes=sizes))) <= allowed


MUTATIONS = {
    ("delta_inputs", "unit < KEY_HEADS ? q : k", "q"),
    ("delta_inputs", "-expf(float(rates", "expf(float(rates"),
    ("delta_inputs_gradient", "own[j] - along *", "own[j] - 0 * along *"),
    ("delta_inputs_gradient", "(1.0f + sums[j] * (1.0f - open))", "1.0f"),
    ("delta_inputs_gradient", "strength * (1.0f - strength)", "strength"),
}


@pytest.mark.cpu
@pytest.mark.parametrize(
    "mutation",
    [pytest.param(one, marks=[pytest.mark.slow] if place else []) for place, one in enumerate(sorted(MUTATIONS))],
)
def test_a_wrong_line_is_found(mutation: tuple[str, str, str], kernels: CpuKernels) -> None:
    kernels.mutation = mutation
    assert not max(errors(mx.float32, layer_of(mx.float32))) <= 0.01


@pytest.mark.usefixtures("kernels")
def test_other_layers_are_left_to_the_operations() -> None:
    layer = layer_of(mx.float32)
    assert fits(layer, None, mx.float32)
    assert not fits(layer, mx.zeros(4), mx.float32)
    assert not fits(layer, None, mx.float16)
    assert not fits(layer_of(mx.float32, sizes=(48, 32)), None, mx.float32)


@pytest.mark.parametrize("is_wrong", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "with a wrong line"])
def test_a_layer_of_packed_rows_has_the_numbers_of_its_operations(
    is_wrong: bool, kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_wrong and on_cuda():
        pytest.skip("changes the source that a CPU compiles")
    if is_wrong:
        kernels.mutation = "gated_norm_gradient", "of_normed[c][j] - along", "of_normed[c][j] + along"
    if not on_cuda():
        for one in (norm_module, delta_chunks):
            monkeypatch.setattr(one, "kernel", kernels)
        monkeypatch.setattr(delta_chunks, "max_shared_bytes", lambda: 227 * 1024)
        monkeypatch.setattr(gated_delta, "CPU_CHUNK", delta_chunks.CHUNK)
    monkeypatch.setattr(recurrence, "try_kernels", lambda: None)
    # what is installed below ends with the test
    monkeypatch.setattr(qwen3_5.GatedDeltaNet, "__call__", qwen3_5.GatedDeltaNet.__call__)
    for one in KERNELS:
        monkeypatch.setattr(one, "has_kernels", lambda: True)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 64, "vocab_size": 100}
    sizes |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_conv_kernel_dim": WIDTH}
    arguments = qwen3_5.TextModelArgs.from_dict(sizes | {"linear_key_head_dim": 32, "linear_value_head_dim": 32})
    model = qwen3_5.TextModel(arguments)
    layer = model.model.layers[0].linear_attn
    layer.conv1d.weight, layer.A_log = mx.random.normal(layer.conv1d.weight.shape), mx.random.normal((2,))
    recurrence.install_recurrence(model)
    packed = PackedRows([Row(0, 60), Row(60, 20, after=0), Row(80, 70)], 160)
    inputs, slopes = (mx.random.normal((packed.num_tokens, 1, 64)) for _ in range(2))

    def run() -> list[mx.array]:
        computed = mx.vjp(lambda x: [layer(x, None, recurrence.PackedStates(packed, 2))], [inputs], [slopes])
        mx.eval(computed)
        return [array for part in computed for array in part]

    found = run()
    for one in KERNELS:
        monkeypatch.setattr(one, "has_kernels", lambda: False)
    largest = max(
        float((mx.linalg.norm(one - other) / mx.linalg.norm(other)).item()) for one, other in _wide(found, run())
    )
    assert (largest <= 1e-5) is not is_wrong
