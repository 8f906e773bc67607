"""Training of a reward model on pairs. The trainer drives `RewardLearner` on the device thread, like `Learner`.

Axes: P pairs; S = 2 P completions, the chosen one of each pair first; N numbers of the adapter.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from parallm.learner.adapter_learner import AdapterLearner, with_change
from parallm.learner.faults import Faults
from parallm.learner.optimizer import Arrays, learning_rate
from parallm.learner.passes.batch import make_passes
from parallm.learner.passes.recomputation import checkpointed
from parallm.learner.reward_model.pairs import to_scoring_request
from parallm.learner.reward_model.scorer import RewardScorer, last_hidden, reward_scores
from parallm.model.adapters.adapter import REWARD_HEAD
from parallm.model.lora.dora import lora_scaling
from parallm.model.lora.linear import LoraBinding
from parallm.model.lora.selector import training_lora
from parallm.model.lora.single import LoraScaling, single_lora
from parallm.reports import PairsReport, UpdateReport
from parallm.types import ScoringRequest, TrajectoryGroup


def pair_loss(chosen_P: mx.array, rejected_P: mx.array, margin_P: mx.array, *, center: float) -> mx.array:
    """-log sigmoid(chosen - rejected - margin) of each pair, its negative log-likelihood after Bradley and Terry, (P,).

    Equation 1 of https://arxiv.org/abs/2009.01325. It depends on differences only, so scores may drift; `center` times
    the square of a pair's summed scores holds them near zero (equation 2 of https://arxiv.org/abs/2312.09244).
    """
    # this form neither overflows nor loses the digits of a small loss
    losses_P = mx.logaddexp(0.0, rejected_P + margin_P - chosen_P)
    return losses_P + center * (chosen_P + rejected_P) ** 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PairBatch:
    """Pairs of one forward and backward pass."""

    items: tuple[ScoringRequest, ...]
    margins: tuple[float, ...]


@dataclass(slots=True)
class PairTotals:
    """Sums over the pairs of one update."""

    loss: float = 0.0
    right: int = 0
    margin: float = 0.0


class RewardLearner(AdapterLearner):
    """Turns pairs into the next version of a reward model. All methods run on the device thread."""

    def update(self, groups: Sequence[TrajectoryGroup], *, step: int, max_tokens: int) -> Iterator[UpdateReport | None]:
        """One optimizer step over pairs (`pairs.to_group`). Yields after each round of passes, the report last.

        The loss is the mean over the pairs of the step. A step with a value that is not finite changes nothing.
        `max_tokens` has no meaning here.
        """
        totals, faults, seconds = PairTotals(), Faults(groups), 0.0
        gradient_N = mx.zeros((1,))
        scaling = lora_scaling(self.adapter, self._model)
        batches = self._batches(groups)
        for chosen, key in self._rounds_of(batches, step):
            began = time.perf_counter()
            more, loss, scores = self._gradient(chosen, 1 / len(groups), scaling, key)
            gradient_N = gradient_N + self.layout.join(more)
            mx.eval(gradient_N)
            _add(totals, loss, scores)
            seconds += time.perf_counter() - began
            yield None
        began = time.perf_counter()
        optimizer_step = self.compute_step(gradient_N, step)
        norm = float(optimizer_step.norm.item())
        if not math.isfinite(totals.loss):
            faults.add("loss")
        elif not math.isfinite(norm):
            faults.add("gradient")
        else:
            self._advance(optimizer_step, step, faults)
        report = self._report(totals, groups, norm, step, seconds + time.perf_counter() - began, faults)
        yield with_change(report, optimizer_step)

    def scorer(self) -> RewardScorer:
        """A scorer with the newest version."""
        return RewardScorer(self._model, self._streams, self.adapter, budget=self._budget, packs=self._packs)

    def _batches(self, groups: Sequence[TrajectoryGroup]) -> list[PairBatch]:
        """Pairs in passes. A pair is never cut in two: the gradient of one score depends on the other."""
        items = [to_scoring_request(group) for group in groups]
        margins = [group.rewards[0] - group.rewards[1] for group in groups]
        passes = make_passes([item.num_tokens for item in items], self._budget, self._streams.width)
        return [
            PairBatch(
                items=tuple(items[index] for index in indices), margins=tuple(margins[index] for index in indices)
            )
            for indices in passes
        ]

    def _gradient(
        self, batches: Sequence[PairBatch], weight: float, scaling: LoraScaling, key: mx.array
    ) -> tuple[Arrays, mx.array, list[mx.array]]:
        """Gradient of `weight` x the pairs' summed losses (one batch per stream), that loss, and scores. Evaluated."""

        def loss_of(traced: Arrays) -> tuple[mx.array, list[mx.array]]:
            lora = training_lora(single_lora(traced, scaling), self.adapter.dropout, key)
            with checkpointed(self._model, self._checkpoints):
                scores = self._streams.run(lambda batch: self._scores(batch, lora, traced[REWARD_HEAD]), batches)
            losses = self._streams.run(lambda pair: weight * self._loss(*pair), list(zip(batches, scores, strict=True)))
            return sum(losses[1:], losses[0]), scores

        (loss, scores), gradients = mx.value_and_grad(loss_of)(dict(self.adapter.arrays))
        mx.eval(gradients, loss, scores)
        return gradients, loss, scores

    def _scores(self, batch: PairBatch, lora: LoraBinding, head_H: mx.array) -> mx.array:
        """Scores (P, 2), chosen first."""
        hidden_SH = last_hidden(self._model, batch.items, lora, packs=self._packs)
        return reward_scores(hidden_SH, head_H).reshape(-1, 2)

    def _loss(self, batch: PairBatch, scores_P2: mx.array) -> mx.array:
        margin_P = mx.array(batch.margins)
        return pair_loss(scores_P2[:, 0], scores_P2[:, 1], margin_P, center=self._settings.center_scores).sum()

    def _report(
        self,
        totals: PairTotals,
        groups: Sequence[TrajectoryGroup],
        norm: float,
        step: int,
        seconds: float,
        faults: Faults,
    ) -> UpdateReport:
        return UpdateReport(
            step=step,
            version=self.adapter.version,
            loss=totals.loss,
            gradient_norm=norm,
            learning_rate=learning_rate(self._settings, step, self._total_steps),
            num_tokens=sum(len(trajectory.tokens) for group in groups for trajectory in group.trajectories),
            seconds=seconds,
            skipped=faults.message,
            fault=faults.kind,
            pairs=PairsReport(accuracy=totals.right / len(groups), margin=totals.margin / len(groups)),
        )


def _add(totals: PairTotals, loss: mx.array, scores: Sequence[mx.array]) -> None:
    totals.loss += float(loss.item())
    for scores_P2 in scores:
        difference_P = np.array(scores_P2[:, 0] - scores_P2[:, 1])
        totals.right += int((difference_P > 0).sum())
        totals.margin += float(difference_P.sum())
