"""The CUDA kernels are compared with MLX's operations; these cases are skipped elsewhere."""

import mlx.core as mx
import pytest

from parallm.model.kernels import token_scores as module
from parallm.model.kernels.cuda import on_cuda
from parallm.model.kernels.token_scores import token_scores
from parallm.model.patches.forward import swiglu

TEMPERATURE = mx.array([1.0, 0.7, 0.0, 1.3])
TOKENS = mx.array([3, 0, 299, 7])
needs_cuda = pytest.mark.skipif(not on_cuda(), reason="needs MLX's CUDA build")


def logits(dtype: mx.Dtype = mx.float32) -> mx.array:
    return (mx.random.normal((4, 300), key=mx.random.key(1)) * 5).astype(dtype)


def test_the_gradient_is_that_of_plain_differentiation() -> None:
    weights, of_entropies = mx.array([1.0, -2.0, 0.5, 3.0]), mx.array([0.5, 0.0, -1.0, 0.25])

    def total(logits_NV: mx.array) -> mx.array:
        scaled_NV = logits_NV / mx.array([1.0, 0.7, 1.0, 1.3])[:, None]
        logprobs_NV = scaled_NV - mx.logsumexp(scaled_NV, axis=-1, keepdims=True)
        entropies_N = -(mx.exp(logprobs_NV) * logprobs_NV).sum(axis=-1)
        return (mx.take_along_axis(logprobs_NV, TOKENS[:, None], -1)[:, 0] * weights + entropies_N * of_entropies).sum()

    scores = token_scores(logits(), TEMPERATURE, TOKENS)
    assert (scores.logprobs_N * weights + scores.entropies_N * of_entropies).sum().item() == pytest.approx(
        total(logits()).item(), rel=1e-5
    )
    assert mx.abs(scores.gradient(weights, of_entropies) - mx.grad(total)(logits())).max().item() <= 1e-5


@pytest.mark.parametrize("temperature", [1.0, 0.01])
def test_a_logit_of_minus_infinity_counts_as_no_token_at_all(temperature: float) -> None:
    kept = logits()
    masked = mx.concatenate([kept, mx.full((4, 2), -mx.inf)], axis=-1)  # ids that a model never writes
    temperature_N, ones_N = mx.full((4,), temperature), mx.ones((4,))
    expected, found = (token_scores(given, temperature_N, TOKENS) for given in (kept, masked))
    assert mx.allclose(found.entropies_N, expected.entropies_N, rtol=1e-6).item()
    gradient_NV = found.gradient(ones_N, ones_N)
    assert mx.allclose(gradient_NV[:, :-2], expected.gradient(ones_N, ones_N), rtol=1e-5, atol=1e-6).item()
    assert (gradient_NV[:, -2:] == 0).all().item()


@needs_cuda
@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float32, 2e-6), (mx.bfloat16, 1e-2)])
@pytest.mark.parametrize("has_entropies", [True, False])
def test_the_kernels_agree_with_the_operations(dtype: mx.Dtype, tolerance: float, has_entropies: bool) -> None:
    given = logits(dtype)
    given[1, 5:100] = -mx.inf  # what a mask over the vocabulary leaves
    divisor = mx.where(TEMPERATURE > 0, TEMPERATURE, 1.0)
    fused = module._FusedScores(given, divisor, TOKENS.astype(mx.int32))
    plain = module._PlainScores(given, divisor, TOKENS)
    assert mx.abs(fused.logprobs_N - plain.logprobs_N).max().item() <= 1e-5
    assert mx.abs(fused.entropies_N - plain.entropies_N).max().item() <= 1e-5
    of_entropies = mx.array([0.5, 0.0, -1.0, 0.25]) if has_entropies else None
    gradients = [one.gradient(mx.array([1.0, -2.0, 0.5, 3.0]), of_entropies) for one in (fused, plain)]
    assert gradients[0].dtype == dtype
    assert mx.abs(gradients[0].astype(mx.float32) - gradients[1]).max().item() <= tolerance


@needs_cuda
def test_the_gradient_reaches_every_row_where_there_are_more_than_a_grid_has() -> None:
    given = mx.random.normal((150_000, 8), key=mx.random.key(2))
    tokens, ones = mx.arange(150_000, dtype=mx.int32) % 8, mx.ones((150_000,))
    fused = module._FusedScores(given, ones, tokens).gradient(ones, ones)
    plain = module._PlainScores(given, ones, tokens).gradient(ones, ones)
    assert mx.abs(fused - plain).max().item() <= 2e-6


@needs_cuda
@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float32, 1e-5), (mx.bfloat16, 5e-2)])
def test_the_swiglu_kernels_agree_with_the_operations(dtype: mx.Dtype, tolerance: float) -> None:
    gate, x, cotangent = (mx.random.normal((5, 64), key=mx.random.key(seed)).astype(dtype) for seed in range(3))

    def plain(gate: mx.array, x: mx.array) -> mx.array:
        return gate * mx.sigmoid(gate) * x

    wide = [each.astype(mx.float32) for each in (gate, x)]
    expected = [plain(*wide), *mx.vjp(plain, wide, [cotangent.astype(mx.float32)])[1]]
    found = [swiglu(gate, x), *mx.vjp(swiglu, [gate, x], [cotangent])[1]]
    assert all(one.dtype == dtype for one in found)
    assert all(mx.abs(one - other).max().item() <= tolerance for one, other in zip(found, expected, strict=True))
