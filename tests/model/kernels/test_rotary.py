import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.rope_utils import Llama3RoPE

from parallm.model.kernels.cuda import on_cuda
from parallm.model.kernels.rotary import rotated
from parallm.model.patches.rotary import rotation_of

ROTARIES = {
    "apart": nn.RoPE(64),
    "part of a head": nn.RoPE(32, base=500.0),
    "neighbours": nn.RoPE(64, traditional=True, scale=0.5),
    "part, neighbours": nn.RoPE(16, traditional=True),
    "wavelengths": Llama3RoPE(64, scaling_config={"factor": 8.0}),
}


@pytest.mark.skipif(not on_cuda(), reason="needs MLX's CUDA build")
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("name", ROTARIES)
def test_heads_and_their_gradient_are_turned_as_mlx_turns_them(name: str, dtype: mx.Dtype) -> None:
    rotation, offset = rotation_of(ROTARIES[name]), mx.array([0, 7, 1, 300, 2000])
    heads, cotangent = (mx.random.normal((5, 3, 64)).astype(dtype) for _ in range(2))
    angles = rotation.angles(offset)
    found = mx.vjp(lambda one: rotated(one, angles, rotation), [heads], [cotangent])
    expected = mx.vjp(lambda one: ROTARIES[name](one[:, :, None], offset=offset)[:, :, 0], [heads], [cotangent])
    for one, other in zip(found, expected, strict=True):
        assert mx.abs(one[0] - other[0]).max().item() <= (1e-5 if dtype == mx.float32 else 0.04)
