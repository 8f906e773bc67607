"""Attention of a step over pages against plain indexing: the kernel's source on a CPU, the kernel on a GPU."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from parallm.model.kernels import paged_attention
from parallm.model.kernels.columns import columns_of
from parallm.model.kernels.cuda import on_cuda
from parallm.model.kernels.decode_attention import RotaryAngles
from parallm.model.kernels.page_write import PAGE
from parallm.model.kernels.paged_attention import append_and_attend, fits, plan_pages, queries_at_once
from tests.model.kernels.cuda_on_cpu import CpuKernels, needs_compiler
from tests.model.kernels.test_page_write import turned

SCALE = 0.11
needs_cuda = pytest.mark.skipif(not on_cuda(), reason="needs MLX's CUDA build")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    lengths: tuple[int, ...]
    heads: tuple[int, int] = (8, 2)
    size: int = 64
    window: int = 0
    dims: int = 0
    traditional: bool = False
    has_sinks: bool = False


CASES = {
    "rows around a page's end": Case(lengths=(0, 63, 64, 65, 200, 1, 300)),
    "one long row": Case(lengths=(900,), heads=(7, 1)),
    "a window": Case(lengths=(300, 10, 500, 63), window=100),
    "a window of whole pages": Case(lengths=(320, 10, 500, 64), window=64, heads=(4, 2)),
    "one query of a head": Case(lengths=(130, 63, 5), heads=(2, 2), size=96),
    "a tile of queries": Case(lengths=(130, 63, 5), heads=(16, 1), size=80),
    "several tiles of queries": Case(lengths=(130, 63, 5), heads=(24, 1), has_sinks=True),
    "sinks": Case(lengths=(130, 63, 5), has_sinks=True),
    "rotated halves": Case(lengths=(130, 64, 5), dims=64),
    "rotated neighbours": Case(lengths=(130, 64, 5), dims=32, traditional=True),
    "large heads": Case(lengths=(130, 64), heads=(2, 1), size=256, dims=64),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    heads: tuple[mx.array, mx.array, mx.array]
    pools: tuple[mx.array, mx.array]
    tables: mx.array
    lengths: mx.array
    rotary: RotaryAngles | None
    sinks: mx.array | None


def step_of(case: Case, dtype: mx.Dtype = mx.float16) -> Step:
    """Rows whose positions after the last are NaN, in pages at random; heads are columns of one product."""
    rng, rows, (queries, pairs) = np.random.default_rng(0), len(case.lengths), case.heads
    counts = [length // PAGE + 1 for length in case.lengths]
    tables = np.zeros((rows, max(counts) + 1), np.int32)
    pages = iter(rng.permutation(sum(counts)) + 1)
    pools = rng.standard_normal((2, sum(counts) + 1, pairs, PAGE, case.size)).astype(np.float16)
    for row, (count, length) in enumerate(zip(counts, case.lengths, strict=True)):
        tables[row, :count] = [next(pages) for _ in range(count)]
        pools[:, tables[row, count - 1], :, length % PAGE :] = np.nan
    whole = mx.array(rng.standard_normal((rows, 1, (queries + 2 * pairs) * case.size))).astype(dtype)
    columns = columns_of(whole, [heads * case.size for heads in (queries, pairs, pairs)])
    queries_BQ1D, keys_BH1D, values_BH1D = (
        part.reshape(rows, 1, -1, case.size).transpose(0, 2, 1, 3) for part in columns
    )
    angles = mx.array(rng.uniform(0, 6, (rows, case.dims // 2)))
    pairs_2 = mx.stack([mx.cos(angles), mx.sin(angles)], axis=-1).astype(mx.float32)
    return Step(
        heads=(queries_BQ1D, keys_BH1D, values_BH1D),
        pools=(mx.array(pools[0]).astype(dtype), mx.array(pools[1]).astype(dtype)),
        tables=mx.array(tables),
        lengths=mx.array(case.lengths, mx.int32),
        rotary=RotaryAngles(angles=pairs_2, traditional=case.traditional) if case.dims else None,
        sinks=mx.array(rng.standard_normal(queries).astype(np.float32)) if case.has_sinks else None,
    )


def plain(case: Case, step: Step) -> tuple[np.ndarray, list[np.ndarray]]:
    """What is attended, and the pools after the write."""
    queries, keys = (np.array(turned(heads[:, :, 0], step.rotary).astype(mx.float32)) for heads in step.heads[:2])
    values, tables = np.array(step.heads[2][:, :, 0].astype(mx.float32)), np.array(step.tables)
    pools = [np.array(pool.astype(mx.float32)) for pool in step.pools]
    found, (heads, pairs) = np.zeros_like(queries), case.heads
    for row, length in enumerate(case.lengths):
        for pool, new in zip(pools, (keys, values), strict=True):
            pool[tables[row, length // PAGE], :, length % PAGE] = new[row]
        own = [pool[tables[row]].swapaxes(0, 1).reshape(pairs, -1, case.size)[:, : length + 1] for pool in pools]
        first = max(0, length + 1 - case.window) if case.window else 0
        for head in range(heads):
            scores = own[0][head * pairs // heads, first:] @ queries[row, head] * SCALE
            sinks = [] if step.sinks is None else [step.sinks[head].item()]
            most = max(scores.max(), *sinks, -np.inf)
            weights = np.exp(scores - most)
            total = weights.sum() + sum(np.exp(sink - most) for sink in sinks)
            found[row, head] = weights @ own[1][head * pairs // heads, first:] / total
    return found, pools


def attend(case: Case, step: Step, *, is_right: bool = True) -> mx.array:
    query_heads, key_heads = case.heads
    plan = plan_pages(
        step.tables,
        step.lengths,
        query_heads=query_heads,
        key_heads=key_heads,
        head_size=case.size,
        window=case.window,
    )
    attended = append_and_attend(
        *step.heads,
        *step.pools,
        plan,
        scale=SCALE,
        rotary=step.rotary,
        sinks_Q=step.sinks,
    )
    mx.eval(attended, plan.counts)
    assert not is_right or not plan.counts[2:].any().item(), "the next layer counts from zero"
    return attended[:, :, 0]


def difference(found: mx.array, expected: np.ndarray) -> float:
    """NaN counts as one."""
    return float(np.nan_to_num(np.abs(np.array(found.astype(mx.float32)) - expected), nan=1.0).max())


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> CpuKernels:
    return CpuKernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def on_cpu(kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> CpuKernels:
    monkeypatch.setattr(paged_attention, "kernel", kernels)
    kernels.mutation = "", "", ""
    return kernels


@needs_compiler
@pytest.mark.parametrize(
    ("name", "processors"),
    [  # every form with one of the two: the compiler takes a second for each
        pytest.param(name, processors, marks=() if place % 2 == number else pytest.mark.slow)
        for place, name in enumerate(CASES)
        for number, processors in enumerate((1, 4))
    ],
)
def test_threads_compute_what_plain_indexing_does(
    name: str, processors: int, on_cpu: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one processor shares end in the middle of rows; with several of them a row lies in several shares."""
    monkeypatch.setattr(paged_attention, "PROCESSORS", processors)
    case, on_cpu.seed = CASES[name], processors
    step = step_of(case)
    expected, pools = plain(case, step)
    assert difference(attend(case, step), expected) < 2e-3
    for pool, wanted in zip(step.pools, pools, strict=True):
        assert np.array_equal(np.array(pool.astype(mx.float32)), wanted, equal_nan=True), "one position of each row"


@needs_compiler
@pytest.mark.parametrize(
    "mutation",
    [
        ("if (at > length || at < low)", "if (at > length)"),
        ("__syncthreads();  // all warps have", "// all warps have"),
        ("s <= last_share; s++) {", "s < last_share; s++) {"),
        *(
            pytest.param(mutation, marks=pytest.mark.slow)
            for mutation in (
                ("wait_copies<STAGES - 2>", "wait_copies<STAGES - 1>"),
                ("position < newest);\n    }", "true);\n    }"),
                ("__syncthreads();\n    // The row's pages", "__syncwarp();\n    // The row's pages"),
                ("(of == first_share && row_begin > of * of_share)", "0"),
                ("most = base;", ""),
                ("== most;  // which", "== 0;  // which"),
                ("ahead.x != copied_row", "copied_row < 0"),
            )
        ),
    ],
)
def test_a_wrong_line_is_found(mutation: tuple[str, str], on_cpu: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "PROCESSORS", 1)
    on_cpu.mutation = "paged_attention", *mutation
    case = Case(lengths=(350, 64, 500, 10), window=300, heads=(4, 1))
    differences = []
    for on_cpu.seed in range(4):  # orders of the blocks
        step = step_of(case)
        differences.append(difference(attend(case, step, is_right=False), plain(case, step)[0]))
    assert max(differences) > 2e-2


@needs_cuda
@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float16, 4e-3), (mx.bfloat16, 3e-2)])
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_agrees_with_plain_indexing(name: str, dtype: mx.Dtype, tolerance: float) -> None:
    case = CASES[name]
    step = step_of(case, dtype)
    assert fits(step.heads[0], step.pools[0], step.pools[1])
    expected, pools = plain(case, step)
    assert difference(attend(case, step), expected) < tolerance
    for pool, wanted in zip(step.pools, pools, strict=True):
        # a rounding of a rotation in float32 may fall to the other side
        assert np.allclose(np.array(pool.astype(mx.float32)), wanted, rtol=8e-3, atol=2e-6, equal_nan=True)


@needs_cuda
def test_layers_share_a_plan_and_give_the_same_bits_again() -> None:
    case = Case(lengths=(*range(0, 900, 9),))
    step = step_of(case)
    plan = plan_pages(step.tables, step.lengths, query_heads=8, key_heads=2, head_size=64)
    found: list[mx.array] = []
    for _ in range(9):
        found.append(append_and_attend(*step.heads, *step.pools, plan, scale=SCALE))
        mx.eval(found)  # as layers do, each waits for the one before
    assert all(mx.array_equal(found[0], other).item() for other in found)


def test_a_block_takes_as_many_queries_as_a_tensor_core() -> None:
    assert [queries_at_once(repeats, 128) for repeats in (1, 4, 7, 16, 24, 71)] == [1, 4, 7, 16, 12, 1]
    assert queries_at_once(16, 256) == 8
