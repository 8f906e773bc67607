"""Rows of very different lengths in one batch: what is computed apart, and that nobody's numbers change."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from parallm.device.blas import load_blas
from parallm.device.settings import DeviceSettings
from parallm.engine.kv.attention_metadata import LengthOutliers, find_outliers
from parallm.model.shared_model import SharedModel
from parallm.types import Completion, GenerationRequest

BLAS = load_blas(DeviceSettings())


def test_much_longer_rows_are_computed_apart() -> None:
    assert find_outliers([30, 200, 31, 29, 190] + [28] * 27) == LengthOutliers(rows=[1, 4], num_read=31)


@pytest.mark.parametrize(
    "lengths",
    [[], [30], [30] * 64, [200] + [190] * 31, [200, 30], [200, 30, 30, 30], [200] * 16 + [30] * 16],
    ids=["no rows", "one row", "equal", "similar", "two rows", "few rows", "half of the rows"],
)
def test_rows_stay_together_where_that_costs_little(lengths: Sequence[int]) -> None:
    assert find_outliers(lengths) is None


@pytest.mark.skipif(not BLAS.strict, reason="only a strict BLAS computes a row alike in any company")
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_neox"])
def test_short_rows_in_the_company_of_long_ones_get_the_bits_that_they_get_alone(
    architecture: str,
    load_tiny: Callable[..., SharedModel],
    ask: Callable[..., GenerationRequest],
    complete: Callable[..., dict[str, list[Completion]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[LengthOutliers | None] = []
    monkeypatch.setattr(
        "parallm.engine.kv.attention_metadata.find_outliers", lambda lengths: _noted(found, find_outliers(lengths))
    )
    model, random = load_tiny(architecture), np.random.default_rng(3)
    lengths = [300 if row in (3, 16, 17) else 4 + row % 9 for row in range(30)]
    requests = [
        ask(f"r{row}", [int(token) for token in random.integers(2, 385, length)], 6, temperature=0.7, seed=row)
        for row, length in enumerate(lengths)
    ]
    together = complete(model, requests)
    assert sum(one is not None for one in found) >= 5
    for request in requests[2:5] + requests[15:18]:
        assert complete(model, [request]) == {request.request_id: together[request.request_id]}


def _noted(found: list[LengthOutliers | None], one: LengthOutliers | None) -> LengthOutliers | None:
    found.append(one)
    return one
