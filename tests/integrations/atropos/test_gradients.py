"""From posted groups to the gradient, against a clipped objective that is written out token by token."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from pydantic import TypeAdapter

from parallm.device.streams import DeviceStreams
from parallm.integrations.atropos.intake import Intake, Quarantine, Rescorer
from parallm.integrations.atropos.sample_store import SampleStore
from parallm.integrations.atropos.scored_group import Limits
from parallm.learner.loss.objective import Objective
from parallm.learner.optimizer import ParameterLayout
from parallm.learner.passes.batch import make_micro_batches
from parallm.learner.passes.gradient import LoraWeights, PolicyGradient
from parallm.model.adapters.adapter import Adapter, make_adapter
from parallm.model.adapters.initial import initial_arrays
from parallm.model.lora.dora import lora_scaling
from parallm.model.lora.single import single_lora
from parallm.model.shared_model import SharedModel
from parallm.rollout.settings import AtroposSettings
from parallm.types import Completion, GenerationRequest, SamplingParams, TrajectoryGroup, WeightSpan

OBJECTIVE = Objective(advantage="group_mean", aggregation="seq_mean_token_mean", clip_low=0.2, clip_high=0.2)
RotaryAngles = tuple[int, ...]


class Posts:
    """Groups as environments post them, and the store of what was sampled for them."""

    def __init__(self, model: SharedModel, adapter: Adapter) -> None:
        self.model, self.adapter = model, adapter
        self.sample_store = SampleStore(TypeAdapter(AtroposSettings).validate_python({}))
        self.chance = np.random.default_rng(5)
        self.offsets: dict[tuple[int, ...], np.ndarray] = {}
        """Of each sequence and token: log-prob of the learner less that of the sampler."""

    def sequence(self, prompt: RotaryAngles, *turns: RotaryAngles, temperature: float = 1.0) -> dict[str, list[int]]:
        """Turns of the policy, every second one of a user; sampled with ratios from 0.5 to 2."""
        tokens, masks = list(prompt), [-100] * len(prompt)
        whole = (*prompt, *(token for turn in turns for token in turn))
        new_T = np.array(self.logprobs(dict(self.adapter.arrays), whole, temperature))
        offsets_T = self.offsets[whole] = self.chance.uniform(-0.7, 0.7, len(whole)).astype(np.float32)
        for place, turn in enumerate(turns):
            if place % 2 == 0:
                here = slice(len(tokens), len(tokens) + len(turn))
                self.sampled(tuple(tokens), turn, (new_T - offsets_T)[here], temperature)
            masks += list(turn) if place % 2 == 0 else [-100] * len(turn)
            tokens += turn
        return {"tokens": tokens, "masks": masks}

    def logprobs(self, arrays: dict[str, mx.array], tokens: RotaryAngles, temperature: float) -> mx.array:
        """(T,); that of the first token means nothing."""
        lora = single_lora(arrays, lora_scaling(self.adapter, self.model))
        with self.model.lora_context.applied(lora):
            logits_TV = self.model.base(mx.array(tokens)[None, :-1])[0].astype(mx.float32) / temperature
        logprobs_TV = logits_TV - mx.logsumexp(logits_TV, axis=-1, keepdims=True)
        found_T = mx.take_along_axis(logprobs_TV, mx.array(tokens)[1:, None], axis=-1)[:, 0]
        return mx.concatenate([mx.zeros((1,)), found_T])

    def sampled(self, prompt: RotaryAngles, turn: RotaryAngles, logprobs_N: np.ndarray, temperature: float) -> None:
        sampling = SamplingParams(max_tokens=len(turn), temperature=temperature)
        request = GenerationRequest(request_id="r", prompt_tokens=prompt, sampling=sampling)
        completion = Completion(
            request_id="r",
            index=0,
            tokens=turn,
            logprobs=tuple(logprobs_N.tolist()),
            top_logprobs=((),) * len(turn),
            text="",
            finish_reason="stop",
            weight_versions=(WeightSpan(version=3, start=0, end=len(turn)),),
        )
        self.sample_store.record(request, [completion])

    def read(self, folder: Path, *groups: dict[str, Any]) -> list[TrajectoryGroup]:
        async def never(_: Sequence[GenerationRequest]) -> list[list[Completion]]:
            raise AssertionError("everything is in the store")

        quarantine = Quarantine(folder)
        intake = Intake(
            settings=TypeAdapter(AtroposSettings).validate_python({}),
            sample_store=self.sample_store,
            quarantine=quarantine,
            limits=Limits(max_tokens=64, num_token_ids=385),
            rescorer=Rescorer(never, "latest"),
            decode=str,
        )
        found = asyncio.run(intake.read(groups, version=3))
        quarantine.close()
        assert quarantine.counts == {}
        return found


def post(*sequences: dict[str, list[int]], scores: Sequence[float], **fields: Any) -> dict[str, Any]:
    columns = {name: [one[name] for one in sequences] for name in ("tokens", "masks")}
    return {**columns, "scores": list(scores), "inference_logprobs": None, **fields}


@pytest.fixture
def posts(load_tiny: Callable[[str], SharedModel]) -> Posts:
    model = load_tiny("qwen3")
    arrays = initial_arrays(model.targets, 4, mx.random.key(1))
    for place, name in enumerate(sorted(arrays)):
        if name.endswith("lora_b"):
            arrays[name] = 0.05 * mx.random.normal(arrays[name].shape, key=mx.random.key(place))
    return Posts(model, make_adapter(arrays, version=3, rank=4, alpha=8.0))


@pytest.fixture
def groups(posts: Posts) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """Ragged groups of 4, 2, 2 and 1 in all the shapes that environments send, and the advantage of each token."""
    one = posts.sequence
    of_four = post(
        one((5, 6, 7), (8, 9, 10, 11)),
        one((5, 6, 7), (12,)),
        one((5, 6, 7), (13, 14), temperature=0.7),
        one((5, 6, 7), (15, 16, 17, 18, 19, 20)),
        scores=[1.0, 0.0, 0.5, -0.5],
        overrides=[None, {"set_advantage_to_zero": True}, {"temperature": 0.7}, {}],
        advantages=[],
    )
    turns = one((30, 31), (32, 33), (34, 35, 36), (37, 38), temperature=1.3)
    by_token = [[0, 0, 1.5, -2.0, 0, 0, 0, 0.5, -0.25], [0, 0, 0, 0.0, -3.0]]
    of_two = post(
        turns, one((40, 41, 42), (43, 44)), scores=[1.0, 1.0], advantages=by_token, group_overrides={"group_size": 2}
    )
    other = post(one((50,), (51, 52)), one((53, 54), (55,)), scores=[2.0, 0.0], overrides=[], messages=None, images=[])
    alone = post(one((60, 61), (62, 63, 64)), scores=[-0.75], ref_logprobs=[])
    sequence_advantages = [1.0 - 0.25, 0.0, 0.5 - 0.25, -0.5 - 0.25, None, None, 1.0, -1.0, -0.75]
    rows = [tokens for group in (of_four, of_two, other, alone) for tokens in group["tokens"]]
    own = iter(by_token)
    advantages = [
        np.asarray(next(own) if value is None else [value] * len(tokens), np.float32)
        for tokens, value in zip(rows, sequence_advantages, strict=True)
    ]
    return [of_four, of_two, other, alone], advantages


def written_out(
    posts: Posts, groups: Sequence[dict[str, Any]], advantages: Sequence[np.ndarray], *, takes_larger: bool = False
) -> dict[str, mx.array]:
    """The gradient of PPO's clipped objective, mean over the tokens of a sequence, then over sequences.

    `takes_larger`: the larger of the two terms for advantages below 0, as atroposlib's example trainer has it.
    """
    rows = [(t, m) for group in groups for t, m in zip(group["tokens"], group["masks"], strict=True)]
    temperatures = {(13, 14): 0.7, (37, 38): 1.3}

    def surrogate(arrays: dict[str, mx.array]) -> mx.array:
        total = mx.zeros(())
        for (tokens, masks), advantage_T in zip(rows, advantages, strict=True):
            whole, temperature = tuple(tokens), temperatures.get(tuple(tokens[-2:]), 1.0)
            ratio_T = np.exp(posts.offsets[whole])
            trained_T = np.asarray(masks) != -100
            is_clipped_T = np.where(advantage_T > 0, ratio_T > 1.2, ratio_T < 0.8)
            if takes_larger:
                is_clipped_T = ratio_T > 1.2
            factor_T = np.where(trained_T & ~is_clipped_T, -advantage_T * ratio_T / trained_T.sum() / len(rows), 0.0)
            total += (mx.array(factor_T.astype(np.float32)) * posts.logprobs(arrays, whole, temperature)).sum()
        return total

    gradients: dict[str, mx.array] = mx.grad(surrogate)(dict(posts.adapter.arrays))
    return gradients


def computed(
    posts: Posts, streams: DeviceStreams, groups: Sequence[TrajectoryGroup], *, packs: bool, budget: int = 1024
) -> dict[str, mx.array]:
    """As an update computes it."""
    gradient = PolicyGradient(posts.model, streams, OBJECTIVE, chunk_bytes=1 << 20, dropout=0.0, checkpoints=False)
    factors = LoraWeights(posts.adapter, posts.model)
    layout = ParameterLayout({name: array.shape for name, array in posts.adapter.arrays.items()})
    total_N = mx.zeros(())
    for batch in make_micro_batches(groups, OBJECTIVE, max_tokens=64, budget=budget, packs=packs):
        total_N = total_N + factors.join(gradient(factors.lora, [batch], mx.random.key(0)).gradients)
    return layout.split(factors.backward(total_N, layout))


def largest_difference(some: dict[str, mx.array], others: dict[str, mx.array]) -> float:
    """Relative to the largest number of `others`."""
    scale = max(mx.abs(array).max().item() for array in others.values())
    return float(max(mx.abs(some[name] - array).max().item() for name, array in others.items()) / scale)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("budget", [16, 1024])
def test_the_gradient_is_that_of_the_objective_written_out(
    posts: Posts,
    groups: tuple[list[dict[str, Any]], list[np.ndarray]],
    streams: DeviceStreams,
    tmp_path: Path,
    packs: bool,
    budget: int,
) -> None:
    posted, advantages = groups
    found = computed(posts, streams, posts.read(tmp_path, *posted), packs=packs, budget=budget)
    assert largest_difference(found, written_out(posts, posted, advantages)) < 1e-4


def test_the_clip_of_the_example_trainer_gives_another_gradient(
    posts: Posts, groups: tuple[list[dict[str, Any]], list[np.ndarray]], streams: DeviceStreams, tmp_path: Path
) -> None:
    posted, advantages = groups
    found = computed(posts, streams, posts.read(tmp_path, *posted), packs=True)
    assert largest_difference(found, written_out(posts, posted, advantages, takes_larger=True)) > 0.05


@pytest.mark.parametrize(("ratio", "has_gradient"), [(0.5, False), (0.9, True), (1.5, True)])
def test_a_bad_token_is_left_alone_where_it_has_fallen_and_pushed_down_where_it_has_risen(
    posts: Posts, streams: DeviceStreams, tmp_path: Path, ratio: float, has_gradient: bool
) -> None:
    whole = (5, 6, 7)
    new_T = np.array(posts.logprobs(dict(posts.adapter.arrays), whole, 1.0))
    posts.sampled((5, 6), (7,), new_T[2:] - np.log(ratio), 1.0)
    group = post({"tokens": list(whole), "masks": [-100, -100, 7]}, scores=[-1.0])
    found = computed(posts, streams, posts.read(tmp_path, group), packs=True)
    largest = max(mx.abs(array).max().item() for array in found.values())
    assert (largest > 1e-3) == has_gradient
