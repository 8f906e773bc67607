import mlx.core as mx
import numpy as np
import pytest

from parallm.engine.sampling.sampler import row_sampling, sample
from parallm.types import SamplingParams

LOGITS = np.array([2.0, -1.0, 1.5, 0.0, 3.0, -4.0, 1.0, 2.5], np.float32)
NUM_DRAWS = 4000


def params(**fields: float) -> SamplingParams:
    return SamplingParams(max_tokens=1, **fields)  # type: ignore[arg-type]  # top_k is a whole number in every call


def reference(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> np.ndarray:
    """Probabilities of the eight tokens, written down token by token from the most likely one."""
    full = np.exp(LOGITS.astype(np.float64) / temperature)
    full /= full.sum()
    kept, mass = np.zeros(8), 0.0
    for rank, token in enumerate(np.argsort(-full)):
        if (rank < top_k or top_k == 0) and mass < top_p and full[token] >= min_p * full.max():
            kept[token] = full[token]
        mass += full[token]
    return kept / kept.sum()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_p": 0.7},
        {"top_p": 0.01},
        {"min_p": 0.3},
        {"temperature": 1.5, "top_k": 5, "top_p": 0.8, "min_p": 0.1},
    ],
    ids=str,
)
def test_draws_follow_the_filtered_distribution(fields: dict[str, float]) -> None:
    logits_BV = mx.array(np.tile(LOGITS, (NUM_DRAWS, 1)))
    drawn = sample(logits_BV, row_sampling([params(**fields)] * NUM_DRAWS, list(range(NUM_DRAWS))), [0] * NUM_DRAWS)
    counts = np.bincount(np.array(drawn.tokens_B), minlength=8)
    expected = reference(**fields)  # type: ignore[arg-type]  # top_k is a whole number in every case
    assert ((counts > 0) <= (expected > 0)).all()
    deviation = np.sqrt(expected * (1 - expected) / NUM_DRAWS)
    assert (np.abs(counts / NUM_DRAWS - expected) <= 4 * deviation + 1e-9).all()


def test_positions_of_one_seed_draw_independently() -> None:
    logits_BV = mx.array(np.tile(LOGITS, (NUM_DRAWS, 1)))
    drawn = sample(logits_BV, row_sampling([params()] * NUM_DRAWS, [11] * NUM_DRAWS), list(range(NUM_DRAWS)))
    frequencies = np.bincount(np.array(drawn.tokens_B), minlength=8) / NUM_DRAWS
    assert np.abs(frequencies - reference()).max() < 0.04


def test_log_probabilities_are_those_before_the_filters() -> None:
    drawn = sample(mx.array(LOGITS)[None], row_sampling([params(temperature=0.7, top_k=1)], [3]), [0])
    assert drawn.tokens_B.tolist() == [4]
    assert drawn.read()[1].item() == pytest.approx(float(np.log(reference(temperature=0.7)[4])), abs=1e-6)


def test_a_row_draws_the_same_whatever_its_neighbours_ask_for() -> None:
    random = np.random.default_rng(0)
    logits = random.normal(size=(40, 300)).astype(np.float32) * 3
    fields: list[dict[str, float]] = [
        {"temperature": 0.0},
        {"top_k": 7},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 1.3},
    ]
    rows = [params(**fields[row % 5]) for row in range(40)]
    seeds, positions = list(range(100, 140)), [row % 9 for row in range(40)]
    together = sample(mx.array(logits), row_sampling(rows, seeds), positions)
    for row in range(40):
        alone = sample(mx.array(logits[row : row + 1]), row_sampling([rows[row]], [seeds[row]]), [positions[row]])
        assert alone.tokens_B.item() == together.tokens_B[row].item()
        assert alone.read()[1].item() == together.read()[1][row].item()


def test_alternatives_come_most_likely_first_and_only_where_asked() -> None:
    asked = SamplingParams(max_tokens=1, temperature=0.5, top_logprobs=3)
    drawn = sample(mx.array(np.tile(LOGITS, (2, 1))), row_sampling([asked, params()], [1, 2]), [0, 0])
    top_tokens_BK, top_logprobs_BK = drawn.top
    assert top_tokens_BK[0].tolist() == [4, 7, 0]
    expected = np.log(reference(temperature=0.5)[[4, 7, 0]])
    assert np.abs(np.array(top_logprobs_BK[0]) - expected).max() < 1e-5
    assert sample(mx.array(LOGITS)[None], row_sampling([params()], [1]), [0]).top == ()


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    asked = SamplingParams(max_tokens=1, top_logprobs=50)
    drawn = sample(mx.array(LOGITS)[None], row_sampling([asked], [1]), [0])
    assert sorted(drawn.top[0][0].tolist()) == list(range(8))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_log_probabilities_of_half_precision_logits_are_float32(dtype: mx.Dtype) -> None:
    drawn = sample(mx.array(LOGITS)[None].astype(dtype), row_sampling([params()], [1]), [0])
    assert drawn.read()[1].dtype == np.float32
