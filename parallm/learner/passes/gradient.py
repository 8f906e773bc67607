"""One pass: the gradient of the objective for some micro-batches. `Learner` calls it.

The logits of all tokens never exist together.
1. trunk: hidden states of the completion tokens, with the adapter's arrays traced;
2. head, in chunks: log-probs; 3. the objective's gradient with respect to each log-prob and entropy, numbers per token;
4. head again, in chunks: the gradient with respect to the hidden states; 5. backward through the trunk from there.

Axes: M computed tokens, N completion tokens, H hidden.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain, groupby, pairwise, zip_longest
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from parallm.device.streams import DeviceStreams
from parallm.learner.loss.objective import Objective
from parallm.learner.loss.policy_loss import LossInputs, is_clipped, kl_k3, objective_loss
from parallm.learner.optimizer import ParameterLayout, vector_of
from parallm.learner.passes.batch import MicroBatch
from parallm.learner.passes.lm_head import ChunkedHead, Scores, Stages, run_stages
from parallm.learner.passes.packing import Segment, num_padding_rows, packed_hidden, padded_hidden
from parallm.learner.passes.recomputation import checkpointed, cut_trunk
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.module_names import layer_of
from parallm.model.kernels.cuda import on_cuda
from parallm.model.kernels.gather import take_known_rows
from parallm.model.layers import can_trim, trimmed_last_layer
from parallm.model.lora.dora import lora_scaling
from parallm.model.lora.linear import LoraBinding
from parallm.model.lora.selector import training_lora
from parallm.model.lora.single import LoraScaling, SingleLora, single_lora
from parallm.model.quantized import kept_unpacked
from parallm.model.shared_model import SharedModel

TRUNK_PARTS, BACKWARD_PARTS = 4, 8  # a backward takes twice as long as a forward


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStatistics:
    """Per-token results of a micro-batch's forward."""

    loss: mx.array
    logprobs_N: mx.array
    entropies_N: mx.array
    clipped_N: mx.array
    """True if the policy term bounds or removes the gradient of a trained token."""
    kl_N: mx.array
    """k3 estimate of the sampler's KL to the learner's policy."""
    kl_to_base_N: mx.array
    """k3 estimate of the policy's KL to the base; zeros if the base was not scored."""

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return self.loss, self.logprobs_N, self.entropies_N, self.clipped_N, self.kl_N, self.kl_to_base_N


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """The result of a pass, not evaluated: first the stages in order, then the rest."""

    gradients: list[mx.array]
    """Times `scale`."""
    scale: float
    """A power of two; see `gradient_scale`."""
    statistics: list[TokenStatistics]
    stages: Stages
    parts: Stages
    """Trunk and head in parts of some layers each, the stages among them."""
    backward: Stages
    """The gradients of some layers each, in the order in which the backward reaches them."""


class PolicyGradient:
    """Forward and backward of micro-batches. Holds no state between calls."""

    def __init__(
        self,
        model: SharedModel,
        streams: DeviceStreams,
        objective: Objective,
        *,
        chunk_bytes: int,
        dropout: float,
        checkpoints: bool,
    ) -> None:
        self._model = model
        self._checkpoints = checkpoints
        self._streams = streams
        self._objective = objective
        self._dropout = dropout
        self._trims = trims_last_layer(model)
        self._head = ChunkedHead(model, chunk_bytes)

    def __call__(self, policy: SingleLora, batches: Sequence[MicroBatch], key: mx.array) -> PassResult:
        """Gradients with respect to `policy.arrays()`, summed over `batches` (one per stream), and statistics.

        Not evaluated.
        """
        structure, scale = policy.structure(), gradient_scale(self._model.dtype, batches)

        def surrogate(traced: list[mx.array]) -> tuple[mx.array, Any]:
            lora = training_lora(structure.lora(traced), self._dropout, key)
            with checkpointed(self._model, self._checkpoints), cut_trunk(self._model, TRUNK_PARTS) as cuts:
                hidden = self._streams.run(lambda batch: self._hidden(batch, lora), batches)
            pairs = list(zip(hidden, batches, strict=True))
            with kept_unpacked():
                losses = self._streams.run(lambda pair: self._loss(mx.stop_gradient(pair[0]), pair[1], scale), pairs)
            # d(sum hidden x gradient) / d(arrays) is the chain rule after the head
            products = self._streams.run(
                lambda pair: (pair[0] * pair[1][0]).sum(), list(zip(hidden, losses, strict=True))
            )
            results = [(statistics.arrays, stages) for _, statistics, stages in losses]
            return sum(products[1:], products[0]), (results, cuts, hidden, [gradient for gradient, _, _ in losses])

        (_, (raw_results, cuts, *head)), gradients = mx.value_and_grad(surrogate)(policy.arrays())
        num_cuts = len(cuts) // len(batches)
        stages = _interleave([stages for _, stages in raw_results])
        names = [field.name for field in fields(TokenStatistics)]
        return PassResult(
            gradients=gradients,
            scale=scale,
            statistics=[TokenStatistics(**dict(zip(names, values, strict=True))) for values, _ in raw_results],
            stages=stages,
            # cuts are those of one stream after the other, and the first one of each is its input
            parts=[*(list(cuts[cut::num_cuts]) for cut in range(1, num_cuts)), head[0], *stages, head[1]],
            backward=_last_layers_first(gradients, structure.target_of_each()),
        )

    def score(self, lora: LoraBinding | None, batches: Sequence[MicroBatch]) -> list[Scores]:
        """Log-probs and entropies of `batches` (one per stream) under `lora`, without gradients. Evaluated."""
        hidden = self._streams.run(lambda batch: self._hidden(batch, lora), batches)
        with kept_unpacked():
            scores = self._streams.run(lambda pair: self._score(*pair), list(zip(hidden, batches, strict=True)))
        run_stages(_interleave([batch_scores.stages for batch_scores in scores]))
        mx.eval([[batch_scores.logprobs_N, batch_scores.entropies_N] for batch_scores in scores])
        return scores

    def _hidden(self, batch: MicroBatch, lora: LoraBinding | None) -> mx.array:
        """Hidden states (N, H) that predict the completion tokens, and of any tokens up to the head's padded size."""
        inputs_M = mx.array(batch.inputs_M)
        num_padding = self._head.padded_size(len(batch.sources_N)) - len(batch.sources_N)
        # apart from each other: the gradient of a row that many read is a sum in turns
        sources_N = np.append(batch.sources_N, np.arange(num_padding, dtype=np.int32) % inputs_M.size)
        if batch.segments and self._trims:
            return hidden_at(self._model, inputs_M, batch.segments, lora, sources_N)
        if batch.segments:
            return take_known_rows(packed_hidden(self._model, inputs_M, batch.segments, lora), sources_N)
        return self._model.hidden(inputs_M[None], None, lora)[0, mx.array(sources_N)]

    def _loss(self, hidden_NH: mx.array, batch: MicroBatch, scale: float) -> tuple[mx.array, TokenStatistics, Stages]:
        """Gradient of `scale` x the loss with respect to `hidden_NH`, statistics, and the stages to evaluate first."""
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
        if scale != 1:
            gradient_N, entropy_gradient_N = gradient_N * scale, entropy_gradient_N * scale
        hidden_gradient_NH, stages = self._head.backward(scores, gradient_N, entropy_gradient_N if has_bonus else None)
        return hidden_gradient_NH, statistics, scores.stages + stages

    def _score(self, hidden_NH: mx.array, batch: MicroBatch, *, wants_slopes: bool = False) -> Scores:
        tokens_N, temperature_N = mx.array(batch.tokens_N), mx.array(batch.temperature_N)
        return self._head.score(hidden_NH, tokens_N, temperature_N, wants_slopes=wants_slopes)

    def _inputs(self, batch: MicroBatch, scores: Scores) -> LossInputs:
        # a step has one update, so the policy at its start is the one just scored
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


def gradient_scale(dtype: mx.Dtype, batches: Sequence[MicroBatch]) -> float:
    """Factor of the loss of `batches` while it is differentiated, a power of two (as loss scaling,
    https://arxiv.org/abs/1710.03740).

    A token's share of a step's loss, such as 1e-5, and all that follows from it would be among float16's smallest
    numbers, which have few digits. With the factor the largest share is about 1. Other types have the range.
    """
    if dtype != mx.float16:
        return 1.0
    # terms without an advantage, such as KL's, count as if it was 1
    shares = [(batch.weights_N * np.maximum(np.abs(batch.advantages_N), 1)).max(initial=0) for batch in batches]
    largest = float(max(shares, default=0))
    return 2.0 ** -math.ceil(math.log2(largest)) if 0 < largest < math.inf else 1.0


def _last_layers_first(gradients: Sequence[mx.array], targets: Sequence[str]) -> Stages:
    pairs = sorted(zip(gradients, targets, strict=True), key=lambda pair: -(layer_of(pair[1]) or 0))
    ends = [len(pairs) * part // BACKWARD_PARTS for part in range(BACKWARD_PARTS + 1)]
    return [[gradient for gradient, _ in pairs[start:end]] for start, end in pairwise(ends)]


def _interleave(stages_of_streams: Sequence[Stages]) -> Stages:
    """The first stages of all streams, then the second ones, and so on."""
    return [[*chain.from_iterable(parts)] for parts in zip_longest(*stages_of_streams, fillvalue=())]


def hidden_at(
    model: SharedModel,
    inputs_M: mx.array,
    segments: Sequence[Segment],
    lora: LoraBinding | None,
    sources_N: npt.NDArray[np.int32],
) -> mx.array:
    """`packed_hidden` at `sources_N`, (N, H), for a model of which `trims_last_layer`.

    After the last attention no tokens mix, so prompts need neither the last MLP nor its gradient. With prompts as long
    as completions that saves 1% of an 8B model's update, more for smaller models or longer prompts.
    """
    num_padding = num_padding_rows(sources_N.size)
    rows_N = np.append(sources_N, np.zeros(num_padding, np.int32))
    # the last layer is not checkpointed: its backward is the first
    with trimmed_last_layer(model, lambda hidden_MH: take_known_rows(hidden_MH, rows_N)):
        return padded_hidden(model, inputs_M, segments, lora)[: sources_N.size]


def trims_last_layer(model: SharedModel) -> bool:
    """Whether packed rows need the last MLP for the tokens that are read alone."""
    if not model.make_cache():
        return False  # an encoder
    return can_trim(model, lambda tokens_M: padded_hidden(model, tokens_M, [Segment(prompt=tokens_M.size)], None))


class LoraWeights:
    """The effective LoRA weights of one version: rounded, scaled and joined, once for each update.

    That takes dozens of small kernels a layer, and as many backward: 3% of an 8B model's update if each pass did it. So
    passes are differentiated with respect to the effective weights, and the sum of their gradients goes back to the
    adapter's arrays once, in float32. Axis: N numbers of all effective weights.
    """

    def __init__(self, adapter: Adapter, model: SharedModel) -> None:
        self._arrays = dict(adapter.arrays)
        self._scaling = lora_scaling(adapter, model)
        self._widens = on_cuda() and adapter.dropout == 0
        self.lora = self._lora(self._arrays, self._scaling)
        if not on_cuda():  # else `queue` computes them; here the streams of a round would wait for each other at each
            mx.eval(self.lora.arrays())

    def queue(self) -> None:
        """Queue what computes `lora.arrays()`."""
        mx.async_eval(self.lora.arrays())

    def join(self, gradients: Sequence[mx.array], scale: float = 1.0) -> mx.array:
        """Gradients of `lora.arrays()`, which are times `scale`, as one vector (N,), float32, without it."""
        by_type = [list(group) for _, group in groupby(gradients, key=lambda array: array.dtype)]  # one cast per type
        joined_N = vector_of([vector_of(group).astype(mx.float32) for group in by_type])
        return joined_N if scale == 1 else joined_N / scale

    def backward(self, gradient_N: mx.array, layout: ParameterLayout) -> mx.array:
        """The gradient of the adapter's arrays in `layout`, given that of the effective weights."""
        shapes = [array.shape for array in self.lora.arrays()]
        cuts = list(accumulate(array.size for array in self.lora.arrays()))[:-1]
        cotangents = [part.reshape(shape) for part, shape in zip(mx.split(gradient_N, cuts), shapes, strict=True)]
        exact = replace(self._scaling, dtype=mx.float32)
        _, gradients = mx.vjp(
            lambda *arrays: self._lora(dict(zip(self._arrays, arrays, strict=True)), exact).arrays(),
            list(self._arrays.values()),
            cotangents,
        )
        return layout.join(dict(zip(self._arrays, gradients, strict=True)))

    def _lora(self, arrays: dict[str, mx.array], scaling: LoraScaling) -> SingleLora:
        return single_lora(arrays, scaling, widens=self._widens)
