"""Gradient of the objective for some micro-batches, without ever holding the logits of all their tokens.

1. trunk: hidden states of the completion tokens, with the adapter's arrays traced;
2. head, in chunks: log-probs; 3. the objective's gradient with respect to each log-prob and entropy, numbers per token;
4. head again, in chunks: the gradient with respect to the hidden states; 5. backward through the trunk from there.

Axes: M computed tokens, N completion tokens, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain, zip_longest
from typing import Any

import mlx.core as mx

from parallm.device.lanes import Lanes
from parallm.learner.batch import MicroBatch
from parallm.learner.checkpointing import checkpointed
from parallm.learner.head import Head, Scores, Stages, run_stages
from parallm.learner.kl import kl_k3
from parallm.learner.last_layer import can_trim, hidden_at
from parallm.learner.loss import LossInputs, is_clipped, objective_loss
from parallm.learner.objective import Objective
from parallm.learner.packing import packed_hidden
from parallm.model.dropout import training_view
from parallm.model.lora import OneAdapter, View
from parallm.model.shared_model import SharedModel
from parallm.model.site_names import layer_of

FIRST = 8  # one layer in so many, from the last one back, whose gradients come before the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStatistics:
    """What the forward found out about each token of a micro-batch."""

    loss: mx.array
    logprobs_N: mx.array
    entropies_N: mx.array
    clipped_N: mx.array
    """True where the policy term bounds or removes the gradient of a trained token."""
    kl_N: mx.array
    """k3 estimate of the sampler's KL to the learner's policy."""
    kl_to_base_N: mx.array
    """k3 estimate of the policy's KL to the base; zeros where the base's log-probs are not known."""

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return self.loss, self.logprobs_N, self.entropies_N, self.clipped_N, self.kl_N, self.kl_to_base_N


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """What a pass gives once it is evaluated: first the stages, one after the other, then the rest."""

    gradients: list[mx.array]
    statistics: list[TokenStatistics]
    stages: Stages
    first: list[mx.array]
    """Those of the gradients that the backward comes to first."""


class PolicyGradient:
    """The model part of an update. Holds no state between calls."""

    def __init__(
        self,
        model: SharedModel,
        lanes: Lanes,
        objective: Objective,
        *,
        chunk_bytes: int,
        dropout: float,
        checkpoints: bool,
    ) -> None:
        self._model = model
        self._checkpoints = checkpoints
        self._lanes = lanes
        self._objective = objective
        self._dropout = dropout
        self._trims = can_trim(model)
        self._head = Head(model, chunk_bytes)

    def __call__(self, policy: OneAdapter, batches: Sequence[MicroBatch], key: mx.array) -> PassResult:
        """Gradients with respect to `policy.arrays()`, summed over `batches` (one per lane), and statistics. Not
        evaluated."""
        structure = policy.structure()

        def surrogate(traced: list[mx.array]) -> tuple[mx.array, Any]:
            view = training_view(structure.view(traced), self._dropout, key)
            with checkpointed(self._model, self._checkpoints):
                hidden = self._lanes.run(lambda batch: self._hidden(batch, view), batches)
            pairs = list(zip(hidden, batches, strict=True))
            found = self._lanes.run(lambda pair: self._loss(mx.stop_gradient(pair[0]), pair[1]), pairs)
            # d(sum hidden x gradient) / d(arrays) is the chain rule with the head's part already done
            products = self._lanes.run(lambda pair: (pair[0] * pair[1][0]).sum(), list(zip(hidden, found, strict=True)))
            return sum(products[1:], products[0]), [(statistics.arrays, stages) for _, statistics, stages in found]

        (_, raw), gradients = mx.value_and_grad(surrogate)(policy.arrays())
        names = [field.name for field in fields(TokenStatistics)]
        return PassResult(
            gradients=gradients,
            statistics=[TokenStatistics(**dict(zip(names, values, strict=True))) for values, _ in raw],
            stages=_together([stages for _, stages in raw]),
            first=_of_last_layers(gradients, structure.site_of_each()),
        )

    def score(self, view: View | None, batches: Sequence[MicroBatch]) -> list[Scores]:
        """Log-probs and entropies of `batches` (one per lane) under `view`, without gradients. Evaluated."""
        hidden = self._lanes.run(lambda batch: self._hidden(batch, view), batches)
        scores = self._lanes.run(lambda pair: self._score(*pair), list(zip(hidden, batches, strict=True)))
        run_stages(_together([one.stages for one in scores]))
        mx.eval([[one.logprobs_N, one.entropies_N] for one in scores])
        return scores

    def _hidden(self, batch: MicroBatch, view: View | None) -> mx.array:
        """Hidden states (N, H) that predict the completion tokens."""
        inputs_M = mx.array(batch.inputs_M)
        sources_N = mx.array(batch.sources_N)
        if batch.segments and self._trims:
            return hidden_at(self._model, inputs_M, batch.segments, view, sources_N)
        if batch.segments:
            return packed_hidden(self._model, inputs_M, batch.segments, view)[sources_N]
        return self._model.hidden(inputs_M[None], None, view)[0, sources_N]

    def _loss(self, hidden_NH: mx.array, batch: MicroBatch) -> tuple[mx.array, TokenStatistics, Stages]:
        """Gradient of the loss with respect to `hidden_NH`, statistics, and what to evaluate before them."""
        has_bonus = self._objective.entropy_coefficient > 0
        scores = self._score(hidden_NH, batch, wants_slopes=not has_bonus)
        inputs = self._inputs(batch, scores)
        loss, (gradient_N, entropy_gradient_N) = mx.value_and_grad(objective_loss, argnums=(0, 1))(
            scores.logprobs_N, scores.entropies_N, inputs, self._objective
        )
        statistics = TokenStatistics(
            loss=loss,
            logprobs_N=scores.logprobs_N,
            entropies_N=scores.entropies_N,
            clipped_N=is_clipped(scores.logprobs_N, inputs, self._objective),
            kl_N=kl_k3(scores.logprobs_N, inputs.behaviour_N),
            kl_to_base_N=mx.zeros_like(scores.logprobs_N)
            if inputs.reference_N is None
            else kl_k3(inputs.reference_N, scores.logprobs_N),
        )
        pulled_NH, stages = self._head.pull_back(scores, gradient_N, entropy_gradient_N if has_bonus else None)
        return pulled_NH, statistics, scores.stages + stages

    def _score(self, hidden_NH: mx.array, batch: MicroBatch, *, wants_slopes: bool = False) -> Scores:
        tokens_N, temperature_N = mx.array(batch.tokens_N), mx.array(batch.temperature_N)
        return self._head.score(hidden_NH, tokens_N, temperature_N, wants_slopes=wants_slopes)

    def _inputs(self, batch: MicroBatch, scores: Scores) -> LossInputs:
        # A step has one update, so the learner's policy at its start is the one that has just been scored
        corrects = self._objective.correction != "none"
        return LossInputs(
            behaviour_N=mx.array(batch.behaviour_N),
            advantages_N=mx.array(batch.advantages_N),
            weights_N=mx.array(batch.weights_N),
            rows_N=mx.array(batch.rows_N),
            num_rows=len(batch.completions_S),
            old_N=scores.logprobs_N if corrects else None,
            reference_N=None if batch.base_N is None else mx.array(batch.base_N),
            entropy_threshold=batch.entropy_threshold,
        )


def _of_last_layers(gradients: Sequence[mx.array], sites: Sequence[str]) -> list[mx.array]:
    last_first = sorted(zip(gradients, sites, strict=True), key=lambda pair: -(layer_of(pair[1]) or 0))
    return [gradient for gradient, _ in last_first[: len(last_first) // FIRST]]


def _together(stages_of_lanes: Sequence[Stages]) -> Stages:
    """The first stages of all lanes, then the second ones, and so on."""
    return [[*chain.from_iterable(parts)] for parts in zip_longest(*stages_of_lanes, fillvalue=())]
