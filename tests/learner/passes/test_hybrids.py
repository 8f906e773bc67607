"""Gradients of packed hybrids against rows alone, whose recurrences take one token after the other."""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.gated_delta import gated_delta_update
from mlx_lm.models.ssm import ssm_update

from parallm.learner.passes.packing import Segment, packed_hidden
from parallm.learner.passes.recomputation import checkpointed
from parallm.model.adapters.initial import initial_arrays
from parallm.model.lora.single import LoraScaling, single_lora
from parallm.model.recurrence.short_conv import ShortConv
from parallm.model.shared_model import SharedModel

Arrays = dict[str, mx.array]
Group = tuple[list[int], list[list[int]]]
"""A prompt and its completions."""
STATE_SPACES = ("mamba2", "nemotron_h", "granitemoehybrid", "falcon_h1")
FAMILIES = ("qwen3_5", "qwen3_next", "olmo_hybrid", *STATE_SPACES, "lfm2")
MARKED = [pytest.param(one, marks=pytest.mark.cpu) if one in STATE_SPACES else one for one in FAMILIES]
"""With CUDA the gradient of mlx-lm's own step of a state space model is NaN (MLX 0.32), which nothing compares with."""
CASES_OF_EACH, LONGEST = 25, 70
TOLERANCE = 1e-4


@contextmanager
def step_by_step(model: SharedModel) -> Iterator[None]:
    """Inside the block the recurrences are mlx-lm's own, one token at a time, and so are the convolutions."""
    modules = {sys.modules[type(layer).__module__] for layer in model.base.modules()}
    own = {"gated_delta_update": gated_delta_update, "ssm_update": ssm_by_steps}
    ours = [(module, name, getattr(module, name)) for module in modules for name in own if hasattr(module, name)]
    convolutions = [layer for layer in model.base.modules() if type(layer) is ShortConv]
    assert ours or convolutions
    for module, name, _ in ours:
        setattr(module, name, own[name])
    for layer in convolutions:
        layer.__class__ = nn.Conv1d
    try:
        yield
    finally:
        for module, name, replacement in ours:
            setattr(module, name, replacement)
        for layer in convolutions:
            layer.__class__ = ShortConv


def ssm_by_steps(
    x: mx.array,
    A_log: mx.array,
    b: mx.array,
    c: mx.array,
    d: mx.array,
    dt: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    limit: tuple[float, float] = (0.001, 100.0),
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
) -> tuple[mx.array, mx.array | None]:
    assert mask is None
    assert lengths is None
    outputs: list[mx.array] = []
    for token in range(x.shape[1]):
        part = slice(token, token + 1)
        output, state = ssm_update(x[:, part], A_log, b[:, part], c[:, part], d, dt[:, part], dt_bias, state, limit)
        outputs.append(output)
    return mx.concatenate(outputs, axis=1), state


def random_groups(seed: int) -> list[Group]:
    chance = random.Random(seed)

    def tokens() -> list[int]:
        return [chance.randrange(385) for _ in range(chance.choice((1, 2, chance.randint(3, LONGEST))))]

    return [(tokens(), [tokens() for _ in range(chance.randint(0, 3))]) for _ in range(chance.randint(1, 3))]


def packed_gradient(
    model: SharedModel, groups: Sequence[Group], arrays: Arrays, *, checkpoints: bool = False
) -> Arrays:
    flat = [token for prompt, completions in groups for row in (prompt, *completions) for token in row]
    segments = [Segment(prompt=len(prompt), runs=tuple((1, len(row)) for row in rows)) for prompt, rows in groups]

    def hidden(arrays: Arrays) -> mx.array:
        with checkpointed(model, checkpoints):
            return packed_hidden(model, mx.array(flat), segments, single_lora(arrays, scaling(model)))

    return gradient(hidden, arrays)


def gradient_of_rows(model: SharedModel, groups: Sequence[Group], arrays: Arrays) -> Arrays:
    def hidden(arrays: Arrays) -> mx.array:
        lora = single_lora(arrays, scaling(model))
        parts: list[mx.array] = []
        for prompt, completions in groups:
            rows = [model.hidden(mx.array([prompt + row]), None, lora)[0] for row in completions or [[]]]
            ends = [row[len(prompt) :] for row in rows] if completions else []
            parts += [rows[0][: len(prompt)], *ends]
        return mx.concatenate(parts)

    with step_by_step(model):
        return gradient(hidden, arrays)


def gradient(hidden: Callable[[Arrays], mx.array], arrays: Arrays) -> Arrays:
    def total(arrays: Arrays) -> mx.array:
        states = hidden(arrays)
        return (states * mx.sin(mx.arange(states.size).reshape(states.shape))).sum()

    found: Arrays = mx.grad(total)(arrays)
    mx.eval(found)
    return found


def scaling(model: SharedModel) -> LoraScaling:
    return LoraScaling(dict.fromkeys(model.targets, 2.0), {})


def random_arrays(model: SharedModel) -> Arrays:
    arrays = initial_arrays(model.targets, 4, mx.random.key(0))
    return {name: array + 0.01 for name, array in arrays.items()}


def worst_error(found: Arrays, expected: Arrays) -> float:
    """The largest relative error of an array's gradient; a small gradient counts as a hundredth of the largest."""
    norms = {name: float(mx.linalg.norm(array).item()) for name, array in expected.items()}
    least = 1e-2 * max(norms.values())
    return max(
        float(mx.linalg.norm(found[name] - expected[name]).item()) / max(norm, least) for name, norm in norms.items()
    )


@pytest.mark.parametrize("architecture", [*MARKED, "qwen3_5_moe", "lfm2_moe"])
def test_gradients_of_packed_rows_are_those_of_rows_step_by_step(
    architecture: str, load_tiny: Callable[[str], SharedModel]
) -> None:
    model = load_tiny(architecture)
    groups: list[Group] = [([3, 1, 4, 1, 5], [[9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]), ([3, 2, 3, 8], [])]
    arrays = random_arrays(model)
    expected = gradient_of_rows(model, groups, arrays)
    assert worst_error(packed_gradient(model, groups, arrays), expected) <= TOLERANCE
    assert worst_error(packed_gradient(model, groups, arrays, checkpoints=True), expected) <= TOLERANCE


def test_an_update_that_forgets_the_states_of_prompts_would_be_seen(load_tiny: Callable[[str], SharedModel]) -> None:
    model = load_tiny("qwen3_5")
    arrays = random_arrays(model)
    prompt, completion = [3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5]
    expected = gradient_of_rows(model, [(prompt, [completion])], arrays)
    assert worst_error(packed_gradient(model, [(prompt, []), (completion, [])], arrays), expected) > 100 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("architecture", MARKED)
def test_gradients_of_random_packings(
    architecture: str, load_tiny: Callable[[str], SharedModel], record_property: Callable[[str, object], None]
) -> None:
    model = load_tiny(architecture)
    arrays = random_arrays(model)
    errors: list[float] = []
    for case in range(CASES_OF_EACH):
        groups = random_groups(1000 * FAMILIES.index(architecture) + case)
        errors.append(worst_error(packed_gradient(model, groups, arrays), gradient_of_rows(model, groups, arrays)))
    record_property("hybrid.packings_exact", sum(error <= TOLERANCE for error in errors))
    record_property("hybrid.packings_worst_error", max(errors))
    assert max(errors) <= TOLERANCE
