"""Reward models: scores of completions, and training on pairs of them.

The trainer drives `RewardLearner` on the device thread, like `Learner`; rollouts and evaluations use `RewardScorer`. A
score is the head times the hidden state of a completion's last token. Completions share one copy of their prompt
(`packing`). Work is cut into passes, so that decoding on the same device never waits long.
Axes: M computed tokens, S completions, H hidden, P pairs, N numbers of the adapter.
"""

import math
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate

import mlx.core as mx
import numpy as np

from parallm.device.streams import DeviceStreams
from parallm.learner.adapter_learner import AdapterLearner, with_change
from parallm.learner.faults import Faults
from parallm.learner.optimizer import Arrays, learning_rate
from parallm.learner.passes.batch import make_passes
from parallm.learner.passes.packing import Segment, packed_hidden
from parallm.learner.passes.recomputation import checkpointed
from parallm.model.adapters.adapter import REWARD_HEAD, Adapter
from parallm.model.lora.dora import lora_scaling
from parallm.model.lora.linear import LoraBinding
from parallm.model.lora.selector import training_lora
from parallm.model.lora.single import LoraScaling, single_lora
from parallm.model.shared_model import SharedModel
from parallm.reports import PairsReport, UpdateReport
from parallm.types import ScoringRequest, TrajectoryGroup


def to_scoring_request(group: TrajectoryGroup) -> ScoringRequest:
    """The prompt and completions of a group."""
    return ScoringRequest(
        prompt_tokens=group.trajectories[0].prompt_tokens,
        completions=tuple(tuple(trajectory.tokens) for trajectory in group.trajectories),
    )


class RewardScorer:
    """Scores with one version of a reward model, on the shared base. Made and used on the device thread."""

    def __init__(
        self, model: SharedModel, streams: DeviceStreams, adapter: Adapter, *, budget: int, packs: bool
    ) -> None:
        self._model = model
        self._streams = streams
        self._budget = budget
        self._packs = packs
        self._head_H = adapter.arrays[REWARD_HEAD]
        self._lora = single_lora(dict(adapter.arrays), lora_scaling(adapter, model))

    def units(self, items: Sequence[ScoringRequest]) -> Iterator[list[float] | None]:
        """Score in passes of at most `budget` tokens. Yields None after each round, all scores last."""
        parts = [part for item in items for part in split_completions(item, self._budget)]
        scores_of_part: dict[int, list[float]] = {}
        passes = make_passes([part.num_tokens for part in parts], self._budget, self._streams.width)
        for start in range(0, len(passes), self._streams.width):
            chosen = passes[start : start + self._streams.width]
            scores = self._streams.run(lambda indices: self._scores([parts[index] for index in indices]), chosen)
            mx.eval(scores)
            for indices, scores_S in zip(chosen, scores, strict=True):
                values = iter(np.array(scores_S).tolist())
                scores_of_part |= {index: [next(values) for _ in parts[index].completions] for index in indices}
            yield None
        yield [score for index in range(len(parts)) for score in scores_of_part[index]]

    def _scores(self, items: Sequence[ScoringRequest]) -> mx.array:
        return reward_scores(last_hidden(self._model, items, self._lora, packs=self._packs), self._head_H)


def reward_scores(hidden_SH: mx.array, head_H: mx.array) -> mx.array:
    """Scores (S,), float32."""
    # no matrix product: its rounding may depend on the number of rows
    return (hidden_SH.astype(mx.float32) * head_H).sum(axis=-1)


def last_hidden(
    model: SharedModel, items: Sequence[ScoringRequest], lora: LoraBinding | None, *, packs: bool
) -> mx.array:
    """Hidden states (S, H) of the last token of each completion, in the order of the items."""
    if not packs:
        rows = [(*item.prompt_tokens, *tokens) for item in items for tokens in item.completions]
        return mx.stack([model.hidden(mx.array([row]), None, lora)[0, -1] for row in rows])
    tokens_M = np.concatenate([_flat(item) for item in items])
    starts = accumulate((item.num_tokens for item in items), initial=0)
    last_S = np.concatenate([start + _ends(item) for start, item in zip(starts, items, strict=False)])
    return packed_hidden(model, mx.array(tokens_M), [_segment(item) for item in items], lora)[mx.array(last_S)]


def split_completions(item: ScoringRequest, budget: int) -> list[ScoringRequest]:
    """`item` in parts of at most `budget` tokens, prompt included, with at least one completion each."""
    parts: list[list[tuple[int, ...]]] = []
    free = 0
    for tokens in item.completions:
        if not parts or len(tokens) > free:
            parts.append([])
            free = budget - len(item.prompt_tokens)
        parts[-1].append(tokens)
        free -= len(tokens)
    return [ScoringRequest(prompt_tokens=item.prompt_tokens, completions=tuple(part)) for part in parts]


def _flat(item: ScoringRequest) -> np.ndarray:
    return np.asarray([*item.prompt_tokens, *(token for tokens in item.completions for token in tokens)], np.int32)


def _ends(item: ScoringRequest) -> np.ndarray:
    """Index in `_flat` of the last token of each completion."""
    lengths = [len(tokens) for tokens in item.completions]
    return len(item.prompt_tokens) + np.cumsum(lengths, dtype=np.int32) - 1


def _segment(item: ScoringRequest) -> Segment:
    if len(item.completions) == 1:
        return Segment(prompt=item.num_tokens)  # one sequence has faster attention kernels
    return Segment(prompt=len(item.prompt_tokens), runs=tuple((1, len(tokens)) for tokens in item.completions))


def pair_loss(chosen_P: mx.array, rejected_P: mx.array, margin_P: mx.array, *, center: float) -> mx.array:
    """-log sigmoid(chosen - rejected - margin) of each pair, its negative log-likelihood after Bradley and Terry, (P,).

    Equation 1 of https://arxiv.org/abs/2009.01325. It depends on differences only, so scores may drift; `center` times
    the square of a pair's summed scores holds them near zero (equation 2 of https://arxiv.org/abs/2312.09244).
    """
    # this form neither overflows nor loses the digits of a small loss
    losses_P = mx.logaddexp(0.0, rejected_P + margin_P - chosen_P)
    return losses_P + center * (chosen_P + rejected_P) ** 2


class RewardLearner(AdapterLearner):
    """Turns pairs into the next version of a reward model. All methods run on the device thread."""

    def update(self, groups: Sequence[TrajectoryGroup], *, step: int, max_tokens: int) -> Iterator[UpdateReport | None]:
        """One optimizer step over pairs (`datasets.to_group`). Yields after each round of passes, the report last.

        The loss is the mean over the pairs of the step. A step with a value that is not finite changes nothing.
        `max_tokens` has no meaning here.
        """
        faults, loss, seconds = Faults(groups), 0.0, 0.0
        differences: list[np.ndarray] = []
        gradient_N = mx.zeros((1,))
        scaling = lora_scaling(self.adapter, self._model)
        for chosen, key in self._rounds_of(self._batches(groups), step):
            began = time.perf_counter()
            more, more_loss, scores = self._gradient(chosen, 1 / len(groups), scaling, key)
            gradient_N = gradient_N + self.layout.join(more)
            mx.eval(gradient_N)
            loss += float(more_loss.item())
            differences += [np.array(scores_P2[:, 0] - scores_P2[:, 1]) for scores_P2 in scores]
            seconds += time.perf_counter() - began
            yield None
        began = time.perf_counter()
        optimizer_step = self.compute_step(gradient_N, step)
        norm = float(optimizer_step.norm.item())
        if not math.isfinite(loss):
            faults.add("loss")
        elif not math.isfinite(norm):
            faults.add("gradient")
        else:
            self._advance(optimizer_step, step, faults)
        difference_P = np.concatenate(differences)
        report = UpdateReport(
            step=step,
            version=self.adapter.version,
            loss=loss,
            gradient_norm=norm,
            learning_rate=learning_rate(self._settings, step, self._total_steps),
            num_tokens=sum(len(trajectory.tokens) for group in groups for trajectory in group.trajectories),
            seconds=seconds + time.perf_counter() - began,
            skipped=faults.message,
            fault=faults.kind,
            pairs=PairsReport(accuracy=float((difference_P > 0).mean()), margin=float(difference_P.mean())),
        )
        yield with_change(report, optimizer_step)

    def scorer(self) -> RewardScorer:
        """A scorer with the newest version."""
        return RewardScorer(self._model, self._streams, self.adapter, budget=self._budget, packs=self._packs)

    def _batches(self, groups: Sequence[TrajectoryGroup]) -> list[list[TrajectoryGroup]]:
        """Pairs in passes. A pair is never cut in two: the gradient of one score depends on the other."""
        lengths = [to_scoring_request(group).num_tokens for group in groups]
        passes = make_passes(lengths, self._budget, self._streams.width)
        return [[groups[index] for index in indices] for indices in passes]

    def _gradient(
        self, batches: Sequence[Sequence[TrajectoryGroup]], weight: float, scaling: LoraScaling, key: mx.array
    ) -> tuple[Arrays, mx.array, list[mx.array]]:
        """Gradient of `weight` x the pairs' summed losses (one batch per stream), that loss, and scores. Evaluated."""

        def loss_of(traced: Arrays) -> tuple[mx.array, list[mx.array]]:
            lora = training_lora(single_lora(traced, scaling), self.adapter.dropout, key)
            with checkpointed(self._model, self._checkpoints):
                scores = self._streams.run(lambda batch: self._scores(batch, lora, traced[REWARD_HEAD]), batches)
            losses = self._streams.run(lambda scored: self._loss(*scored), list(zip(batches, scores, strict=True)))
            return sum(losses[1:], losses[0]), scores

        (loss, scores), gradients = mx.value_and_grad(loss_of)(dict(self.adapter.arrays))
        # only now: a float16 base would round the gradients of a small share of the loss
        loss, gradients = weight * loss, {name: weight * gradient for name, gradient in gradients.items()}
        mx.eval(gradients, loss, scores)
        return gradients, loss, scores

    def _scores(self, pairs: Sequence[TrajectoryGroup], lora: LoraBinding, head_H: mx.array) -> mx.array:
        """Scores (P, 2), chosen first."""
        items = [to_scoring_request(pair) for pair in pairs]
        hidden_SH = last_hidden(self._model, items, lora, packs=self._packs)
        return reward_scores(hidden_SH, head_H).reshape(-1, 2)

    def _loss(self, pairs: Sequence[TrajectoryGroup], scores_P2: mx.array) -> mx.array:
        margin_P = mx.array([pair.rewards[0] - pair.rewards[1] for pair in pairs])
        return pair_loss(scores_P2[:, 0], scores_P2[:, 1], margin_P, center=self._settings.center_scores).sum()
