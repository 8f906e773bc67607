"""Figures of divided bases: made-up steps and sums that are too slow miss their bars."""

from typing import Any

import pytest
from bench.measure.tensor_parallel import step_figures, sum_figures
from bench.measurement import Figures, bars

HERE = frozenset({"gpu", "gpus2", "gpus4"})


def missed(figures: Figures) -> set[str]:
    return {name for name, value in figures.items() if bars()[name].verdict(value, HERE) == "FALLS SHORT"}


def parts(*seconds: float) -> list[dict[str, Any]]:
    """What rank 0 tells: its start, then the steps of each number of rows."""
    return [
        {"start_seconds": 9.0},
        *({"rows": rows, "seconds": one} for rows, one in zip((1, 32), seconds, strict=True)),
    ]


@pytest.mark.parametrize(
    ("size", "seconds", "short"),
    [
        (2, (0.03, 0.06), set()),
        (2, (0.034, 0.03), {"tensor_parallel.70b_4bit_2"}),
        (2, (0.02, 0.07), {"tensor_parallel.70b_4bit_2"}),
        (4, (0.02, 0.03), set()),
        (4, (0.02, 0.05), {"tensor_parallel.70b_4bit_4"}),
    ],
)
def test_the_worse_number_of_rows_is_judged(size: int, seconds: tuple[float, float], short: set[str]) -> None:
    figures = step_figures(size, {1: parts(0.05, 0.1), size: parts(*seconds)})
    assert missed(figures) == short
    assert figures[f"tensor_parallel.70b_4bit_{size}_b1"] == pytest.approx(0.05 / seconds[0])


def test_our_sums_must_be_faster_than_nccls_in_both_shapes() -> None:
    quick = {"kernel.1": 13.0, "kernel.32": 20.0, "group.1": 37.0, "group.32": 40.0}
    assert missed(sum_figures(quick)) == set()
    assert missed(sum_figures(quick | {"kernel.32": 50.0})) == {"tensor_parallel.sum_vs_nccl"}


def test_without_gpus_there_are_no_sums_by_our_kernel() -> None:
    assert "tensor_parallel.sum_vs_nccl" not in sum_figures({"group.1": 27.0, "group.32": 30.0})
