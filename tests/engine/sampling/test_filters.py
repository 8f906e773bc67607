"""The same tokens stay as where the whole vocabulary is sorted, and the kernel keeps what the plain way keeps."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from parallm.engine.sampling.filters import ends_by_counting, ends_by_sorting, filtered, filters_of, limits_of, packed
from parallm.model.kernels.cuda import on_cuda
from parallm.model.kernels.token_filter import PROBABILITY_ONE, ends_by_kernel, weights_by_kernel
from parallm.model.logprobs import Softmax, softmax_of
from parallm.types import SamplingParams

Limits = dict[str, Any]
LIMITS: list[Limits] = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10**6},
    {"top_p": 1e-9},
    {"top_p": 0.5},
    {"top_p": 0.9999999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.01},
    {"top_k": 3, "top_p": 0.99},
    {"temperature": 0.3, "top_p": 0.95},
]


def made(name: str, size: int) -> np.ndarray:
    random = np.random.default_rng(size)
    normal = random.normal(size=size).astype(np.float32) * 3
    cases: dict[str, np.ndarray] = {
        "normal": normal,
        "uniform": np.full(size, -1.5, np.float32),
        "one_hot": np.where(np.arange(size) == size // 2, 0, -np.inf).astype(np.float32),
        "mostly_forbidden": np.where(random.random(size) < 0.9, -np.inf, normal).astype(np.float32),
        "few_values": random.integers(-2, 3, size).astype(np.float32),
        "rounded": np.round(normal),
        "zeros": np.where(random.random(size) < 0.5, 0.0, -0.0).astype(np.float32),
        "close": (1 + random.integers(0, 4, size) * 2.0**-23).astype(np.float32),
        "tiny": (random.normal(size=size) * 1e-38).astype(np.float32),
        "steep": normal * 1000,
        "negative": normal - 1e6,
    }
    return cases[name]


NAMES = ["normal", "uniform", "one_hot", "mostly_forbidden", "few_values", "rounded", "zeros"]
NAMES += ["close", "tiny", "steep", "negative"]


def by_sorting(softmax: Softmax, row: int, params: SamplingParams) -> np.ndarray:
    """The definition, token by token in order."""
    values = np.array(softmax.scaled_NV[row])
    masses = (np.array(softmax.probabilities()[row]) * np.float32(PROBABILITY_ONE)).astype(np.uint64)
    order = np.lexsort((np.arange(len(values)), -values))
    before = np.concatenate([[0], np.cumsum(masses[order])[:-1]]).astype(np.uint64)
    keep = np.ones(len(values), bool)
    if params.top_k:
        keep &= np.arange(len(values)) < params.top_k
    if params.top_p < 1:
        keep &= before < max(1, int(params.top_p * PROBABILITY_ONE))
    found = np.zeros(len(values), bool)
    found[order] = keep
    weights = np.array(softmax.exponentials_NV[row])
    return found & (weights >= np.float32(params.min_p)) & (weights > 0)


def asked(limits: Sequence[Limits]) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=1, **one) for one in limits]


def stays(softmax: Softmax, params: Sequence[SamplingParams]) -> np.ndarray:
    return np.array(filtered(softmax, filters_of(params)) > 0)


def softmax_for(logits: np.ndarray, params: Sequence[SamplingParams]) -> Softmax:
    rows = np.tile(logits, (len(params), 1)) if logits.ndim == 1 else logits
    return softmax_of(mx.array(rows), mx.array([one.temperature for one in params]))


@pytest.mark.parametrize("size", [1, 9, 385, 5000])
@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_that_stay_are_those_of_the_definition(name: str, size: int) -> None:
    params = asked(LIMITS)
    softmax = softmax_for(made(name, size), params)
    found = stays(softmax, params)
    for row, one in enumerate(params):
        assert (found[row] == by_sorting(softmax, row, one)).all(), LIMITS[row]
        assert found[row].any()


@pytest.mark.parametrize("seed", range(20))
def test_random_limits_on_random_logits_of_few_values_and_many(seed: int) -> None:
    random = np.random.default_rng(seed)
    size = int(random.integers(2, 3000))
    logits = (random.normal(size=(12, size)) * random.choice([0.01, 1, 8])).astype(np.float32)
    logits = np.round(logits, int(random.integers(0, 6)))
    params = asked(
        [
            {
                "temperature": float(random.uniform(0.1, 2)),
                "top_k": int(random.integers(0, size + 2)),
                "top_p": min(1.0, float(random.uniform(0.01, 1.2))),
                "min_p": float(random.uniform(0, 0.2)),
            }
            for _ in range(12)
        ]
    )
    softmax = softmax_for(logits, params)
    found = stays(softmax, params)
    assert all((found[row] == by_sorting(softmax, row, one)).all() for row, one in enumerate(params))


def test_equal_logits_are_cut_behind_the_lowest_ids() -> None:
    logits = np.array([0, 1, 0, 0, 1], np.float32)
    params = asked([{"top_k": 2}, {"top_p": 0.5}, {"top_k": 3}, {"top_p": 0.74}, {"top_p": 0.8}])
    rows = [[0, 1, 0, 0, 1], [0, 1, 0, 0, 1], [1, 1, 0, 0, 1], [1, 1, 0, 0, 1], [1, 1, 1, 0, 1]]
    assert stays(softmax_for(logits, params), params).astype(int).tolist() == rows


def test_only_rows_that_filter_are_filtered() -> None:
    params = asked([{}, {"top_k": 1}, {"temperature": 0.0, "top_k": 1}, {"min_p": 1.0}])
    softmax = softmax_for(made("normal", 50), params)
    assert stays(softmax, params).sum(axis=-1).tolist() == [50, 1, 50, 1]
    assert sorted(row for some in filters_of(params) for row in some.rows or ()) == [1, 3]
    assert filters_of([params[0], params[2]]) == []
    assert filtered(softmax, []) is softmax.exponentials_NV


CUTS = [one for one in LIMITS if "top_k" in one or "top_p" in one]


def within(softmax: Softmax, lowest_R: mx.array, num_equal_R: mx.array) -> np.ndarray:
    values, lowest = np.array(softmax.scaled_NV), np.array(lowest_R)[:, None]
    return (values > lowest) | ((values == lowest) & (np.cumsum(values == lowest, 1) <= np.array(num_equal_R)[:, None]))


@pytest.mark.parametrize("size", [1, 9, 385, 5000])
@pytest.mark.parametrize("name", NAMES)
def test_counting_ends_where_sorting_does(name: str, size: int) -> None:
    params = asked(CUTS)
    softmax, limits = softmax_for(made(name, size), params), limits_of(range(len(params)), params)
    given = softmax.scaled_NV, packed(softmax), limits
    assert (within(softmax, *ends_by_counting(*given)) == within(softmax, *ends_by_sorting(*given))).all()


@pytest.mark.skipif(not on_cuda(), reason="the kernel needs MLX's CUDA build and a GPU")
@pytest.mark.parametrize("size", [1, 9, 385, 5000, 151_936])
@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_end_where_counting_does(name: str, size: int) -> None:
    params = asked(CUTS)
    softmax, limits = softmax_for(made(name, size), params), limits_of(range(len(params)), params)
    lowest_R, last_R = ends_by_kernel(softmax, limits.top_k_R, limits.top_p_R)
    expected = within(softmax, *ends_by_counting(softmax.scaled_NV, packed(softmax), limits))
    weights = np.array(softmax.exponentials_NV)
    expected_weights = np.where(expected & (weights >= np.array(limits.min_p_R)[:, None]), weights, 0)
    assert (np.array(weights_by_kernel(softmax, lowest_R, last_R, limits.min_p_R)) == expected_weights).all()
    values, lowest, last = np.array(softmax.scaled_NV), np.array(lowest_R)[:, None], np.array(last_R)[:, None]
    found = (values > lowest) | ((values == lowest) & (np.arange(size) <= last))
    assert (found == expected).all()
