import mlx.core as mx
import numpy as np
import pytest

from parallm.errors import CheckpointError
from parallm.learner.optimizer import JOINED_AT_ONCE, AdapterOptimizer, clip_gradient_norm, learning_rate, vector_of
from parallm.learner.settings import LearnerSettings

SITE = "model.layers.0.self_attn.q_proj"
ARRAYS = {f"{SITE}.lora_a": mx.array([[1.0, -2.0], [3.0, 0.5]]), f"{SITE}.lora_b": mx.array([[0.25, -0.125]])}
GRADIENTS = {f"{SITE}.lora_a": mx.array([[0.1, -0.2], [7.0, -1e-4]]), f"{SITE}.lora_b": mx.array([[3.0, -3.0]])}


def settings(**values: object) -> LearnerSettings:
    return LearnerSettings(**({"warmup_steps": 0, "learning_rate": 1e-3} | values))  # type: ignore[arg-type]


def applied(
    optimizer: AdapterOptimizer, arrays: dict[str, mx.array], gradients: dict[str, mx.array], step: int
) -> dict[str, mx.array]:
    parameters_N, state = optimizer.compute_step(optimizer.layout.join(arrays), optimizer.layout.join(gradients), step)
    optimizer.restore(state)
    return optimizer.layout.split(parameters_N)


def test_the_first_step_has_the_size_of_the_learning_rate() -> None:
    updated = applied(AdapterOptimizer(settings(), 10, ARRAYS), ARRAYS, GRADIENTS, 0)
    for name, gradient in GRADIENTS.items():
        change = np.array(updated[name]) - np.array(ARRAYS[name])
        assert change == pytest.approx(-1e-3 * np.sign(np.array(gradient)), rel=1e-3)


def test_steps_are_those_of_adamw() -> None:
    chosen = settings(betas=(0.9, 0.95), weight_decay=0.1, epsilon=1e-6)
    optimizer = AdapterOptimizer(chosen, 10, ARRAYS)
    name = f"{SITE}.lora_a"
    arrays, expected = ARRAYS, np.array(ARRAYS[name], np.float64)
    first, second = np.zeros((2, 2)), np.zeros((2, 2))
    for step in range(4):
        gradients = {key: gradient * (1 - 0.6 * step) for key, gradient in GRADIENTS.items()}
        arrays = applied(optimizer, arrays, gradients, step)
        gradient = np.array(gradients[name], np.float64)
        first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient**2
        scaled = first / (1 - 0.9 ** (step + 1)) / (np.sqrt(second / (1 - 0.95 ** (step + 1))) + 1e-6)
        expected = expected * (1 - 1e-3 * 0.1) - 1e-3 * scaled
    assert np.array(arrays[name]) == pytest.approx(expected, abs=1e-6)


def test_only_b_takes_the_ratio_of_lora_plus() -> None:
    arrays, gradients = ({**each, f"{SITE}.m": mx.array([1.0, 2.0])} for each in (ARRAYS, GRADIENTS))
    plain = AdapterOptimizer(settings(weight_decay=0.1), 10, arrays)
    faster = AdapterOptimizer(settings(weight_decay=0.1, lora_plus_ratio=16.0), 10, arrays)
    slow, fast = arrays, arrays
    for step in range(3):
        slow, fast = applied(plain, slow, gradients, step), applied(faster, fast, gradients, step)
        assert slow[f"{SITE}.lora_a"].tolist() == fast[f"{SITE}.lora_a"].tolist()
        assert slow[f"{SITE}.m"].tolist() == fast[f"{SITE}.m"].tolist()
    changes = [np.array(each[f"{SITE}.lora_b"] - arrays[f"{SITE}.lora_b"]) for each in (slow, fast)]
    assert changes[1] == pytest.approx(16 * changes[0], rel=0.01)
    assert changes[0] == pytest.approx(-3e-3 * np.sign(np.array(gradients[f"{SITE}.lora_b"])), rel=0.05)


def test_the_given_arrays_stay_as_they_are() -> None:
    before = {name: array.tolist() for name, array in ARRAYS.items()}
    applied(AdapterOptimizer(settings(), 10, ARRAYS), ARRAYS, GRADIENTS, 0)
    assert {name: array.tolist() for name, array in ARRAYS.items()} == before


def test_a_restored_optimizer_goes_on_bit_for_bit() -> None:
    chosen = settings(lora_plus_ratio=4.0)
    optimizer = AdapterOptimizer(chosen, 10, ARRAYS)
    arrays = ARRAYS
    for step in range(3):
        arrays = applied(optimizer, arrays, GRADIENTS, step)
    restored = AdapterOptimizer(chosen, 10, ARRAYS)
    restored.restore(optimizer.state())
    smaller = {name: gradient * 0.01 for name, gradient in GRADIENTS.items()}
    for step in range(3, 5):
        one, other = applied(optimizer, arrays, smaller, step), applied(restored, arrays, smaller, step)
        assert {name: array.tolist() for name, array in one.items()} == {
            name: array.tolist() for name, array in other.items()
        }
        arrays = one
    assert optimizer.state().keys() == restored.state().keys()


def test_the_state_is_two_moments_of_each_group() -> None:
    names = set(AdapterOptimizer(settings(), 10, ARRAYS).state())
    kinds = ("step", "learning_rate", "all.m", "all.v")
    assert names == {f"{group}.{kind}" for group in ("b", "others") for kind in kinds}


def test_a_state_of_other_arrays_is_refused() -> None:
    other = AdapterOptimizer(settings(), 10, {"lora_a": mx.zeros((2, 3))})
    with pytest.raises(CheckpointError, match=r"b\.all\.m is \(0,\) in the checkpoint, and \(2,\) here"):
        AdapterOptimizer(settings(), 10, ARRAYS).restore(other.state())


def test_warm_up_is_linear_and_reaches_the_full_rate_at_its_last_step() -> None:
    chosen = settings(learning_rate=5e-5, warmup_steps=5)
    assert [learning_rate(chosen, step, 100) for step in range(7)] == pytest.approx(
        [1e-5, 2e-5, 3e-5, 4e-5, 5e-5, 5e-5, 5e-5], rel=1e-12
    )


def test_a_cosine_falls_from_the_full_rate_to_zero() -> None:
    chosen = settings(learning_rate=1.0, warmup_steps=5, schedule="cosine")
    rates = [learning_rate(chosen, step, 15) for step in (4, 5, 10, 15, 99)]
    assert rates == pytest.approx([1.0, 1.0, 0.5, 0.0, 0.0], abs=1e-12)


def test_a_run_shorter_than_its_warm_up_has_a_rate() -> None:
    chosen = settings(learning_rate=1.0, warmup_steps=5, schedule="cosine")
    assert [learning_rate(chosen, step, 3) for step in (0, 2, 5)] == pytest.approx([0.2, 0.6, 1.0])


def test_gradients_are_scaled_down_to_the_norm_and_never_up() -> None:
    gradient = mx.array([3.0, 4.0])
    norm = mx.array(5.0)
    assert clip_gradient_norm(gradient, norm, 1.0).tolist() == pytest.approx([0.6, 0.8])
    assert clip_gradient_norm(gradient, norm, 6.0).tolist() == gradient.tolist()
    assert clip_gradient_norm(mx.zeros(2), mx.array(0.0), 1.0).tolist() == [0.0, 0.0]


def test_arrays_are_joined_a_few_at_a_time_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [mx.arange(3 * place, 3 * place + 3).reshape(1, 3) for place in range(300)]
    joins, concatenate = list[int](), mx.concatenate

    def counted(parts: list[mx.array]) -> mx.array:
        joins.append(len(parts))
        return concatenate(parts)

    monkeypatch.setattr(mx, "concatenate", counted)
    assert vector_of(arrays).tolist() == list(range(900))
    assert vector_of(arrays[:1]).tolist() == [0, 1, 2]
    assert max(joins) <= JOINED_AT_ONCE
    assert sum(joins) <= 1.1 * len(arrays)
