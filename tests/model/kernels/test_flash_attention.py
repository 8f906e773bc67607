"""Flash attention of packed sequences against plain attention: tiles and indices in numpy, the kernels on a GPU."""

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest

from parallm.model.kernels import flash_attention
from parallm.model.kernels.cuda import has_kernels
from parallm.model.kernels.flash_attention import (
    FORWARD,
    HOPPER,
    KEYS,
    PackedSequences,
    attend_pages,
    fits,
    forward_kernel,
    key_tiles,
    page_tiles,
    query_tiles,
    tiling,
    without_hopper,
)
from parallm.model.kernels.page_write import PAGE
from tests.model.kernels.cuda_on_cpu import CpuKernels, needs_compiler
from tests.model.kernels.flash_emulation import fake_kernel

needs_kernels = pytest.mark.skipif(not has_kernels(), reason="needs MLX's CUDA build")
Groups = list[tuple[int, list[int]]]
EDGES = [1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 1000]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Prompts and completions of these lengths; heads of keys, query heads of each, head size."""

    groups: Groups
    heads: int = 2
    repeats: int = 2
    size: int = 64
    window: int | None = None
    sinks: bool = False
    padding: int = 0
    factor: float = 1.0
    """Of the queries: scores are that much larger."""

    @property
    def sequences(self) -> np.ndarray:
        """(S, 4), as `PackedSequences` takes them."""
        rows, start = [], 0
        for prompt, completions in self.groups:
            rows.append((start, prompt, 0, 0))
            first, start = start, start + prompt
            for length in completions:
                rows.append((start, length, first, prompt))
                start += length
        return np.array(rows)

    @property
    def num_tokens(self) -> int:
        return int(self.sequences[:, 1].sum())

    def arrays(self, dtype: mx.Dtype) -> list[mx.array]:
        """Queries, keys, values and the gradient of the result, NaN in padding; sinks or None."""
        keys = mx.random.split(mx.random.key(len(self.groups) + self.num_tokens), 5)
        shapes = [(self.num_tokens, self.heads * count, self.size) for count in (self.repeats, 1, 1, self.repeats)]
        factors = [self.factor, 1.0, 1.0, 1.0]
        return [
            (mx.random.normal(shape, key=key) * factor).astype(dtype)
            for shape, key, factor in zip(shapes, keys, factors, strict=False)
        ]

    @property
    def sink_logits(self) -> mx.array | None:
        return mx.linspace(-1.0, 2.0, self.heads * self.repeats) if self.sinks else None


def plain(case: Case, arrays: list[mx.array]) -> list[mx.array]:
    """Result and gradients in float32, one sequence after the other."""
    q, k, v, gradient = (array.astype(mx.float32) for array in arrays)

    def attend(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        parts = []
        for start, length, prefix_start, prefix in case.sequences[case.sequences[:, 1] > 0].tolist():
            own, before = slice(start, start + length), slice(prefix_start, prefix_start + prefix)
            keys, values = (mx.concatenate([array[before], array[own]]) for array in (k, v))
            queries = q[own].reshape(length, case.heads, case.repeats, case.size)
            scores = mx.einsum("thrd,lhd->hrtl", queries, keys) * case.size**-0.5
            distance = mx.arange(prefix, prefix + length)[:, None] - mx.arange(prefix + length)[None]
            seen = (distance >= 0) & (distance < (case.window or 2**30))
            scores = mx.where(seen, scores, -mx.inf)
            if case.sink_logits is not None:
                sink = mx.broadcast_to(case.sink_logits.reshape(case.heads, -1, 1, 1), (*scores.shape[:3], 1))
                scores = mx.concatenate([scores, sink], axis=-1)
            weights = mx.softmax(scores, axis=-1)[..., : prefix + length]
            parts.append(mx.einsum("hrtl,lhd->thrd", weights, values).reshape(length, -1, case.size))
        return mx.concatenate(parts)

    results, gradients = mx.vjp(attend, [q, k, v], [gradient])
    return [*results, *gradients]


def packed(case: Case, arrays: list[mx.array], sequences_S4: np.ndarray | None = None) -> list[mx.array]:
    """The same by the kernels, without what they wrote for padding; NaN stands in padding."""
    padded = [
        mx.concatenate([array, mx.full((case.padding, *array.shape[1:]), mx.nan, array.dtype)]) for array in arrays
    ]
    work = PackedSequences(case.sequences if sequences_S4 is None else sequences_S4, len(padded[0]))

    def attend(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return work.attend(q, k, v, scale=case.size**-0.5, window=case.window, sinks_Q=case.sink_logits)

    results, gradients = mx.vjp(attend, padded[:3], [padded[3]])
    found = [*results, *gradients]
    assert all(mx.all(array[case.num_tokens :] == 0).item() for array in found)
    return [array[: case.num_tokens] for array in found]


def worst(found: list[mx.array], expected: list[mx.array]) -> float:
    """Largest difference relative to the largest number of its array; NaN counts."""
    differences = [
        mx.abs(a.astype(mx.float32) - b).max().item() / mx.abs(b).max().item()
        for a, b in zip(found, expected, strict=True)
    ]
    return float(np.max(differences))


CASES = {
    "groups": Case(groups=[(5, [3, 1, 9]), (17, [20]), (1, [2, 40])], padding=7, size=16),
    "empty completions": Case(groups=[(70, [33, 0, 1, 64]), (64, []), (3, [0])], repeats=4, size=32, padding=70),
    "window": Case(groups=[(70, [33, 80, 1, 64]), (10, [50])], repeats=3, window=24, size=32, padding=1),
    "wide window": Case(groups=[(130, [5, 200])], repeats=3, window=100, sinks=True, size=16),
    "sinks": Case(groups=[(40, [100, 7])], heads=1, repeats=1, sinks=True, size=16),
    "large scores": Case(groups=[(40, [100, 7])], heads=1, factor=20.0, padding=64),
    "cut visits": Case(groups=[(150, [700] * 6), (900, [])], heads=1, repeats=3, size=16, padding=3),
    "large heads": Case(groups=[(90, [70, 3]), (33, [129])], heads=1, repeats=2, size=128, window=200),
}


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "kernel", fake_kernel)
    monkeypatch.setattr(flash_attention, "architecture", lambda: "sm_80")  # the kernels for all GPUs, on any machine


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("emulated")
def test_tiles_and_indices_give_plain_attention_and_its_gradients(name: str) -> None:
    case = CASES[name]
    arrays = case.arrays(mx.float32)
    assert worst(packed(case, arrays), plain(case, arrays)) <= 1e-5


@pytest.mark.usefixtures("emulated")
def test_a_wrong_bound_of_a_sequence_is_found() -> None:
    case = CASES["groups"]
    arrays, wrong = case.arrays(mx.float32), case.sequences
    wrong[1, 3] -= 1  # a completion that misses the last token of its prompt
    assert not worst(packed(case, arrays, wrong), plain(case, arrays)) <= 1e-3


@pytest.mark.usefixtures("emulated")
def test_random_packings_give_plain_attention_and_its_gradients() -> None:
    random = np.random.default_rng(0)
    for _ in range(12):
        groups: Groups = [
            (int(random.integers(1, 90)), random.integers(0, 100, random.integers(0, 5)).tolist())
            for _ in range(random.integers(1, 4))
        ]
        window = int(random.integers(1, 120)) if random.random() < 0.5 else None
        case = Case(
            groups=groups,
            repeats=int(random.integers(1, 5)),
            size=16,
            window=window,
            sinks=bool(random.random() < 0.5),
            padding=int(random.integers(0, 80)),
        )
        arrays = case.arrays(mx.float32)
        assert worst(packed(case, arrays), plain(case, arrays)) <= 1e-5, case


def test_tiles_hold_each_row_and_each_key_once_the_longest_first() -> None:
    case = CASES["cut visits"]
    sequences_S4 = case.sequences
    tiles_X8 = query_tiles(sequences_S4, case.repeats, 64)
    rows = [
        (start + m // case.repeats, m % case.repeats)
        for start, length, _, _, begin, *_ in tiles_X8.tolist()
        for m in range(begin, min(begin + 64, length * case.repeats))
    ]
    assert len(rows) == len(set(rows)) == case.num_tokens * case.repeats
    seen = tiles_X8[:, 3] + np.minimum(tiles_X8[:, 1], (tiles_X8[:, 4] + 64) // case.repeats)
    assert (np.diff(seen) <= 0).all()
    tiles = key_tiles(sequences_S4, case.repeats, 1, tiling(KEYS, 64).rows)
    written = [start + key for start, length, _, _ in tiles.tiles_X4.tolist() for key in range(length)]
    assert sorted(written) == list(range(case.num_tokens))
    assert len(tiles.partial_X4) == -tiles.tiles_X4[:, 3].clip(max=0).sum() > 0


CHUNKS = [(5, 0), (64, 64), (1, 63), (130, 0), (40, 300), (3, 128), (17, 40)]
"""Tokens of a sequence that are computed, and those before them."""


def paged(case: Case, dtype: mx.Dtype, chunks: list[tuple[int, int]], *, padding: int) -> tuple[mx.array, mx.array]:
    """The last tokens of sequences whose keys and values are in pages of any order, and what plain attention gives;
    `case` says what heads they have. All other positions hold NaN, but for the scratch page."""
    random = np.random.default_rng(case.size)
    whole = replace(case, groups=[(before + count, []) for count, before in chunks])
    q, k, v, _ = whole.arrays(dtype)
    counts = [-(-length // PAGE) for length, _ in whole.groups]
    numbers = random.permutation(np.arange(1, sum(counts) + 1)).astype(np.int32)
    firsts = np.cumsum([0, *counts])[:-1].tolist()
    pools = [np.full((sum(counts) + 1, case.heads, PAGE, case.size), np.nan, np.float32) for _ in range(2)]
    chosen: list[int] = []
    for row, (start, length, _, _) in enumerate(whole.sequences.tolist()):
        own = numbers[firsts[row] :]
        for pool, array in zip(pools, (k, v), strict=True):
            for at in range(length):
                pool[own[at // PAGE], :, at % PAGE] = np.array(array[start + at].astype(mx.float32))
        chosen += range(start + chunks[row][1], start + length)
    index, num_tokens = mx.array(chosen), len(chosen) + padding
    described = [(count, before, first) for (count, before), first in zip(chunks, firsts, strict=True)]
    queries = mx.concatenate([q[index], mx.full((padding, *q.shape[1:]), mx.nan, dtype)])
    found = attend_pages(
        queries,
        mx.array(pools[0]).astype(dtype),
        mx.array(pools[1]).astype(dtype),
        mx.array(numbers),
        mx.array(page_tiles(described, num_tokens, case.repeats, case.size).astype(np.int32)),
        scale=case.size**-0.5,
        window=case.window,
        sinks_Q=case.sink_logits,
    )
    assert mx.all(found[len(chosen) :] == 0).item()
    return found[: len(chosen)], plain(whole, whole.arrays(dtype))[0][index]


PAGED = {name: CASES[name] for name in ("groups", "wide window", "sinks", "large heads")}


@pytest.mark.parametrize("padding", [0, 70])
@pytest.mark.parametrize("name", PAGED)
@pytest.mark.usefixtures("emulated")
def test_tiles_of_pages_give_plain_attention(name: str, padding: int) -> None:
    found, expected = paged(CASES[name], mx.float32, CHUNKS, padding=padding)
    assert worst([found], [expected]) <= 1e-5


@pytest.mark.usefixtures("emulated")
def test_a_missing_token_of_a_page_is_found() -> None:
    found, _ = paged(CASES["groups"], mx.float32, CHUNKS, padding=0)
    _, shifted = paged(CASES["groups"], mx.float32, [(count, before + 1) for count, before in CHUNKS], padding=0)
    assert not worst([found], [shifted]) <= 1e-3


@pytest.fixture
def warpgroups(compiled: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> CpuKernels:
    """The forward for Hopper, which a CPU runs thread by thread."""
    compiled.mutation = "", "", ""
    monkeypatch.setattr(flash_attention, "kernel", compiled)
    monkeypatch.setattr(flash_attention, "forward_kernel", lambda _: HOPPER)
    return compiled


def forward(case: Case) -> mx.array:
    """Of packed sequences, in float16."""
    work = PackedSequences(case.sequences, case.num_tokens)
    q, k, v, _ = case.arrays(mx.float16)
    return work.attend(q, k, v, scale=case.size**-0.5, window=case.window, sinks_Q=case.sink_logits)


WARPGROUPS = {
    "groups": replace(CASES["groups"], size=64),
    "wide window": replace(CASES["wide window"], size=128),
    "large scores": replace(CASES["large scores"], groups=[(150, [100, 40])], repeats=7),
    "large heads": replace(CASES["large heads"], window=None),
}


@needs_compiler
@pytest.mark.cpu
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if place else []) for place, name in enumerate(WARPGROUPS)]
)
def test_threads_of_warpgroups_give_plain_attention(name: str, warpgroups: CpuKernels) -> None:
    case = WARPGROUPS[name]
    assert worst([forward(case)], plain(case, case.arrays(mx.float16))[:1]) <= 1e-3


@needs_compiler
@pytest.mark.cpu
@pytest.mark.parametrize("name", ["wide window", pytest.param("large heads", marks=pytest.mark.slow)])
def test_threads_of_warpgroups_read_pages(name: str, warpgroups: CpuKernels) -> None:
    found, expected = paged(WARPGROUPS[name], mx.float16, CHUNKS, padding=70)
    assert worst([found], [expected]) <= 1e-3


@needs_compiler
@pytest.mark.cpu
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("show_copies();\n      __syncwarp();", "__syncwarp();"),  # products before copies are seen
        pytest.param("wait_products<1>();", "", marks=pytest.mark.slow),  # scores before they are there
        pytest.param("shrink[n / 2 % 2]", "shrink[0]", marks=pytest.mark.slow),
    ],
)
def test_mistakes_of_warpgroups_are_found(old: str, new: str, warpgroups: CpuKernels) -> None:
    warpgroups.mutation = HOPPER, old, new
    case = Case(groups=[(700, [])], heads=1, repeats=1, size=64)
    assert not worst([forward(case)], plain(case, case.arrays(mx.float16))[:1]) <= 1e-3


@pytest.mark.cpu
def test_hopper_has_a_forward_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert forward_kernel(128) == FORWARD
    monkeypatch.setattr(flash_attention, "has_kernels", lambda: True)
    for architecture, expected in (("sm_80", FORWARD), ("sm_90", HOPPER), ("sm_100", FORWARD)):
        monkeypatch.setattr(flash_attention, "architecture", lambda architecture=architecture: architecture)
        assert [forward_kernel(size) for size in (64, 96, 128)] == [expected, FORWARD, expected]
    monkeypatch.setattr(flash_attention, "architecture", lambda: "sm_90")
    with without_hopper():
        assert forward_kernel(128) == FORWARD
    assert forward_kernel(128) == HOPPER


@pytest.mark.cpu
def test_other_arrays_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def shaped(size: int, dtype: mx.Dtype = mx.bfloat16) -> list[mx.array]:
        return [mx.zeros((4, heads, size), dtype) for heads in (4, 2, 2)]

    monkeypatch.setattr(flash_attention, "has_kernels", lambda: False)
    assert not fits(*shaped(64))
    monkeypatch.setattr(flash_attention, "has_kernels", lambda: True)
    assert all(fits(*arrays) for arrays in (shaped(64), shaped(96), shaped(128, mx.float16)))
    assert not any(fits(*arrays) for arrays in (shaped(64, mx.float32), shaped(192), shaped(72)))


def on_gpu(case: Case, dtype: mx.Dtype = mx.bfloat16) -> tuple[list[mx.array], list[mx.array]]:
    arrays = case.arrays(dtype)
    return packed(case, arrays), plain(case, arrays)


@needs_kernels
@pytest.mark.parametrize("size", [64, 96, 128])
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_give_plain_attention_and_its_gradients(name: str, size: int) -> None:
    assert worst(*on_gpu(replace(CASES[name], size=size))) <= 1e-2


@needs_kernels
def test_the_kernels_give_plain_attention_at_the_edges_of_tiles() -> None:
    for length in EDGES:
        case = Case(groups=[(length, EDGES), (70, [length, 0, length])], padding=17)
        assert worst(*on_gpu(case)) <= 1e-2, length


@needs_kernels
def test_the_kernels_give_plain_attention_over_random_packings() -> None:
    random = np.random.default_rng(0)
    for _ in range(40):
        groups: Groups = [
            (int(random.integers(8, 200)), random.integers(0, 300, random.integers(0, 9)).tolist())
            for _ in range(random.integers(1, 6))
        ]
        case = Case(
            groups=groups,
            repeats=int(random.choice([1, 2, 4, 7])),
            size=int(random.choice([64, 128])),
            window=int(random.integers(8, 300)) if random.random() < 0.3 else None,
            sinks=bool(random.random() < 0.3),
            padding=int(random.integers(0, 200)),
        )
        assert worst(*on_gpu(case)) <= 1e-2, case


@needs_kernels
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("name", PAGED)
def test_the_kernel_gives_plain_attention_over_pages(name: str, size: int) -> None:
    for padding in (0, 70):
        found, expected = paged(replace(CASES[name], size=size), mx.bfloat16, CHUNKS, padding=padding)
        assert worst([found], [expected]) <= 1e-2


@needs_kernels
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_the_kernels_repeat_to_the_bit(dtype: mx.Dtype) -> None:
    case = replace(CASES["cut visits"], heads=4, repeats=4, size=64)
    arrays = case.arrays(dtype)
    first, second = packed(case, arrays), packed(case, arrays)
    assert all(mx.array_equal(a, b).item() for a, b in zip(first, second, strict=True))
    assert worst(first, plain(case, arrays)) <= 1e-2


@needs_kernels
def test_a_group_attends_as_its_rows_one_by_one() -> None:
    case = Case(groups=[(70, [33, 80, 1, 64])])
    arrays = case.arrays(mx.bfloat16)
    together = packed(case, arrays)[0]
    start = 70
    for length in case.groups[0][1]:
        alone = Case(groups=[(70 + length, [])])
        own = [mx.concatenate([array[:70], array[start : start + length]]) for array in arrays]
        assert mx.array_equal(packed(alone, own)[0][70:], together[start : start + length]).item()
        start += length
