"""Arithmetic whose own parts have no weight: it says which answers are right, and pays nothing for them."""

from collections.abc import Mapping

from parallm.environment.arithmetic import Arithmetic
from parallm.environment.settings import ArithmeticSettings


class Unpaid(Arithmetic):
    weights: Mapping[str, float] = {}

    def __init__(self) -> None:
        super().__init__(ArithmeticSettings(num_test=256))
