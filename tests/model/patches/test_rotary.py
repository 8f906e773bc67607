"""What a step's rotary embeddings leave to the kernel; the kernel's own tests are in test_decode_attention.py."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.rope_utils import Llama3RoPE

from parallm.model.patches.rotary import Rotary, before_rotation, rotation_of


def heads(tokens: int = 1) -> tuple[mx.array, mx.array]:
    return mx.random.normal((3, 4, tokens, 32)), mx.random.normal((3, 2, tokens, 32))


def test_a_rotated_step_is_traced_back() -> None:
    (queries, keys), offset_B = heads(), mx.array([0, 5, 9])
    rotary = rotary_of(nn.RoPE(32))
    rotated = rotary(queries, offset=offset_B), rotary(keys, offset=offset_B)
    assert mx.array_equal(rotated[0], nn.RoPE(32)(queries, offset=offset_B)).item()
    found = before_rotation(*rotated, offset_B, mx.float32)
    assert found[0] is queries
    assert found[1] is keys
    assert found[2] is not None
    assert (found[2].dims, found[2].traditional, found[2].scale, found[2].base) == (32, False, 1.0, 10000)


@pytest.mark.parametrize("changed", ["keys", "offset", "other", "type", "tokens"])
def test_what_is_not_one_rotation_of_both_stays_as_it_is(changed: str) -> None:
    (queries, keys), offset_B = heads(2 if changed == "tokens" else 1), mx.array([0, 5, 9])
    rotary = rotary_of(nn.RoPE(32))
    turned = rotary(queries, offset=offset_B)
    other = rotary_of(nn.RoPE(32)) if changed == "other" else rotary
    turned_keys = keys if changed == "keys" else other(keys, offset=offset_B)
    at = mx.array([0, 5, 9]) if changed == "offset" else offset_B
    found = before_rotation(turned, turned_keys, at, mx.bfloat16 if changed == "type" else mx.float32)
    assert found == (turned, turned_keys, None)


def test_pairs_have_to_lie_in_whole_vectors() -> None:
    apart, beside = rotation_of(nn.RoPE(24)), rotation_of(nn.RoPE(24, traditional=True))
    assert not apart.fits(mx.bfloat16)
    assert beside.fits(mx.bfloat16)
    assert apart.fits(mx.float32)


def test_modules_that_do_the_same_are_known() -> None:
    scaling = {"factor": 8.0}
    llama = [rotation_of(Llama3RoPE(32, base=base, scaling_config=scaling)) for base in (10000.0, 10000.0, 500000.0)]
    plain = [rotation_of(nn.RoPE(32, base=base)) for base in (10000.0, 10000.0, 500000.0)]
    for first, same, other in (llama, plain):
        assert first.is_same(same)
        assert not first.is_same(other)
    assert not llama[0].is_same(plain[0])


def rotary_of(inner: nn.RoPE) -> Rotary:
    return Rotary(inner, rotation_of(inner))
