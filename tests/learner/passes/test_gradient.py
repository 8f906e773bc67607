"""The gradient of micro-batches against plain automatic differentiation of padded rows with all their logits."""

import copy
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from parallm.device.streams import DeviceStreams
from parallm.learner.loss.advantage import advantages
from parallm.learner.loss.objective import PRESETS, Objective, token_weight
from parallm.learner.loss.policy_loss import LossInputs, objective_loss
from parallm.learner.optimizer import ParameterLayout
from parallm.learner.passes.batch import make_micro_batches
from parallm.learner.passes.gradient import LoraWeights, PolicyGradient, gradient_scale
from parallm.learner.passes.recomputation import checkpointed
from parallm.learner.passes.scoring import ScoredStep, score_step
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.initial import initial_arrays
from parallm.model.kernels.token_scores import token_scores
from parallm.model.load import load_shared_model
from parallm.model.lora.dora import lora_scaling
from parallm.model.lora.linear import merge_linears
from parallm.model.lora.single import LoraScaling, single_lora
from parallm.model.settings import LoraSettings, ModelSettings
from parallm.model.shared_model import SharedModel
from parallm.types import TrajectoryGroup

Arrays = dict[str, mx.array]
MakeGroup = Callable[..., TrajectoryGroup]
MAX_TOKENS = 40
EVERYTHING = Objective(
    ratio="sequence",
    aggregation="seq_mean_token_mean",
    kl_coefficient=0.1,
    entropy_coefficient=0.05,
    top_entropy_fraction=0.7,
)
"""Needs whole sequences, the base and a number of the whole step."""
OBJECTIVES = {
    **PRESETS,
    "everything": EVERYTHING,
    "KL in the reward": Objective(kl_coefficient=0.1, kl_estimator="k1", kl_placement="reward"),
    "corrected": Objective(correction="sequence_truncate", kl_coefficient=0.1, kl_unbiased=True),
}


@pytest.fixture
def groups(make_group: MakeGroup) -> list[TrajectoryGroup]:
    """Different prompts and lengths, a completion of one token among them."""
    return [
        make_group(1, (12, 3, 1, 30), (1.0, 0.0, 0.5, 0.25)),
        make_group(2, (5, 5, 6), (0.0, 1.0, 1.0), prompt_length=1),
        make_group(3, (2, 20), (1.0, 0.0), prompt_length=25),
    ]


def plain(
    model: SharedModel, adapter: Adapter, groups: Sequence[TrajectoryGroup], objective: Objective
) -> tuple[float, Arrays]:
    """Loss and gradient with every row's prompt, padding and logits in one forward."""
    rows = [one for group in groups for one in group.trajectories]
    length = max(len(row.prompt_tokens) + len(row.tokens) for row in rows)
    num_tokens_S = [sum(row.loss_mask) for row in rows]
    tokens, behaviour, weights = (np.zeros((len(rows), length), kind) for kind in (np.int32, np.float32, np.float32))
    for index, row in enumerate(rows):
        place = slice(len(row.prompt_tokens), len(row.prompt_tokens) + len(row.tokens))
        tokens[index, : place.stop] = (*row.prompt_tokens, *row.tokens)
        behaviour[index, place] = row.logprobs
        weights[index, place] = np.asarray(row.loss_mask) * token_weight(
            objective,
            length=num_tokens_S[index],
            num_tokens=sum(num_tokens_S),
            num_completions=len(rows),
            max_tokens=MAX_TOKENS,
        )
    temperatures = mx.array([row.temperature for row in rows])[:, None, None]

    def score(arrays: Arrays | None) -> tuple[mx.array, mx.array]:
        lora = None if arrays is None else single_lora(arrays, lora_scaling(adapter, model))
        with model.lora_context.applied(lora):
            logits_BTV = model.base(mx.array(tokens[:, :-1])).astype(mx.float32) / temperatures
        logprobs_BTV = logits_BTV - mx.logsumexp(logits_BTV, axis=-1, keepdims=True)
        logprobs_BT = mx.take_along_axis(logprobs_BTV, mx.array(tokens[:, 1:])[..., None], axis=-1)[..., 0]
        return logprobs_BT.reshape(-1), -(mx.exp(logprobs_BTV) * logprobs_BTV).sum(axis=-1).reshape(-1)

    base_N, weights_N, behaviour_N = score(None)[0], weights[:, 1:].reshape(-1), behaviour[:, 1:].reshape(-1)
    kl_S = ((behaviour_N - np.array(base_N)) * (weights_N > 0)).reshape(len(rows), -1).sum(axis=1)
    if objective.kl_placement == "loss":
        kl_S = kl_S * 0
    penalty = iter(objective.kl_coefficient * kl_S)
    rewards = [[reward - next(penalty) for reward in group.rewards] for group in groups]
    old_N, entropies_N = score(dict(adapter.arrays))
    inputs = LossInputs(
        behaviour_N=mx.array(behaviour_N),
        advantages_N=mx.array(np.repeat(advantages(objective.advantage, rewards, num_tokens_S), length - 1)),
        weights_N=mx.array(weights_N),
        rows_N=mx.array(np.repeat(np.arange(len(rows)), length - 1)),
        num_rows=len(rows),
        old_N=old_N if objective.correction != "none" else None,
        reference_N=base_N if objective.kl_to == "base" else None,
        entropy_threshold=float(np.quantile(np.array(entropies_N)[weights_N > 0], 1 - objective.top_entropy_fraction)),
    )
    value, gradients = mx.value_and_grad(lambda arrays: objective_loss(*score(arrays), inputs, objective))(
        dict(adapter.arrays)
    )
    mx.eval(value, gradients)
    return float(value.item()), gradients


def chunked(
    model: SharedModel,
    streams: DeviceStreams,
    adapter: Adapter,
    groups: Sequence[TrajectoryGroup],
    *,
    objective: Objective = EVERYTHING,
    budget: int = 2048,
    packs: bool = True,
    chunk_bytes: int = 1 << 20,
    dropout: float = 0.0,
    checkpoints: bool = False,
) -> tuple[float, Arrays]:
    """Loss and gradient as an update computes them."""
    gradient = PolicyGradient(
        model, streams, objective, chunk_bytes=chunk_bytes, dropout=dropout, checkpoints=checkpoints
    )
    factors = LoraWeights(adapter, model)
    batches = finished(
        score_step(
            make_micro_batches(groups, objective, max_tokens=MAX_TOKENS, budget=budget, packs=packs),
            groups,
            objective,
            gradient.score,
            policy=factors.lora,
            width=streams.width,
        )
    ).batches
    layout = ParameterLayout({name: array.shape for name, array in adapter.arrays.items()})
    loss, total_N = 0.0, mx.zeros(())
    for start in range(0, len(batches), streams.width):
        chosen = batches[start : start + streams.width]
        part = gradient(factors.lora, chosen, mx.random.key(0))
        total_N = total_N + factors.join(part.gradients, part.scale)
        loss += sum(float(one.loss.item()) for one in part.statistics)
    return loss, layout.split(factors.backward(total_N, layout))


def finished(preparation: Generator[None, None, ScoredStep]) -> ScoredStep:
    while True:
        try:
            next(preparation)
        except StopIteration as stop:
            found: ScoredStep = stop.value
            return found


def assert_close(found: tuple[float, Arrays], expected: tuple[float, Arrays]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1].keys() == expected[1].keys()
    largest = max(float(mx.abs(array).max().item()) for array in expected[1].values())
    for name, gradient in expected[1].items():
        difference = float(mx.linalg.norm(found[1][name] - gradient).item())
        assert difference <= 4e-5 * max(float(mx.linalg.norm(gradient).item()), 1e-2 * largest), name


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        *(("qwen3", name) for name in OBJECTIVES),
        *((one, "everything") for one in ("llama", "gemma2", "mixtral", "mixtral with experts")),
    ],
)
def test_the_gradient_is_that_of_plain_differentiation(
    load_tiny: Callable[..., SharedModel],
    streams: DeviceStreams,
    make_start: Callable[..., Adapter],
    groups: list[TrajectoryGroup],
    architecture: str,
    name: str,
) -> None:
    targets = ("all-linear", "experts") if architecture.endswith("experts") else None
    model = load_tiny(architecture.split()[0], targets=targets)
    adapter = make_start(model)
    found = chunked(model, streams, adapter, groups, objective=OBJECTIVES[name], packs=model.is_batch_invariant)
    assert_close(found, plain(model, adapter, groups, OBJECTIVES[name]))


@pytest.mark.parametrize(
    "choice",
    [
        {"budget": 16},
        {"budget": 64},
        {"budget": 100_000},
        {"packs": False},
        {"chunk_bytes": 8 * 4 * 385},
        {"checkpoints": True},
    ],
    ids=str,
)
def test_the_gradient_does_not_depend_on_how_the_work_is_cut(
    load_tiny: Callable[[str], SharedModel],
    streams: DeviceStreams,
    make_start: Callable[..., Adapter],
    groups: list[TrajectoryGroup],
    choice: dict[str, Any],
) -> None:
    model = load_tiny("qwen3")
    adapter = make_start(model)
    assert_close(chunked(model, streams, adapter, groups, **choice), chunked(model, streams, adapter, groups))


@pytest.mark.cpu
def test_chunks_of_the_head_need_no_logits_twice_without_an_entropy_bonus(
    load_tiny: Callable[[str], SharedModel],
    streams: DeviceStreams,
    make_start: Callable[..., Adapter],
    groups: list[TrajectoryGroup],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load_tiny("qwen3")
    adapter = make_start(model)
    whole = chunked(model, streams, adapter, groups, objective=PRESETS["dapo"])
    scored: list[int] = []
    monkeypatch.setattr(
        "parallm.learner.passes.lm_head.token_scores",
        lambda logits, *rest: scored.append(len(logits)) or token_scores(logits, *rest),  # type: ignore[func-returns-value]
    )
    parts = chunked(model, streams, adapter, groups, objective=PRESETS["dapo"], chunk_bytes=8 * 4 * 385)
    assert_close(parts, whole)
    assert sum(scored) == sum(len(one.tokens) for group in groups for one in group.trajectories)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_joined_sites_may_take_the_columns_of_all(
    load_tiny: Callable[[str], SharedModel],
    streams: DeviceStreams,
    make_start: Callable[..., Adapter],
    groups: list[TrajectoryGroup],
    monkeypatch: pytest.MonkeyPatch,
    checkpoints: bool,
) -> None:
    model = load_tiny("qwen3")
    adapter = make_start(model)
    expected = chunked(model, streams, adapter, groups)
    monkeypatch.setattr("parallm.learner.passes.gradient.on_cuda", lambda: True)  # where that is how it is computed
    assert_close(chunked(model, streams, adapter, groups, checkpoints=checkpoints), expected)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_sites_may_add_their_gradients_to_one_another(
    tiny_model: Callable[[str], Path],
    streams: DeviceStreams,
    make_start: Callable[..., Adapter],
    groups: list[TrajectoryGroup],
    monkeypatch: pytest.MonkeyPatch,
    checkpoints: bool,
) -> None:
    model = load_shared_model(ModelSettings(path=str(tiny_model("qwen3")), lora=LoraSettings(rank=4)))
    adapter = make_start(model)
    expected = chunked(model, streams, adapter, groups, objective=PRESETS["dapo"])
    for module in ("parallm.learner.passes.gradient", "parallm.model.lora.selector"):  # as on a GPU
        monkeypatch.setattr(f"{module}.on_cuda", lambda: True)
    monkeypatch.setattr(
        "parallm.learner.passes.gradient.trims_last_layer", lambda _: False
    )  # groups without a view need one
    merge_linears(model.base, model.joined)
    found = chunked(model, streams, adapter, groups, objective=PRESETS["dapo"], checkpoints=checkpoints)
    assert_close(found, expected)


def test_checkpointed_layers_drop_the_same_inputs_again(
    load_tiny: Callable[[str], SharedModel],
    streams: DeviceStreams,
    make_start: Callable[..., Adapter],
    groups: list[TrajectoryGroup],
) -> None:
    model = load_tiny("qwen3")
    adapter = make_start(model)
    kept, again = (
        chunked(model, streams, adapter, groups, dropout=0.3, checkpoints=checkpoints) for checkpoints in (False, True)
    )
    assert_close(again, kept)
    assert chunked(model, streams, adapter, groups)[0] != kept[0]


@pytest.fixture
def share_of_a_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's weight as in a step of a million tokens."""
    weight = token_weight
    monkeypatch.setattr("parallm.learner.passes.batch.token_weight", lambda *a, **k: weight(*a, **k) / 2**14)


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_in_float16_the_gradient_of_a_long_step_keeps_its_digits(
    share_of_a_long_step: None,
    tiny_model: Callable[[str], Path],
    streams: DeviceStreams,
    make_start: Callable[..., Adapter],
    groups: list[TrajectoryGroup],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    model, exact = (
        load_shared_model(ModelSettings(path=str(tiny_model("qwen3")), dtype=dtype, lora=LoraSettings(rank=4)))
        for dtype in ("float16", "float32")
    )
    adapter, objective = make_start(exact), PRESETS[name]

    def gradient(model: SharedModel) -> mx.array:
        return mx.concatenate(
            [g.reshape(-1) for g in chunked(model, streams, adapter, groups, objective=objective)[1].values()]
        )

    expected = gradient(exact)
    error = mx.linalg.norm(gradient(model) - expected).item()
    monkeypatch.setattr("parallm.learner.passes.gradient.gradient_scale", lambda *_: 1.0)
    control = mx.linalg.norm(gradient(model) - expected).item()
    assert error <= 1e-2 * mx.linalg.norm(expected).item()
    assert control >= 5 * error


def test_the_largest_share_of_a_loss_is_scaled_to_about_one_in_float16_alone(groups: list[TrajectoryGroup]) -> None:
    batches = make_micro_batches(groups, PRESETS["grpo"], max_tokens=MAX_TOKENS, budget=64, packs=True)
    largest = max(float((batch.weights_N * np.maximum(np.abs(batch.advantages_N), 1)).max()) for batch in batches)
    assert 0.5 < gradient_scale(mx.float16, batches) * largest <= 1
    assert gradient_scale(mx.bfloat16, batches) == gradient_scale(mx.float16, []) == 1
    assert gradient_scale(mx.float16, [replace(batches[0], weights_N=0 * batches[0].weights_N)]) == 1


@pytest.mark.cpu  # a GPU still frees what came before
def test_checkpointed_layers_keep_less(nano: SharedModel, streams: DeviceStreams) -> None:
    arrays = initial_arrays(nano.targets, 4, mx.random.key(0))
    scaling = LoraScaling(dict.fromkeys(nano.targets, 2.0), {})
    tokens = mx.arange(900)[None] % 50

    def peak(checkpoints: bool) -> int:
        def total(arrays: Arrays) -> mx.array:
            with checkpointed(nano, checkpoints):
                return nano.hidden(tokens, None, single_lora(arrays, scaling)).sum()

        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(mx.grad(total)(arrays))
        return mx.get_peak_memory() - before

    assert peak(True) < 0.75 * peak(False)


def test_the_gradient_does_not_depend_on_the_number_of_lanes(
    load_tiny: Callable[[str], SharedModel],
    streams: DeviceStreams,
    make_start: Callable[..., Adapter],
    groups: list[TrajectoryGroup],
) -> None:
    model = load_tiny("qwen3")
    adapter = make_start(model)
    one, two = copy.copy(streams), copy.copy(streams)
    one.handles = streams.handles[:1]
    two.handles = [streams.handles[0], streams.handles[-1]]
    assert_close(chunked(model, one, adapter, groups, budget=64), chunked(model, two, adapter, groups, budget=64))


def test_never_more_logits_than_a_chunk_exist(
    load_tiny: Callable[[str], SharedModel],
    streams: DeviceStreams,
    make_start: Callable[..., Adapter],
    groups: list[TrajectoryGroup],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load_tiny("qwen3")
    head, lengths = SharedModel.head, []

    def recorded(self: SharedModel, hidden_NH: mx.array) -> mx.array:
        lengths.append(hidden_NH.shape[0])
        return head(self, hidden_NH)

    monkeypatch.setattr(SharedModel, "head", recorded)
    chunked(model, streams, make_start(model), groups, chunk_bytes=8 * 4 * model.vocabulary_size)
    assert max(lengths) == 8
    num_tokens = sum(len(one.tokens) for group in groups for one in group.trajectories)
    assert sum(lengths) >= 2 * num_tokens  # once for log-probs, once or more for their gradient


def test_micro_batches_hold_every_sampled_token_once(groups: list[TrajectoryGroup]) -> None:
    batches = make_micro_batches(groups, PRESETS["dapo"], max_tokens=MAX_TOKENS, budget=48)
    sampled = sorted(token for group in groups for one in group.trajectories for token in one.tokens)
    assert sorted(token for batch in batches for token in batch.tokens_N.tolist()) == sampled
    trained = sum(sum(one.loss_mask) for group in groups for one in group.trajectories)
    assert sum(int((batch.weights_N > 0).sum()) for batch in batches) == trained
    assert sum(float(batch.weights_N.sum()) for batch in batches) == pytest.approx(1.0)
