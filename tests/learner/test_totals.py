"""Totals of parts, merged, are those of the whole."""

import math
from dataclasses import fields

import mlx.core as mx
import numpy as np
import pytest

from parallm.learner.passes.batch import MIXED_VERSIONS, MicroBatch
from parallm.learner.passes.gradient import TokenStatistics
from parallm.learner.totals import Spread, UpdateTotals

VERSION = 3


def batch_of(seed: int, *, count: int = 9, **changes: np.ndarray) -> tuple[MicroBatch, TokenStatistics]:
    """A micro-batch of one row, some of whose tokens another version sampled or nobody trains on."""
    source = np.random.default_rng(seed)
    behaviour_N = source.normal(size=count).astype(np.float32)
    logprobs_N = np.where(np.arange(count) % 4 == 0, behaviour_N, source.normal(size=count)).astype(np.float32)
    zeros_N = np.zeros(count, np.int32)
    batch = MicroBatch(
        inputs_M=zeros_N,
        segments=(),
        sources_N=zeros_N,
        rows_N=zeros_N,
        completions_S=np.zeros(1, np.int32),
        tokens_N=zeros_N,
        behaviour_N=behaviour_N,
        advantages_N=np.ones(count, np.float32),
        weights_N=(np.arange(count) % 5 != 1).astype(np.float32),
        temperature_N=np.ones(count, np.float32),
        versions_N=np.where(np.arange(count) % 3 == 0, MIXED_VERSIONS, VERSION).astype(np.int32),
    )
    numbers = {name: source.normal(size=count).astype(np.float32) for name in ("entropies_N", "kl_N", "kl_to_base_N")}
    arrays = {"logprobs_N": logprobs_N, "clipped_N": np.arange(count) % 2 == 0, **numbers, **changes}
    loss = mx.array(float(source.normal()))
    return batch, TokenStatistics(loss=loss, **{name: mx.array(array) for name, array in arrays.items()})


def total_of(*seeds: int) -> UpdateTotals:
    totals = UpdateTotals()
    for seed in seeds:
        totals.add(*batch_of(seed), VERSION)
    return totals


def values(totals: UpdateTotals) -> dict[str, object]:
    return {field.name: getattr(totals, field.name) for field in fields(totals)}


def test_merged_totals_are_those_of_all_batches() -> None:
    whole, merged = total_of(1, 2, 3), total_of(1)
    merged.merge(total_of(2, 3))
    for name, expected in values(whole).items():
        found = getattr(merged, name)
        if isinstance(expected, Spread):
            assert (found.count, found.smallest, found.largest) == (expected.count, expected.smallest, expected.largest)
            assert found.total == pytest.approx(expected.total)
        else:
            assert found == pytest.approx(expected), name
        assert found != getattr(total_of(1), name), name


@pytest.mark.parametrize("is_first", [True, False])
def test_an_empty_part_changes_nothing(is_first: bool) -> None:
    first, second = (UpdateTotals(), total_of(1)) if is_first else (total_of(1), UpdateTotals())
    first.merge(second)
    assert values(first) == values(total_of(1))


def test_the_figures_are_those_of_the_tokens() -> None:
    pairs = [batch_of(seed) for seed in (1, 2)]
    totals = total_of(1, 2)
    logprobs_N, behaviour_N, trained_N, own_N = (
        np.concatenate(arrays)
        for arrays in zip(
            *((np.array(s.logprobs_N), b.behaviour_N, b.weights_N > 0, b.versions_N == VERSION) for b, s in pairs),
            strict=True,
        )
    )
    differences_N = np.abs(logprobs_N - behaviour_N)[trained_N & own_N]
    ratios_N = np.exp((logprobs_N - behaviour_N)[trained_N & ~own_N])
    parity, ratio = totals.parity(), totals.ratio()
    assert (parity.num_tokens, parity.max_abs) == (len(differences_N), differences_N.max())
    assert parity.mean_abs == pytest.approx(differences_N.mean(), rel=1e-6)
    assert 0 < parity.bit_equal_fraction == (differences_N == 0).mean() < 1
    assert (ratio.num_tokens, ratio.smallest, ratio.largest) == (len(ratios_N), ratios_N.min(), ratios_N.max())
    assert ratio.mean == pytest.approx(ratios_N.mean(), rel=1e-6)
    assert totals.tokens == trained_N.sum()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_value_that_is_not_a_number_shows_wherever_it_is(is_first: bool) -> None:
    bad, good = UpdateTotals(), total_of(1)
    bad.add(*batch_of(2, logprobs_N=np.full(9, np.nan, np.float32)), VERSION)
    first, second = (bad, good) if is_first else (good, bad)
    first.merge(second)
    assert math.isnan(first.parity().mean_abs)
    assert math.isnan(first.parity().max_abs)
    assert math.isnan(first.ratio().smallest)


def test_no_tokens_have_no_figures() -> None:
    assert math.isnan(UpdateTotals().parity().mean_abs)
    assert math.isnan(UpdateTotals().ratio().largest)
