"""The kernels against arithmetic in float64: their source on a CPU, the kernels on a GPU."""

import shutil

import mlx.core as mx
import numpy as np
import pytest

from parallm.model.kernels import token_scores as module
from parallm.model.kernels.cuda import on_cuda
from parallm.model.kernels.token_scores import token_scores
from parallm.model.patches.forward import swiglu
from tests.model.kernels.cuda_on_cpu import CpuKernels, needs_compiler

TEMPERATURE = mx.array([1.0, 0.7, 0.0, 1.3])
TOKENS = mx.array([3, 0, 299, 7])
SCORE_TOLERANCE = 2e-5
GRADIENT_TOLERANCES = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1e-2}
DTYPES = [mx.float32, mx.bfloat16 if on_cuda() else mx.float16]
needs_cuda = pytest.mark.skipif(not on_cuda(), reason="needs MLX's CUDA build")
needs_kernels = pytest.mark.skipif(not on_cuda() and shutil.which("g++") is None, reason="needs g++, or CUDA")


@pytest.fixture
def kernels(compiled: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> CpuKernels:
    compiled.mutation = "", "", ""
    if not on_cuda():
        monkeypatch.setattr(module, "kernel", compiled)
    return compiled


def logits(dtype: mx.Dtype = mx.float32, size: int = 300) -> mx.array:
    return (mx.random.normal((4, size), key=mx.random.key(1)) * 5).astype(dtype)


def differs(given: mx.array, has_entropies: bool) -> bool:
    """Whether the kernels' log-probs, entropies or gradient differ from those in float64."""
    tokens, weights = np.array([3, 0, -1, 1]) % given.shape[1], np.array([1.0, -2.0, 0.5, 3.0])
    of_entropies = np.array([0.5, 0.0, -1.0, 0.25]) if has_entropies else np.zeros(4)
    divisor = np.where(np.array(TEMPERATURE) > 0, np.array(TEMPERATURE), 1.0)[:, None]
    scaled = np.array(given.astype(mx.float32), np.float64) / divisor
    exponentials = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
    logprobs = np.log(np.maximum(probabilities, 1e-300))
    entropies = -(probabilities * logprobs).sum(axis=1, keepdims=True)
    chosen = np.arange(given.shape[1]) == tokens[:, None]
    slopes = weights[:, None] * (chosen - probabilities)
    slopes -= of_entropies[:, None] * probabilities * (logprobs + entropies)

    scores = module._FusedScores(given, mx.array(divisor[:, 0], mx.float32), mx.array(tokens, mx.int32))
    gradient = scores.gradient(mx.array(weights), mx.array(of_entropies) if has_entropies else None)
    assert gradient.dtype == given.dtype
    pairs = [
        (scores.logprobs_N, logprobs[chosen], SCORE_TOLERANCE),
        (scores.entropies_N, entropies[:, 0], SCORE_TOLERANCE),
        (gradient.astype(mx.float32), slopes / divisor, GRADIENT_TOLERANCES[given.dtype]),
    ]
    return not all((np.abs(np.array(found) - expected) <= limit).all() for found, expected, limit in pairs)


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


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_entropies", [True, False])
@pytest.mark.parametrize("size", [3, 300, 304, 20_003])
@pytest.mark.usefixtures("kernels")
def test_the_kernels_agree_with_float64(dtype: mx.Dtype, has_entropies: bool, size: int) -> None:
    given = logits(dtype, size)
    given[1, max(1, size // 3) : -1] = -mx.inf  # what a mask over the vocabulary leaves
    assert not differs(given, has_entropies)


@needs_cuda
def test_rows_may_begin_anywhere() -> None:
    """A part of an array, whose rows begin within a vector, where those of the gradient do not."""
    whole = logits(mx.float16, 307).reshape(-1)
    for start in (1, 3, 8):
        assert not differs(whole[start : start + 4 * 304].reshape(4, 304), True)


@needs_compiler
@pytest.mark.cpu
@pytest.mark.parametrize(
    ("name", "old", "new", "size"),
    [
        ("token_scores", "first += AT_ONCE * blockDim.x", "first += blockDim.x", 5003),
        ("token_scores", "product *= shrunk", "", 5003),
        ("token_scores", "min(V, skipped ? P::size - skipped : 0)", "skipped ? P::size - skipped : 0", 2),
        ("token_scores", "logprobs[row] =", "logprobs[row] = 1e-4f +", 19),
        ("token_scores", "if (after < V) take(after);", "", 19),
        ("token_scores_gradient", "max(begin, 0)", "max(begin, 1)", 19),
        ("token_scores_gradient", "probability * (logprob + entropy)", "probability * logprob", 19),
    ],
)
def test_another_arithmetic_is_found(kernels: CpuKernels, name: str, old: str, new: str, size: int) -> None:
    kernels.mutation = name, old, new
    assert differs(logits(mx.float16, size), True)


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
