"""One token of many rows, without a compiled step, is mlx-lm's token."""

import mlx.core as mx
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops

from parallm.model.recurrence.gated_delta import gated_delta_step


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("is_by_channel", [False, True], ids=["decay of heads", "decay of channels"])
def test_a_token_of_rows_is_that_of_mlx_lm(is_by_channel: bool, key_heads: int) -> None:
    keys = iter(mx.random.split(mx.random.key(0), 6))
    query, key = (mx.random.normal((5, key_heads, 16), key=next(keys)) for _ in range(2))
    value, state = (mx.random.normal((5, 4, *shape), key=next(keys)) for shape in ((8,), (8, 16)))
    decay = mx.random.uniform(shape=(5, 4, 16) if is_by_channel else (5, 4), key=next(keys))
    beta = 2 * mx.random.uniform(shape=(5, 4), key=next(keys))
    found = gated_delta_step(query, key, value, decay, beta, state)
    steps = [array[:, None] for array in (query, key, value, decay, beta)]
    expected_B1HV, expected_state = gated_delta_ops(*steps, state)
    for one, other in zip(found, (expected_B1HV[:, 0], expected_state), strict=True):
        assert mx.abs(one - other).max().item() <= 2e-5 * mx.abs(other).max().item()
    assert mx.abs(found[1] - state).max().item() > 0.1, "the state changes"
