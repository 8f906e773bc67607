"""Properties of the loss; its numbers are in test_oracles.py."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import mlx.core as mx
import numpy as np
import pytest

from parallm.learner.loss.objective import PRESETS, Objective, token_weight
from parallm.learner.loss.policy_loss import LossInputs, is_clipped, kl_estimate, kl_k3, objective_loss
from parallm.learner.settings import Correction, KlEstimator, PolicyTerm

LENGTHS = (5, 1, 8, 3, 7, 2)
EVERYTHING: dict[str, Objective] = {
    **PRESETS,
    **{f"{kind} in the loss": Objective(kl_coefficient=0.1, kl_estimator=kind) for kind in get_args(KlEstimator)},
    **{
        f"unbiased {kind}": Objective(kl_coefficient=0.1, kl_estimator=kind, kl_unbiased=True)
        for kind in get_args(KlEstimator)
    },
    **{kind: Objective(correction=kind) for kind in get_args(Correction)},
    **{kind: Objective(policy=kind) for kind in get_args(PolicyTerm)},
    "off-policy sequences dropped": Objective(off_policy_kl_max=0.05),
    "entropy": Objective(entropy_coefficient=0.1, top_entropy_fraction=0.5),
    "sums": Objective(ratio="sequence", aggregation="seq_mean_token_sum"),
}


def tokens(seed: int, near: float = 0.3) -> tuple[mx.array, mx.array, LossInputs]:
    """Log-probs, entropies and the rest of six sequences, every fourth token masked."""
    chance = np.random.default_rng(seed)
    count = sum(LENGTHS)
    behaviour_N = -chance.exponential(1.0, count)
    new_N, old_N, reference_N = (behaviour_N + near * chance.normal(size=count) for _ in range(3))
    inputs = LossInputs(
        behaviour_N=mx.array(behaviour_N, mx.float32),
        advantages_N=mx.array(np.repeat(chance.normal(size=len(LENGTHS)), LENGTHS), mx.float32),
        weights_N=mx.array((np.arange(count) % 4 != 3) * 0.05, mx.float32),
        rows_N=mx.array(np.repeat(np.arange(len(LENGTHS)), LENGTHS), mx.int32),
        num_rows=len(LENGTHS),
        old_N=mx.array(old_N, mx.float32),
        reference_N=mx.array(reference_N, mx.float32),
        entropy_threshold=0.8,
    )
    return mx.array(new_N, mx.float32), mx.array(chance.exponential(1.0, count), mx.float32), inputs


def loss_and_gradients(
    new_N: mx.array, entropies_N: mx.array, inputs: LossInputs, objective: Objective
) -> tuple[float, np.ndarray]:
    """The gradients with respect to log-probs and entropies one after the other."""
    loss, gradients = mx.value_and_grad(objective_loss, argnums=(0, 1))(new_N, entropies_N, inputs, objective)
    return float(loss.item()), np.concatenate([np.array(one) for one in gradients])


def part(inputs: LossInputs, first: int, last: int) -> tuple[slice, LossInputs]:
    """Tokens and inputs of the sequences `first` to `last`."""
    where = slice(sum(LENGTHS[:first]), sum(LENGTHS[:last]))
    arrays = {name: getattr(inputs, name)[where] for name in ("behaviour_N", "advantages_N", "weights_N", "old_N")}
    reference_N, rows_N = inputs.reference_N, inputs.rows_N[where] - first
    assert reference_N is not None
    return where, replace(inputs, **arrays, reference_N=reference_N[where], rows_N=rows_N, num_rows=last - first)


@pytest.mark.parametrize("name", EVERYTHING)
def test_a_step_may_be_cut_into_micro_batches_between_sequences(name: str) -> None:
    new_N, entropies_N, inputs = tokens(1)
    whole, gradient = loss_and_gradients(new_N, entropies_N, inputs, EVERYTHING[name])
    parts = [part(inputs, *ends) for ends in ((0, 2), (2, 3), (3, 6))]
    found = [loss_and_gradients(new_N[w], entropies_N[w], one, EVERYTHING[name]) for w, one in parts]
    assert sum(loss for loss, _ in found) == pytest.approx(whole, abs=1e-6)
    halves = [np.split(gradients, 2) for _, gradients in found]
    assert np.concatenate([half[kind] for kind in (0, 1) for half in halves]) == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize("name", EVERYTHING)
def test_what_is_masked_cannot_reach_the_loss(name: str) -> None:
    new_N, entropies_N, inputs = tokens(2)
    expected, gradient = loss_and_gradients(new_N, entropies_N, inputs, EVERYTHING[name])
    for wrong in (math.nan, math.inf, -math.inf, 200.0):

        def spoilt(values_N: mx.array | None, wrong: float = wrong) -> mx.array:
            return mx.where(inputs.weights_N > 0, values_N, wrong)

        names = ("behaviour_N", "advantages_N", "old_N", "reference_N")
        broken = replace(inputs, **{one: spoilt(getattr(inputs, one)) for one in names})
        found = loss_and_gradients(spoilt(new_N), spoilt(entropies_N), broken, EVERYTHING[name])
        assert found[0] == expected
        assert found[1].tolist() == gradient.tolist()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", sorted(EVERYTHING.keys() - {"sft", "likelihood"}))  # nobody has sampled
def test_a_log_prob_that_is_not_finite_cannot_hide_behind_a_clip(name: str, wrong: float) -> None:
    new_N, entropies_N, inputs = tokens(3)
    broken_N = mx.where(mx.arange(sum(LENGTHS)) == 6, wrong, inputs.behaviour_N)
    old_N = inputs.old_N if EVERYTHING[name].correction != "none" else None
    of_sampler = replace(inputs, behaviour_N=broken_N, old_N=old_N)
    assert math.isnan(loss_and_gradients(new_N, entropies_N, of_sampler, EVERYTHING[name])[0])
    assert math.isnan(loss_and_gradients(broken_N, entropies_N, inputs, EVERYTHING[name])[0])


@pytest.mark.parametrize("name", [name for name in EVERYTHING if not EVERYTHING[name].kl_coefficient])
def test_on_policy_every_loss_is_the_plain_policy_gradient(name: str) -> None:
    new_N, entropies_N, inputs = tokens(4)
    objective = replace(EVERYTHING[name], entropy_coefficient=0.0)
    on_policy = replace(inputs, behaviour_N=new_N, old_N=None, entropy_threshold=None)
    _, gradients = loss_and_gradients(new_N, entropies_N, on_policy, objective)
    expected_N = np.array(-inputs.weights_N * inputs.advantages_N)
    if objective.ratio in ("sequence", "sequence_sum"):  # one ratio spreads a sequence's loss evenly over its tokens
        rows_N, trained_N = np.array(inputs.rows_N), np.array(inputs.weights_N > 0)
        counts_S = np.bincount(rows_N, trained_N, minlength=len(LENGTHS))
        expected_N = expected_N * (counts_S[rows_N] if objective.ratio == "sequence_sum" else 1.0)
    tolerance = 0.0 if objective.policy != "sapo" else 1e-8
    assert gradients[: sum(LENGTHS)] == pytest.approx(expected_N, rel=1e-6, abs=tolerance)
    assert not is_clipped(new_N, on_policy, objective).any().item()


def test_on_policy_the_token_ratio_is_exactly_one() -> None:
    new_N, entropies_N, inputs = tokens(5)
    one = replace(inputs, behaviour_N=new_N, old_N=None, entropy_threshold=None)
    _, gradients = loss_and_gradients(new_N, entropies_N, one, PRESETS["dapo"])
    assert gradients[: sum(LENGTHS)].tolist() == (-inputs.weights_N * inputs.advantages_N).tolist()


@pytest.mark.parametrize("kind", get_args(KlEstimator))
@pytest.mark.parametrize("unbiased", [False, True])
def test_at_the_reference_kl_has_no_gradient(kind: KlEstimator, unbiased: bool) -> None:
    new_N, entropies_N, inputs = tokens(6)
    objective = Objective(kl_coefficient=1.0, kl_estimator=kind, kl_unbiased=unbiased)
    still = replace(inputs, advantages_N=mx.zeros(sum(LENGTHS)), reference_N=new_N)
    assert np.abs(loss_and_gradients(new_N, entropies_N, still, objective)[1]).max() == 0


def test_estimates_of_kl_by_hand() -> None:
    new_N, reference_N = mx.array([-1.0, -2.0]), mx.array([-1.5, -1.0])
    assert kl_estimate(new_N, reference_N, "k1").tolist() == [0.5, -1.0]
    assert kl_estimate(new_N, reference_N, "k2").tolist() == [0.125, 0.5]
    assert kl_estimate(new_N, reference_N, "k3").tolist() == pytest.approx([math.exp(-0.5) - 0.5, math.e - 2])
    assert kl_k3(new_N, new_N).tolist() == [0.0, 0.0]


def test_the_gradient_of_k1_and_k2_is_the_log_ratio() -> None:
    new_N, reference_N = mx.array([-1.0, -2.0]), mx.array([-1.5, -1.0])
    for kind in ("k1", "k2"):
        gradient = mx.grad(lambda one, kind=kind: kl_estimate(one, reference_N, kind).sum())(new_N)
        assert gradient.tolist() == [0.5, -1.0]


def test_a_clipped_ratio_too_large_for_float32_has_a_gradient_of_zero() -> None:
    inputs = LossInputs(
        behaviour_N=mx.array([-300.0, -1.0]),
        advantages_N=mx.ones(2),
        weights_N=mx.ones(2),
        rows_N=mx.zeros(2, mx.int32),
        num_rows=1,
    )
    for ratio in ("token", "sequence_sum"):
        loss, gradients = loss_and_gradients(-mx.ones(2), mx.zeros(2), inputs, Objective(ratio=ratio))
        assert math.isfinite(loss)
        assert gradients[0] == 0


@pytest.mark.parametrize("log_ratio", [-100.0, -1.0, 0.0, 1.0, 20.0, 88.0, 90.0, 500.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_gate_of_sapo_is_that_of_its_formula_for_any_ratio(log_ratio: float, advantage: float) -> None:
    inputs = LossInputs(
        behaviour_N=mx.array([-1.0 - log_ratio]),
        advantages_N=mx.array([advantage]),
        weights_N=mx.ones(1),
        rows_N=mx.zeros(1, mx.int32),
        num_rows=1,
    )
    objective = Objective(policy="sapo", ratio="sequence_sum")
    temperature = objective.sapo_temperature_positive if advantage > 0 else objective.sapo_temperature_negative
    gate = 1 / (1 + math.exp(-temperature * math.expm1(log_ratio)))
    slope = 4 * gate * (1 - gate) * math.exp(log_ratio)
    loss, gradients = loss_and_gradients(-mx.ones(1), mx.zeros(1), inputs, objective)
    assert loss == pytest.approx(-advantage * 4 * gate / temperature, rel=1e-5)
    assert gradients[0] == pytest.approx(-advantage * slope, rel=1e-4, abs=1e-6)


def test_clipping_counts_only_where_it_bounds_the_gradient() -> None:
    logprobs_N = mx.log(mx.array([1.3, 1.3, 0.7, 0.7, 1.3]))
    inputs = LossInputs(
        behaviour_N=mx.zeros(5),
        advantages_N=mx.array([1.0, -1.0, 1.0, -1.0, 1.0]),
        weights_N=mx.array([1.0, 1.0, 1.0, 1.0, 0.0]),
        rows_N=mx.arange(5),
        num_rows=5,
    )

    def clipped(**choices: object) -> list[bool]:
        found: list[bool] = is_clipped(logprobs_N, inputs, Objective(**choices)).tolist()  # type: ignore[arg-type]
        return found

    assert clipped() == [True, False, False, True, False]
    assert clipped(dual_clip_ratio_max=1.25) == [True, True, False, True, False]
    assert clipped(policy="cispo", cispo_ratio_max=1.2) == [True, True, False, False, False]
    assert clipped(policy="dppo_tv") == [True, False, False, True, False]
    assert clipped(policy="ipo") == [True, True, True, True, False]
    assert clipped(policy="reinforce") == [False] * 5


def test_aggregations_weigh_tokens_as_they_say() -> None:
    def weights(aggregation: str, lengths: Sequence[int]) -> list[float]:
        objective = Objective(aggregation=aggregation)  # type: ignore[arg-type]
        step = {"num_tokens": sum(lengths), "num_completions": len(lengths), "max_tokens": 10}
        return [token_weight(objective, length=length, **step) for length in lengths]

    assert weights("token_mean", (3, 1)) == [0.25, 0.25]
    assert weights("seq_mean_token_mean", (3, 1)) == pytest.approx([1 / 6, 1 / 2])
    assert weights("seq_mean_token_sum", (3, 1)) == [0.5, 0.5]
    assert weights("constant", (3, 1)) == [0.05, 0.05]


def test_where_all_lengths_are_equal_the_means_agree() -> None:
    step = {"length": 4, "num_tokens": 12, "num_completions": 3, "max_tokens": 4}
    means = [Objective(aggregation=kind) for kind in ("token_mean", "seq_mean_token_mean", "constant")]
    assert [token_weight(objective, **step) for objective in means] == pytest.approx([1 / 12] * 3)
