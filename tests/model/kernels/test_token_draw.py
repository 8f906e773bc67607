"""The kernel that samples: its arithmetic in numpy stands in for it where there is no GPU, and is compared with it."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from parallm.engine.sampling import sampler
from parallm.engine.sampling.filters import filtered
from parallm.engine.sampling.sampler import row_sampling, sample
from parallm.model.kernels import token_draw
from parallm.model.kernels.cuda import has_kernels
from parallm.model.kernels.host_memory import HostResult
from parallm.model.kernels.token_draw import SPAN, VALUES_OF_LANE, draw_tokens, score_tokens
from parallm.model.logprobs import softmax_of, token_logprobs
from parallm.types import SamplingParams
from tests.model.kernels.cuda_on_cpu import CpuKernels

Floats = npt.NDArray[np.float32]
LANES = SPAN // VALUES_OF_LANE
ONE, FINE = np.float32(2.0**40), np.float32(2.0**50)


def share_of(total: int, uniform: np.float32) -> int:
    share = int(uniform * np.float32(2.0**24))
    return (total >> 24) * share + (((total & 0xFFFFFF) * share) >> 24)


def first_above(weights: Sequence[int], uniform: np.float32) -> int:
    target, until = share_of(sum(weights), uniform), 0
    for index, weight in enumerate(weights):
        if until <= target < until + weight:
            return index
        until += weight
    return 0


def emulated_row(logits_V: Floats, temperature: float, uniforms: Floats | None, given: int | None) -> tuple[int, float]:
    """One row as a block computes it, in spans of lanes."""
    scale = np.float32(1) / np.float32(temperature if temperature > 0 else 1)
    scaled = np.full(-(-len(logits_V) // SPAN) * SPAN, -np.inf, np.float32)
    scaled[: len(logits_V)] = logits_V * scale
    most = np.float32(np.nanmax(logits_V * scale))
    exponentials = np.exp(scaled - most).reshape(-1, LANES, VALUES_OF_LANE)
    lanes = np.zeros(exponentials.shape[:2], np.float32)
    for place in range(VALUES_OF_LANE):
        lanes += exponentials[:, :, place]
    step = LANES // 2
    while step:
        lanes = lanes + lanes[:, np.arange(LANES) ^ step]
        step //= 2
    sums = lanes[:, 0]
    is_broken = not (sums < np.inf).all()
    weights = [0 if np.isnan(one) else int(one * ONE) for one in sums]
    token = int(np.flatnonzero(scaled == most)[0])
    if given is not None:
        token = given
    elif uniforms is not None and temperature > 0:
        span = first_above(weights, uniforms[0])
        fine = [0 if np.isnan(one) else int(one * FINE) for one in exponentials[span].reshape(-1)]
        token = span * SPAN + first_above(fine, uniforms[1])
    total = np.float32(np.nan) if is_broken else np.float32(sum(weights) / float(ONE))
    return token, float(logits_V[token] * scale - (most + np.log(total)))


def emulated(
    logits_BV: mx.array,
    temperatures_B: mx.array,
    uniforms_B2: mx.array | None = None,
    tokens_B: mx.array | None = None,
) -> tuple[mx.array, HostResult]:
    logits, temperatures = np.array(logits_BV.astype(mx.float32)), temperatures_B.tolist()
    uniforms = [None] * len(logits) if uniforms_B2 is None else list(np.array(uniforms_B2))
    given = [None] * len(logits) if tokens_B is None else tokens_B.tolist()
    rows = [emulated_row(*row) for row in zip(logits, temperatures, uniforms, given, strict=True)]
    tokens = np.array([token for token, _ in rows], np.int32)
    bits = np.array([logprob for _, logprob in rows], np.float32).view(np.int32)
    result = HostResult((2, len(rows)))
    result._numbers[: 2 * len(rows)] = [*tokens, *bits]
    return mx.array(tokens), result


@pytest.fixture
def emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling as with kernels."""
    monkeypatch.setattr(sampler, "has_kernels", lambda: True)
    monkeypatch.setattr(sampler, "draw_tokens", emulated)
    monkeypatch.setattr(sampler, "score_tokens", lambda logits, *rest: emulated(logits, rest[0], None, rest[1]))


def params(**fields: float) -> SamplingParams:
    return SamplingParams(max_tokens=1, **fields)  # type: ignore[arg-type]  # top_k is a whole number in every call


FIELDS: list[dict[str, float]] = [
    {"temperature": 0.0},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 40},
    {"top_p": 0.7},
    {"min_p": 0.3},
]


@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize(
    ("vocabulary", "fields"),
    [
        pytest.param(vocabulary, fields, marks=() if place % 2 == number else pytest.mark.slow)
        for place, fields in enumerate(FIELDS)
        for number, vocabulary in enumerate((700, 37))
    ],
    ids=str,
)
def test_draws_follow_the_distribution(fields: dict[str, float], vocabulary: int) -> None:
    """As the plain sampler draws, whose tests hold it against probabilities that are written down."""
    rows, logits = 3000, np.random.default_rng(1).normal(size=vocabulary).astype(np.float32) * 2
    logits_BV = mx.array(np.tile(logits, (rows, 1)))
    drawn = sample(logits_BV, row_sampling([params(**fields)] * rows, list(range(rows))), [0] * rows)
    temperature = fields.get("temperature", 1.0)
    sampling = row_sampling([params(**fields)], [0])
    softmax = softmax_of(mx.array(logits)[None], sampling.temperatures_B)
    weights = np.array(filtered(softmax, sampling.filters)[0], np.float64)
    expected = weights / weights.sum() if temperature > 0 else np.eye(vocabulary)[logits.argmax()]
    counts = np.bincount(np.array(drawn.tokens_B), minlength=vocabulary)
    assert ((counts > 0) <= (expected > 0)).all()
    deviation = np.sqrt(expected * (1 - expected) / rows)
    assert (np.abs(counts / rows - expected) <= 5 * deviation + 1.5 / rows).all()
    wanted_B = token_logprobs(logits_BV, mx.full((rows,), temperature), drawn.tokens_B)
    assert np.abs(drawn.read()[1] - np.array(wanted_B)).max() < 2e-6


@pytest.mark.usefixtures("emulation")
def test_a_row_draws_the_same_whatever_its_neighbours_ask_for() -> None:
    logits = np.random.default_rng(0).normal(size=(40, 300)).astype(np.float32) * 3
    rows = [params(**FIELDS[row % 5]) for row in range(40)]
    seeds, positions = list(range(100, 140)), [row % 9 for row in range(40)]
    together = sample(mx.array(logits), row_sampling(rows, seeds), positions)
    for row in range(40):
        alone = sample(mx.array(logits[row : row + 1]), row_sampling([rows[row]], [seeds[row]]), [positions[row]])
        assert [one.tolist() for one in alone.read()] == [[one[row]] for one in together.read()]


@pytest.mark.usefixtures("emulation")
def test_a_row_with_a_number_that_is_none_is_told_by_its_log_probability() -> None:
    logits = np.zeros((3, 600), np.float32)
    logits[1, 555] = np.nan
    drawn = sample(mx.array(logits), row_sampling([params()] * 3, [1, 2, 3]), [0] * 3)
    assert np.isnan(drawn.read()[1]).tolist() == [False, True, False]
    assert 0 <= drawn.tokens_B[1].item() < 600


def test_a_token_is_never_drawn_with_weight_zero_and_always_at_the_ends() -> None:
    weights, almost_one = [0, 3, 0, 5, 0], np.float32(1 - 2.0**-24)
    assert [first_above(weights, np.float32(0)), first_above(weights, almost_one)] == [1, 3]
    drawn = [first_above(weights, np.float32(share / 2**24)) for share in range(0, 2**24, 2**14)]
    assert drawn.count(1) / len(drawn) == pytest.approx(3 / 8, abs=1e-3)
    assert set(drawn) == {1, 3}


@pytest.mark.skipif(has_kernels(), reason="the kernel itself is tested below")
@pytest.mark.parametrize("vocabulary", [37, 4096])
def test_the_kernel_compiled_for_a_cpu_computes_what_the_emulation_does(
    vocabulary: int, compiled: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_draw, "kernel", compiled)
    compare(vocabulary, mx.float32)


@pytest.mark.skipif(has_kernels(), reason="a kernel on a GPU cannot be spoiled")
@pytest.mark.parametrize(
    ("line", "spoiled"),
    [
        ("packed[row] = token;", "packed[row] = token + 1;"),
        ("packed[rows + row] = ", "packed[row] = "),
        ("tokens[row] = token;", "tokens[0] = token;"),
    ],
)
def test_the_control_finds_a_kernel_that_writes_something_else(
    line: str, spoiled: str, compiled: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "mutation", ("token_draw", line, spoiled))
    monkeypatch.setattr(token_draw, "kernel", compiled)
    with pytest.raises(AssertionError):
        compare(700, mx.float32)


@pytest.mark.skipif(not has_kernels(), reason="CUDA kernels")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize("vocabulary", [37, 256, 700, 4096, 128_256, 151_936, 262_144])
def test_the_kernel_computes_what_the_emulation_does(vocabulary: int, dtype: mx.Dtype) -> None:
    compare(vocabulary, dtype)


def compare(vocabulary: int, dtype: mx.Dtype) -> None:
    random, rows = np.random.default_rng(vocabulary), 9
    logits_BV = mx.array(random.normal(size=(rows, vocabulary)).astype(np.float32) * 3).astype(dtype)
    temperatures_B = mx.array([0.0, 1.0, 0.7, 1.3, 0.0, 1.0, 1.0, 2.0, 1.0])
    uniforms_B2 = mx.array(random.integers(0, 2**24, (rows, 2)).astype(np.float32) / np.float32(2**24))
    tokens_B = mx.array(random.integers(0, vocabulary, rows).astype(np.int32))
    pairs = [
        (draw_tokens(logits_BV, temperatures_B, uniforms_B2), emulated(logits_BV, temperatures_B, uniforms_B2)),
        (draw_tokens(logits_BV, temperatures_B, None), emulated(logits_BV, temperatures_B)),
        (score_tokens(logits_BV, temperatures_B, tokens_B), emulated(logits_BV, temperatures_B, None, tokens_B)),
    ]
    for (own_B, result), (wanted_B, wanted) in pairs:
        # exp may round otherwise, so that a draw beside a bound falls on its other side
        same_B = np.array(own_B) == np.array(wanted_B)
        assert same_B.sum() >= rows - 1
        own_2B, wanted_2B = result.read(), wanted.read()
        difference_B = np.abs(own_2B[1].view(np.float32) - wanted_2B[1].view(np.float32))
        assert difference_B[same_B].max() < 3e-6
        assert own_2B[0].tolist() == own_B.tolist()
