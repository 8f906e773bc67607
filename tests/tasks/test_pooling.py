"""Pooling against numpy, one text at a time."""

from typing import get_args

import mlx.core as mx
import numpy as np
import pytest

from parallm.tasks.pooling import pool
from parallm.types import Pooling

LENGTHS = (3, 1, 7)
STATES = np.random.default_rng(3).normal(size=(sum(LENGTHS), 5)).astype(np.float32)


def by_hand(mode: Pooling) -> np.ndarray:
    rows, start = [], 0
    for length in LENGTHS:
        text_TH = STATES[start : start + length].astype(np.float64)
        start += length
        weights = np.arange(1, length + 1)[:, None]
        rows.append(
            {
                "cls": text_TH[0],
                "last": text_TH[-1],
                "mean": text_TH.sum(0) / length,
                "max": text_TH.max(0),
                "mean_sqrt_len": text_TH.sum(0) / np.sqrt(length),
                "weighted_mean": (text_TH * weights).sum(0) / weights.sum(),
            }[mode]
        )
    return np.stack(rows)


@pytest.mark.parametrize("mode", get_args(Pooling))
def test_each_mode_is_that_of_numpy(mode: Pooling) -> None:
    found = pool(mx.array(STATES), LENGTHS, [mode])
    assert found.dtype == mx.float32
    assert np.array(found) == pytest.approx(by_hand(mode), abs=1e-6)


def test_another_mode_is_another_vector() -> None:
    found = {mode: np.array(pool(mx.array(STATES), LENGTHS, [mode])) for mode in get_args(Pooling)}
    for mode, vectors in found.items():
        assert all(np.abs(vectors - found[other]).max() > 1e-2 for other in found if other != mode), mode


def test_several_modes_are_joined_in_their_order() -> None:
    found = np.array(pool(mx.array(STATES), LENGTHS, ["max", "cls"]))
    assert found == pytest.approx(np.concatenate([by_hand("max"), by_hand("cls")], axis=1), abs=1e-6)


def test_states_of_16_bits_are_summed_in_32() -> None:
    halves = mx.array(STATES).astype(mx.float16)
    expected = np.array(pool(halves.astype(mx.float32), LENGTHS, ["mean"]))
    assert np.array(pool(halves, LENGTHS, ["mean"])) == pytest.approx(expected, abs=0)
