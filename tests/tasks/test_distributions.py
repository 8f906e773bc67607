"""Samples, log-probs and entropies against closed forms and sums over all actions."""

import json
import math
from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest

from parallm.errors import InvalidRequest
from parallm.model.policy_nets.config import read_config
from parallm.seeds import mix_all
from parallm.tasks.distributions import Distribution, distribution, uniforms_of
from tests.tasks.policy_files import MLP

LOGITS = np.array([[0.3, -1.2, 2.0, 0.1, 0.7], [5.0, 5.0, -5.0, 0.0, -30.0]], np.float32)
MEAN = np.array([[0.2, -1.0], [3.0, 0.0]], np.float32)
LOG_STD = np.array([[-0.5, 0.1], [0.0, 0.4]], np.float32)
NUM_SAMPLES = 20_000


def make(space: Mapping[str, Any], outputs: Mapping[str, np.ndarray], **fields: Any) -> Distribution:
    return distribution(read_config(json.dumps(MLP | {"action_space": space} | fields)), outputs)


def seeds(count: int) -> np.ndarray:
    return mix_all(np.zeros(count, np.uint64), np.arange(count, dtype=np.uint64))


def box(**fields: Any) -> Distribution:
    space = {"type": "box", "shape": [2], "low": [-1.0, 0.0], "high": [1.0, 4.0]}
    return make(space, {"mean": MEAN, "log_std": LOG_STD}, **fields)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - math.log(sum(math.exp(x) for x in logits))


def test_a_discrete_log_prob_is_the_logit_less_the_log_of_the_sum() -> None:
    chances = make({"type": "discrete", "n": 5}, {"logits": LOGITS})
    for action in range(5):
        found = chances.log_prob(np.full((2, 1), action))
        np.testing.assert_allclose(found, [log_softmax(row)[action] for row in LOGITS.astype(float)], rtol=1e-12)
    assert chances.mode().tolist() == [[2], [0]]
    assert chances.action(chances.mode()).shape == (2,)


@pytest.mark.parametrize(
    ("space", "actions"),
    [
        ({"type": "discrete", "n": 5}, [(a,) for a in range(5)]),
        ({"type": "multi_discrete", "nvec": [2, 3]}, list(product(range(2), range(3)))),
        ({"type": "multi_binary", "n": 5}, list(product(range(2), repeat=5))),
    ],
)
def test_probabilities_sum_to_one_and_entropy_is_their_mean(space: dict[str, Any], actions: list[Any]) -> None:
    chances = make(space, {"logits": LOGITS})
    log_probs = np.stack([chances.log_prob(np.tile(np.array(action), (2, 1))) for action in actions])
    np.testing.assert_allclose(np.exp(log_probs).sum(axis=0), 1, rtol=1e-12)
    np.testing.assert_allclose(chances.entropy(), -(np.exp(log_probs) * log_probs).sum(axis=0), rtol=1e-9)
    best = np.array(actions)[log_probs.argmax(axis=0)]
    np.testing.assert_allclose(chances.log_prob(chances.mode()), chances.log_prob(best))


@pytest.mark.parametrize(
    ("space", "size"),
    [
        ({"type": "discrete", "n": 5}, 1),
        ({"type": "multi_discrete", "nvec": [2, 3]}, 2),
        ({"type": "multi_binary", "n": 5}, 5),
    ],
)
def test_samples_have_their_probabilities(space: dict[str, Any], size: int) -> None:
    chances = make(space, {"logits": np.tile(LOGITS[:1], (NUM_SAMPLES, 1))})
    sample = chances.sample(uniforms_of(seeds(NUM_SAMPLES)))
    assert sample.shape == (NUM_SAMPLES, size)
    found, counts = np.unique(sample, axis=0, return_counts=True)
    for action, count in zip(found, counts, strict=True):
        chance = math.exp(chances.log_prob(np.tile(action, (NUM_SAMPLES, 1)))[0])
        assert abs(count / NUM_SAMPLES - chance) < 5 * math.sqrt(chance * (1 - chance) / NUM_SAMPLES) + 1e-9


def test_a_gaussians_log_prob_and_entropy_are_the_closed_form() -> None:
    chances = box()
    sample = np.array([[0.5, -2.0], [9.0, 1.0]])
    std = np.exp(LOG_STD.astype(float))
    density = np.exp(-((sample - MEAN) ** 2) / (2 * std**2)) / (std * math.sqrt(2 * math.pi))
    np.testing.assert_allclose(chances.log_prob(sample), np.log(density).sum(axis=1), rtol=1e-12)
    np.testing.assert_allclose(chances.entropy(), np.log(std * math.sqrt(2 * math.pi * math.e)).sum(axis=1), rtol=1e-12)


def test_log_probs_are_those_of_actions_before_they_are_clipped() -> None:
    chances = box()
    sample = np.array([[0.5, -4.0], [9.0, 1.0]])
    clipped = chances.clipped(sample)
    assert clipped is not None
    assert clipped.tolist() == [[0.5, 0.0], [1.0, 1.0]]
    assert chances.action(sample).tolist() == sample.tolist()
    # the control: of the clipped action it would be another number
    assert np.abs(chances.log_prob(clipped) - chances.log_prob(sample)).min() > 0.1


def test_a_squashed_log_prob_is_that_of_the_scaled_action() -> None:
    chances = box(squash=True)
    sample = np.array([[0.5, -2.0], [0.3, 1.0]])
    scale, center = np.array([1.0, 2.0]), np.array([0.0, 2.0])
    np.testing.assert_allclose(chances.action(sample), center + scale * np.tanh(sample), rtol=1e-6)
    slope = scale * (1 - np.tanh(sample) ** 2)
    expected = box().log_prob(sample) - np.log(slope).sum(axis=1)
    np.testing.assert_allclose(chances.log_prob(sample), expected, rtol=1e-12)
    assert np.isfinite(chances.log_prob(np.full((2, 2), 60.0))).all()  # where 1 - tanh^2 is 0 in floating point
    assert chances.clipped(sample) is None


def test_a_squashed_density_integrates_to_one() -> None:
    space = {"type": "box", "shape": [1], "low": -2.0, "high": 3.0}
    grid = np.linspace(-9, 9, 40_001)
    outputs = {"mean": np.full((len(grid), 1), 0.4), "log_std": np.full((len(grid), 1), -0.3)}
    chances = make(space, outputs, squash=True)
    actions = 0.5 + 2.5 * np.tanh(grid)
    density = np.exp(chances.log_prob(grid[:, None]))
    assert abs(np.trapezoid(density, actions) - 1) < 1e-4


def test_a_squashed_entropy_is_refused_with_the_way_out() -> None:
    with pytest.raises(InvalidRequest, match="-action_log_probs"):
        box(squash=True).entropy()


def test_gaussian_samples_have_their_mean_and_deviation() -> None:
    outputs = {"mean": np.tile(MEAN[:1], (NUM_SAMPLES, 1)), "log_std": np.tile(LOG_STD[:1], (NUM_SAMPLES, 1))}
    chances = make({"type": "box", "shape": [2]}, outputs)
    noise = (chances.sample(uniforms_of(seeds(NUM_SAMPLES))) - MEAN[0]) / np.exp(LOG_STD[0])
    assert np.abs(noise.mean(axis=0)).max() < 5 / math.sqrt(NUM_SAMPLES)
    assert np.abs((noise**2).mean(axis=0) - 1).max() < 5 * math.sqrt(2 / NUM_SAMPLES)
    assert abs((noise[:, 0] * noise[:, 1]).mean()) < 5 / math.sqrt(NUM_SAMPLES)
    assert chances.clipped(noise) is None


def test_a_box_keeps_its_shape() -> None:
    chances = make({"type": "box", "shape": [2, 1]}, {"mean": MEAN, "log_std": LOG_STD})
    assert chances.action(chances.mode()).shape == (2, 2, 1)


def test_uniform_numbers_follow_from_each_rows_seed_alone() -> None:
    together, alone = uniforms_of(seeds(5))(3), uniforms_of(seeds(5)[2:3])(3)
    np.testing.assert_array_equal(together[2:3], alone)
    assert (together > 0).all()
    assert (together < 1).all()
    assert len(np.unique(together)) == 15
