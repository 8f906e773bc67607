"""Against numbers of TRL 1.16.0 (float64, four completions of two groups, 18 tokens), and by hand."""

import mlx.core as mx
import numpy as np
import pytest

from parallm.learner.objective import PRESETS, Objective, group_advantages, is_clipped, kl_k3, policy_loss, token_weight

LENGTHS = (6, 3, 4, 5)
REWARDS = ((1.0, 0.0), (0.2, 0.9))
OLD = (
    (-0.1, -1.18, -0.51, -2.0, -0.05, -0.93),
    (-0.69, -0.32, -1.45),
    (-2.6, -0.39, -0.6, -0.13),
    (-0.22, -0.81, -2.2, -0.45, -1.07),
)
NEW = (
    (-0.05, -1.28, -0.21, -1.98, -0.06, -0.68),
    (-1.09, -0.22, -1.5),
    (-2.45, -0.39, -0.95, 0.22),
    (-0.24, -0.36, -2.4, -0.44, -0.95),
)
GRPO_GRADIENT = (
    (-0.030968992, -0.0266552585, 0.0, -0.03005372, -0.0291654983, 0.0),
    (0.0, 0.0651136124, 0.0560438056),
    (0.0513359331, 0.0441852471, 0.0, 0.0627018502),
    (-0.0346482564, 0.0, -0.0289406565, -0.0357034529, -0.0398549816),
)
CLIP_HIGHER_GRADIENT = (
    (-0.0412919894, -0.0355403446, 0.0, -0.0400716267, -0.0388873311, 0.0),
    (0.0, 0.0434090749, 0.0373625371),
    (0.0456319405, 0.0392757752, 0.0, 0.055734978),
    (-0.0384980627, 0.0, -0.032156285, -0.0396705033, -0.0442833128),
)
DR_GRPO_GRADIENT = (
    (-0.0164261109, -0.0141380847, 0.0, -0.0159406459, -0.0154695287, 0.0),
    (0.0, 0.0172682956, 0.0148629598),
    (0.012707562, 0.0109375, 0.0, 0.0155210513),
    (-0.010720923, 0.0, -0.0089548676, -0.0110474237, -0.0123319968),
)
# TRL's DAPO divides by the standard deviation, ours does not: its clipping and aggregation are the same
CLIP_HIGHER = Objective(divide_by_std=True, clip_low=0.2, clip_high=0.28, aggregation="token_mean")


def flat(rows: tuple[tuple[float, ...], ...]) -> mx.array:
    return mx.array([value for row in rows for value in row])


def loss_and_gradient(objective: Objective) -> tuple[float, list[float]]:
    advantages = [float(a) for rewards in REWARDS for a in group_advantages(rewards, objective.divide_by_std)]
    weights = [token_weight(objective, length=n, num_tokens=18, num_completions=4, max_tokens=8) for n in LENGTHS]
    loss, gradient = mx.value_and_grad(policy_loss)(
        flat(NEW),
        flat(OLD),
        mx.array(np.repeat(np.asarray(advantages, np.float32), LENGTHS)),
        mx.array(np.repeat(np.asarray(weights, np.float32), LENGTHS)),
        objective,
    )
    return float(loss.item()), gradient.tolist()


@pytest.mark.parametrize(
    ("objective", "loss", "gradient"),
    [
        (PRESETS["grpo"], -0.0072469006, GRPO_GRADIENT),
        (CLIP_HIGHER, -0.1769670753, CLIP_HIGHER_GRADIENT),
        (PRESETS["dr_grpo"], -0.0631072126, DR_GRPO_GRADIENT),
    ],
    ids=["grpo", "dapo_clip_higher", "dr_grpo"],
)
def test_loss_and_gradient_are_those_of_trl(
    objective: Objective, loss: float, gradient: tuple[tuple[float, ...], ...]
) -> None:
    found_loss, found_gradient = loss_and_gradient(objective)
    assert found_loss == pytest.approx(loss, abs=1e-6)
    assert found_gradient == pytest.approx([value for row in gradient for value in row], abs=1e-6)


def test_dapo_differs_from_trls_clip_higher_only_in_the_advantage() -> None:
    assert PRESETS["dapo"] == Objective(divide_by_std=False, clip_low=0.2, clip_high=0.28, aggregation="token_mean")


def test_advantages_are_relative_to_the_group() -> None:
    assert group_advantages([1, 0], False).tolist() == [0.5, -0.5]
    assert group_advantages([1, 0], True) == pytest.approx([0.7070067953, -0.7070067953], abs=1e-7)
    assert group_advantages([0.2, 0.9], True) == pytest.approx([-0.7069639529, 0.7069639529], abs=1e-7)


def test_equal_rewards_have_no_advantage() -> None:
    assert group_advantages([0.5] * 8, True).tolist() == [0.0] * 8


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_leaves_no_advantage_finite(reward: float) -> None:
    assert np.isnan(group_advantages([1.0, reward, 0.0], False)).all()


def test_a_ratio_of_one_is_the_plain_policy_gradient() -> None:
    advantages = mx.array([1.0, -2.0, 0.5])
    logprobs = mx.array([-1.0, -0.2, -3.0])
    gradient = mx.grad(policy_loss)(logprobs, logprobs, advantages, mx.ones(3), PRESETS["dapo"])
    assert gradient.tolist() == [-1.0, 2.0, -0.5]


def test_a_weight_of_zero_masks_a_token() -> None:
    new, old, advantages = flat(NEW)[:2], flat(OLD)[:2], mx.array([1.0, 1.0])
    gradient = mx.grad(policy_loss)(new, old, advantages, mx.array([0.0, 1.0]), PRESETS["dapo"])
    assert gradient[0].item() == 0
    assert gradient[1].item() != 0


def test_clipping_counts_only_where_it_removes_the_gradient() -> None:
    behaviour = mx.zeros(4)
    logprobs = mx.log(mx.array([1.3, 1.3, 0.7, 0.7]))
    clipped = is_clipped(logprobs, behaviour, mx.array([1.0, -1.0, 1.0, -1.0]), PRESETS["dapo"])
    assert clipped.tolist() == [True, False, False, True]


def test_the_estimate_of_kl_is_zero_at_the_policy_itself_and_positive_elsewhere() -> None:
    assert kl_k3(flat(OLD), flat(OLD)).tolist() == [0.0] * 18
    assert kl_k3(mx.array([-1.0]), mx.array([-1.5])).item() == pytest.approx(0.1487213, abs=1e-6)
    assert float(kl_k3(flat(NEW), flat(OLD)).min().item()) >= 0
