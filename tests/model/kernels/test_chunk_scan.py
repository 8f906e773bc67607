"""The gated delta rule with kernels for its chunks: their source on a CPU, the kernels on a GPU, against operations."""

import mlx.core as mx
import pytest

from parallm.model.kernels import chunk_gates, delta_chunks, unit_lower_inverse
from parallm.model.kernels import chunk_scan as module
from parallm.model.kernels.chunk_scan import fits, shared_bytes
from parallm.model.kernels.cuda import on_cuda
from parallm.model.recurrence.gated_delta import gated_delta
from parallm.model.recurrence.rows import PackedRows, Row
from tests.model.kernels.cuda_on_cpu import CpuKernels, needs_compiler

pytestmark = [] if on_cuda() else [needs_compiler]
KERNELS = (module, chunk_gates, unit_lower_inverse)
"""All kernels that the rule takes."""
LAYOUT = [(40, None), (33, 0), (7, 0), (64, None), (1, 3), (70, 3), (5, None), (100, None)]
"""Lengths, and the row that each continues."""


@pytest.fixture
def kernels(compiled: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> CpuKernels:
    compiled.mutation = "", "", ""
    monkeypatch.setattr(delta_chunks, "has_kernels", lambda: False)  # these would take whole chunks
    if not on_cuda():
        for one in KERNELS:
            monkeypatch.setattr(one, "kernel", compiled)
            monkeypatch.setattr(one, "has_kernels", lambda: True)
    return compiled


def errors(monkeypatch: pytest.MonkeyPatch, *, is_by_channel: bool, keys: int = 32) -> list[float]:
    """Relative errors of outputs, last states and all gradients."""
    rows: list[Row] = []
    heads, values = 2, 64
    for length, after in LAYOUT:
        rows.append(Row(sum(row.length for row in rows), length, after))
    packed = PackedRows(rows, sum(row.length for row in rows) + 3)
    mx.random.seed(4)
    q, k = (mx.random.normal((packed.num_tokens, 1, keys)) for _ in range(2))
    q, k = (array / mx.linalg.norm(array, axis=-1, keepdims=True) for array in (q, k))
    gates = (packed.num_tokens, heads, *([keys] if is_by_channel else []))
    inputs = [
        *(q, k, mx.random.normal((packed.num_tokens, heads, values))),
        -mx.exp(mx.random.normal(gates) - 2),
        mx.random.uniform(shape=(packed.num_tokens, heads)),
        mx.random.normal((len(packed.starting), heads, values, keys)),
    ]

    def forward(
        q: mx.array, k: mx.array, v: mx.array, log_a: mx.array, b: mx.array, initial: mx.array
    ) -> list[mx.array]:
        return list(gated_delta(q, k, v, log_a, b, initial, packed))

    cotangents = [mx.random.normal(array.shape) for array in forward(*inputs)]
    found = [array for part in mx.vjp(forward, inputs, cotangents) for array in part]
    mx.eval(found)
    for one in KERNELS:
        monkeypatch.setattr(one, "has_kernels", lambda: False)
    expected = [array for part in mx.vjp(forward, inputs, cotangents) for array in part]
    pairs = zip(found, expected, strict=True)
    return [float((mx.linalg.norm(one - other) / mx.linalg.norm(other)).item()) for one, other in pairs]


@pytest.mark.parametrize(("is_by_channel", "keys"), [(False, 32), (False, 96), (True, 32)])
@pytest.mark.usefixtures("kernels")
def test_states_and_gradients_are_those_of_the_operations(
    is_by_channel: bool, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert max(errors(monkeypatch, is_by_channel=is_by_channel, keys=keys)) <= 2e-5


MUTATIONS = {
    "a gate forgotten": ("value = gate * value + sums[i][j]", "value = value + sums[i][j]"),
    "what is read is not taken away": ("values[at] - sums[i][j]", "values[at]"),
    "rows that end early": ("count < steps && row", "count + 1 < steps && row"),
    "chunks in one order": ("BACK ? count - 1 - n : n", "n"),
    "no gradient of what is read": (" + more[(chunk * DV + slice + top + i) * DK + channel + j]", ""),
    "a part of the state": ("DV + slice) * DK)[i]", "DV) * DK)[i]"),
}


MUTANTS = [pytest.param(name, marks=[pytest.mark.slow] if place >= 1 else []) for place, name in enumerate(MUTATIONS)]
"""Each compiles a kernel for a CPU; all but the first one are slow."""


@pytest.mark.cpu
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_line_is_found(name: str, kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.mutation = ("chunk_scan", *MUTATIONS[name])
    largest = max(errors(monkeypatch, is_by_channel=False))
    assert not largest <= 0.01


@pytest.mark.usefixtures("kernels")
def test_chunks_of_other_sizes_are_left_to_the_operations() -> None:
    def of(size: int, keys: int, values: int) -> bool:
        return fits(mx.zeros((1, 1, size, values)), mx.zeros((1, 1, size, keys)))

    assert of(64, 128, 128)
    assert not of(48, 128, 128)
    assert not of(64, 48, 128)
    assert not of(64, 128, 48)
    assert not of(64, 512, 128)
    assert shared_bytes(64, 256) <= module.MAX_SHARED_BYTES
