"""Training of a reward model on pairs. The trainer drives `RewardLearner` on the device thread, like `Learner`.

Axes: P pairs; S = 2 P completions, the chosen one of each pair first; N numbers of the adapter.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from parallm.device.streams import DeviceStreams
from parallm.errors import AdapterNotFinite
from parallm.learner.adapter_state import AdapterState, OptimizerStep, with_change
from parallm.learner.faults import Faults
from parallm.learner.optimizer import Arrays, learning_rate
from parallm.learner.passes.batch import make_passes
from parallm.learner.passes.packing import can_pack
from parallm.learner.passes.recomputation import checkpointed, checkpoints_layers, pass_tokens
from parallm.learner.reward_model.pairs import to_scoring_request
from parallm.learner.reward_model.scorer import RewardScorer, last_hidden, reward_scores
from parallm.learner.settings import LearnerSettings
from parallm.model.adapters.adapter import REWARD_HEAD, Adapter
from parallm.model.lora.dora import lora_scaling
from parallm.model.lora.linear import LoraBinding
from parallm.model.lora.selector import training_lora
from parallm.model.lora.single import LoraScaling, single_lora
from parallm.model.shared_model import SharedModel
from parallm.reports import PairsReport, ParityReport, RatioReport, UpdateReport
from parallm.seeds import mix
from parallm.types import ScoringRequest, TrajectoryGroup

NOT_APPLICABLE = math.nan
"""Stands for numbers of an update that a reward model does not have."""


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


class RewardLearner:
    """Turns pairs into the next version of a reward model. All methods run on the device thread."""

    def __init__(
        self,
        model: SharedModel,
        streams: DeviceStreams,
        settings: LearnerSettings,
        *,
        start: Adapter,
        total_steps: int,
        seed: int,
    ) -> None:
        """`start` has a reward head."""
        self._model = model
        self._streams = streams
        self._settings = settings
        self._total_steps = total_steps
        self._seed = seed
        self._packs = can_pack(model)
        self._budget = pass_tokens(settings, model)
        self._checkpoints = checkpoints_layers(settings, model, self._budget * streams.width)
        self._state = AdapterState(start, settings, total_steps)

    @property
    def adapter(self) -> Adapter:
        """The newest version."""
        return self._state.adapter

    def update(self, groups: Sequence[TrajectoryGroup], *, step: int, max_tokens: int) -> Iterator[UpdateReport | None]:
        """One optimizer step over pairs (`pairs.to_group`). Yields after each round of passes, the report last.

        The loss is the mean over the pairs of the step. A step with a value that is not finite changes nothing.
        `max_tokens` has no meaning here.
        """
        totals, faults, seconds = PairTotals(), Faults(groups), 0.0
        gradient_N = mx.zeros((1,))
        scaling = lora_scaling(self.adapter, self._model)
        batches = self._batches(groups)
        for start in range(0, len(batches), self._streams.width):
            began = time.perf_counter()
            chosen = batches[start : start + self._streams.width]
            key = mx.random.key(mix(mix(self._seed, step), start))
            more, loss, scores = self._gradient(chosen, 1 / len(groups), scaling, key)
            gradient_N = gradient_N + self._state.layout.join(more)
            mx.eval(gradient_N)
            _add(totals, loss, scores)
            seconds += time.perf_counter() - began
            yield None
        began = time.perf_counter()
        optimizer_step = self._state.compute_step(gradient_N, step)
        norm = float(optimizer_step.norm.item())
        self._advance(optimizer_step, norm, totals.loss, step, faults)
        report = self._report(totals, groups, norm, step, seconds + time.perf_counter() - began, faults)
        yield with_change(report, optimizer_step)

    def scorer(self) -> RewardScorer:
        """A scorer with the newest version."""
        return RewardScorer(self._model, self._streams, self.adapter, budget=self._budget, packs=self._packs)

    def optimizer_state(self) -> Arrays:
        return self._state.optimizer_state()

    def restore(self, adapter: Adapter, optimizer_state: Arrays) -> None:
        """Resume from a checkpoint."""
        self._state.restore(adapter, optimizer_state)

    def roll_back(self) -> Adapter:
        """Undo the newest update. Returns the version to publish."""
        return self._state.roll_back()

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

    def _advance(self, optimizer_step: OptimizerStep, norm: float, loss: float, step: int, faults: Faults) -> None:
        """Make the next version, or note why not."""
        if not math.isfinite(loss):
            faults.add("loss")
        elif not math.isfinite(norm):
            faults.add("gradient")
        else:
            try:
                self._state.advance(optimizer_step, step)
            except AdapterNotFinite:
                faults.add("weights")

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
            clip_fraction=NOT_APPLICABLE,
            kl_to_behaviour=NOT_APPLICABLE,
            entropy=NOT_APPLICABLE,
            num_tokens=sum(len(trajectory.tokens) for group in groups for trajectory in group.trajectories),
            seconds=seconds,
            parity=ParityReport(
                num_tokens=0, bit_equal_fraction=NOT_APPLICABLE, mean_abs=NOT_APPLICABLE, max_abs=NOT_APPLICABLE
            ),
            ratio=RatioReport(num_tokens=0, mean=NOT_APPLICABLE, smallest=NOT_APPLICABLE, largest=NOT_APPLICABLE),
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
