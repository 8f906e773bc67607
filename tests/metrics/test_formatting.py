"""Numbers as people read them."""

import pytest

from parallm.metrics.formatting import accuracy, duration, number, percent


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0, "0"),
        (0.5, "0.500"),
        (0.0123, "0.012"),
        (0.00234, "0.0023"),
        (0.0004, "4.00e-04"),
        (6.9573, "6.96"),
        (64.49, "64.5"),
        (2903.2, "2,903"),
        (1_234_567.0, "1.23e+06"),
        (17, "17"),
        (-0.25, "-0.250"),
        (float("nan"), "nan"),
        (None, "-"),
        ("text", "-"),
        (True, "-"),
    ],
)
def test_numbers(value: object, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.96, "10 s"), (59.7, "1 min 00 s"), (190, "3 min 10 s"), (3599.6, "1 h 00 min"), (None, "-")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_accuracies() -> None:
    assert accuracy(0.81, 0.774, 0.842) == "81.0% (77.4% to 84.2%)"
    assert accuracy(None, None, None) == "-"
    assert percent(float("nan")) == "-"
