"""The gated delta rule by kernels for whole chunks: their source on a CPU, the kernels on a GPU, against operations."""

from collections.abc import Sequence

import mlx.core as mx
import pytest

from parallm.model.kernels import delta_chunks as module
from parallm.model.kernels.cuda import on_cuda
from parallm.model.recurrence import gated_delta as rule
from parallm.model.recurrence.gated_delta import gated_delta
from parallm.model.recurrence.rows import PackedRows, Row
from tests.model.kernels.cuda_on_cpu import CpuKernels, needs_compiler

pytestmark = [] if on_cuda() else [needs_compiler]
LAYOUT = [(40, None), (33, 0), (64, None), (1, 2), (70, 2), (100, None)]
"""Lengths, and the row that each continues."""
SHORT = [(70, None)]


@pytest.fixture
def kernels(compiled: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> CpuKernels:
    compiled.mutation = "", "", ""
    if not on_cuda():
        monkeypatch.setattr(module, "kernel", compiled)
        monkeypatch.setattr(module, "has_kernels", lambda: True)
        monkeypatch.setattr(module, "max_shared_bytes", lambda: 227 * 1024)
        monkeypatch.setattr(rule, "CPU_CHUNK", module.CHUNK)
    return compiled


def errors(
    monkeypatch: pytest.MonkeyPatch,
    layout: Sequence[tuple[int, int | None]],
    *,
    dtype: mx.Dtype = mx.float32,
    keys: int = 32,
    values: int = 32,
    heads: tuple[int, int] = (1, 1),
    has_initial: bool = True,
) -> list[float]:
    """Relative errors of outputs, last states and all gradients; `heads` are those of keys, and of values."""
    rows: list[Row] = []
    for length, after in layout:
        rows.append(Row(sum(row.length for row in rows) + 1, length, after))  # padding before the first, and after
    packed = PackedRows(rows, sum(row.length for row in rows) + 3)
    mx.random.seed(4)
    q, k = (mx.random.normal((packed.num_tokens, heads[0], keys)) for _ in range(2))
    q, k = (array / mx.linalg.norm(array, axis=-1, keepdims=True) for array in (q, k))
    inputs = [
        *(q, k, mx.random.normal((packed.num_tokens, heads[1], values))),
        -mx.exp(mx.random.normal((packed.num_tokens, heads[1])) - 2),
        mx.random.uniform(shape=(packed.num_tokens, heads[1])),
    ]
    inputs = [array if place == 3 else array.astype(dtype) for place, array in enumerate(inputs)]
    if has_initial:
        inputs.append(mx.random.normal((len(packed.starting), heads[1], values, keys)))

    def forward(*given: mx.array) -> list[mx.array]:
        q, k, v, log_a, b, *initial = given
        return list(gated_delta(q, k, v, log_a, b, initial[0] if initial else None, packed))

    assert module.fits(inputs[:5], module.CHUNK)
    cotangents = [mx.random.normal(array.shape).astype(array.dtype) for array in forward(*inputs)]
    found = [array for part in mx.vjp(forward, inputs, cotangents) for array in part]
    mx.eval(found)
    monkeypatch.setattr(module, "has_kernels", lambda: False)
    inputs, cotangents = ([array.astype(mx.float32) for array in arrays] for arrays in (inputs, cotangents))
    expected = [array for part in mx.vjp(forward, inputs, cotangents) for array in part]
    pairs = zip(found, expected, strict=True)
    return [float((mx.linalg.norm(one - other) / mx.linalg.norm(other)).item()) for one, other in pairs]


@pytest.mark.usefixtures("kernels")
def test_rows_that_continue_others_have_the_numbers_of_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(errors(monkeypatch, LAYOUT)) <= 5e-6


@pytest.mark.slow
@pytest.mark.parametrize("min_blocks", [1, module.MIN_BLOCKS], ids=["large slices", "small slices"])
@pytest.mark.parametrize(("keys", "values"), [(32, 128), (64, 64)])
@pytest.mark.usefixtures("kernels")
def test_heads_of_other_sizes_have_them_too(
    keys: int, values: int, min_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MIN_BLOCKS", min_blocks)
    assert max(errors(monkeypatch, SHORT, keys=keys, values=values)) <= 5e-6


@pytest.mark.usefixtures("kernels")
def test_value_heads_share_key_heads_and_nothing_but_results_is_rounded_to_16_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outputs, last, *gradients = errors(monkeypatch, SHORT, dtype=mx.float16, heads=(1, 2), has_initial=False)
    assert max(outputs, *gradients) <= 5e-4
    assert max(last, gradients[3]) <= 5e-6, "the last states, and the gradient of log a"


MUTATIONS = [
    ("delta_terms", "strengths[m] * x, strengths[m] * y", "x, y"),
    ("delta_terms", "merge_blocks<32>(lower, inverse);", ""),
    ("delta_terms", "strengths[k] * from_start[k]", "strengths[k]"),
    ("delta_terms", "return lower[k * SQUARE + m];", "return lower[m * SQUARE + k];"),
    ("delta_terms", "after += t > threadIdx.x", "after += t >= threadIdx.x"),
    ("delta_scan", "x *= all, y *= all", ""),
    ("delta_scan", "u0 -= x, u1 -= y", "u0 += x, u1 += y"),
    ("delta_scan", "count < steps && row", "count + 1 < steps && row"),
    ("delta_scan", "BACK ? count - 1 - n : n", "n"),
    ("delta_scan", "* from_start[k]; }", "; }"),
    ("delta_outputs", "x *= gate, y *= gate", ""),
    ("delta_outputs", "if (tokens[m] >= 0)", "if (tokens[m] >= 0 && place < int64_t(chunks) * heads)"),
    ("delta_gradient", "put_pair(state + m * LINE + n, -x, -y)", "put_pair(state + m * LINE + n, x, y)"),
    ("delta_gradient", "delta[m * SQUARE + k] + delta[k * SQUARE + m]", "delta[m * SQUARE + k]"),
    ("delta_gradient", "(threadIdx.x == C - 1 ? gate * all : 0.0f)", "0.0f"),
    ("delta_gradient", "k < n ? 1.0f : 0.0f", "k <= n ? 1.0f : 0.0f"),
    ("delta_gradient", "sums[2] + of_removed + sums[4]", "sums[2] + of_removed"),
    ("delta_gradient", "m >= n ? x + starts[m] : ends[m]", "m >= n ? x + starts[m] : 0.0f"),
]
MUTANTS = [pytest.param(*one, marks=[pytest.mark.slow] if place >= 1 else []) for place, one in enumerate(MUTATIONS)]
"""Each compiles a kernel for a CPU; all but the first one are slow."""


@pytest.mark.cpu
@pytest.mark.parametrize(("name", "old", "new"), MUTANTS)
def test_a_wrong_line_is_found(
    name: str, old: str, new: str, kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels.mutation = name, old, new
    assert not max(errors(monkeypatch, SHORT)) <= 1e-3


@pytest.mark.usefixtures("kernels")
def test_other_chunks_and_smaller_gpus_are_left_to_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(dtype: mx.Dtype, size: int, *, chunk: int = 64, log_a: tuple[int, ...] = (8, 2)) -> bool:
        heads = mx.zeros((8, 2, size), dtype)
        return module.fits([heads, heads, heads, mx.zeros(log_a), mx.zeros((8, 2), dtype)], chunk)

    assert of(mx.bfloat16, 128)
    assert of(mx.float32, 64)
    assert not of(mx.float32, 128)
    assert not of(mx.bfloat16, 256)
    assert not of(mx.bfloat16, 48)
    assert not of(mx.bfloat16, 128, chunk=32)
    assert not of(mx.bfloat16, 128, log_a=(8, 2, 128))
    monkeypatch.setattr(module, "max_shared_bytes", lambda: 99 * 1024)
    assert not of(mx.bfloat16, 128)


def test_scans_of_any_number_of_rows_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "max_shared_bytes", lambda: 227 * 1024)
    sizes = (("T", mx.bfloat16), ("DK", 128), ("DV", 128))
    scan = (module.SCAN, (*sizes, ("THREADS", 256), ("SLICE", 32), ("BACK", False)))
    listed = module.with_any_rows([("other", ()), scan])
    assert listed[:2] == [("other", ()), scan]
    assert {dict(defines).get("SLICE") for _, defines in listed} == {None, 32, 64, 128}
    assert len(listed) == 4
