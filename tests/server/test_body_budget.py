import pytest

from parallm.errors import EngineFull
from parallm.server.body_budget import BODIES, SMALL, BodyBudget


def test_large_bodies_have_a_limit_together_and_small_ones_none() -> None:
    budget = BodyBudget(100_000)
    with budget.reading() as first, budget.reading() as second, budget.reading() as small:
        first(BODIES * 100_000 - 90_000)
        second(70_000)
        second(90_000)
        with pytest.raises(EngineFull, match=r"bodies of 6400000 bytes are being read, the limit is 6400000; send"):
            second(90_001)
        small(SMALL)
        assert budget.num_bytes == BODIES * 100_000
    assert budget.num_bytes == 0
