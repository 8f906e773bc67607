"""Gradient of the objective for some micro-batches, without ever holding the logits of all their tokens.

1. trunk: hidden states of the completion tokens, with the adapter's arrays traced;
2. head, in chunks: log-probs; 3. the objective's gradient with respect to each log-prob, a number per token;
4. head again, in chunks: the gradient with respect to the hidden states; 5. backward through the trunk from there.

Axes: G completions, T tokens, N completion tokens, H hidden, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from parallm.device.lanes import Lanes
from parallm.learner.batch import MicroBatch
from parallm.learner.objective import Objective, policy_loss
from parallm.learner.optimizer import Arrays
from parallm.learner.prompt_sharing import ContinuationLayer, PromptLayer
from parallm.model.logprobs import entropies, scaled_logits, token_logprobs
from parallm.model.lora import DropoutAdapter, View, one_adapter
from parallm.model.shared_model import SharedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStatistics:
    """What the forward found out about each token of a micro-batch."""

    loss: mx.array
    logprobs_N: mx.array
    entropies_N: mx.array


class PolicyGradient:
    """The model part of an update. Holds no state between calls."""

    def __init__(self, model: SharedModel, lanes: Lanes, objective: Objective, *, chunk_bytes: int, dropout: float) -> None:
        self._model = model
        self._lanes = lanes
        self._objective = objective
        self._dropout = dropout
        self._chunk = max(1, chunk_bytes // (4 * model.vocabulary_size))

    def __call__(
        self, arrays: Arrays, scale: float, batches: Sequence[MicroBatch], key: mx.array
    ) -> tuple[Arrays, list[TokenStatistics]]:
        """Gradients with respect to `arrays`, summed over `batches` (one per lane), and their statistics. Evaluated."""

        def surrogate(traced: Arrays) -> tuple[mx.array, list[list[mx.array]]]:
            view = self._view(traced, scale, key)
            hidden = self._lanes.run(lambda batch: self._hidden(batch, view), batches)
            pairs = list(zip(hidden, batches, strict=True))
            found = self._lanes.run(lambda pair: self._head(mx.stop_gradient(pair[0]), pair[1]), pairs)
            # d(sum hidden x gradient) / d(arrays) is the chain rule with the head's part already done
            products = self._lanes.run(lambda pair: (pair[0] * pair[1][0]).sum(), list(zip(hidden, found, strict=True)))
            return sum(products[1:], products[0]), [[s.loss, s.logprobs_N, s.entropies_N] for _, s in found]

        (_, raw), gradients = mx.value_and_grad(surrogate)(arrays)
        mx.eval(gradients, raw)
        statistics = [TokenStatistics(loss=loss, logprobs_N=lp, entropies_N=entropy) for loss, lp, entropy in raw]
        return gradients, statistics

    def _view(self, arrays: Arrays, scale: float, key: mx.array) -> View:
        adapter = one_adapter(arrays, scale)
        if self._dropout == 0:
            return adapter
        keys = mx.random.split(key, len(adapter.a_IR))
        return DropoutAdapter(adapter, self._dropout, dict(zip(sorted(adapter.a_IR), keys, strict=True)))

    def _hidden(self, batch: MicroBatch, view: View) -> mx.array:
        """Hidden states (N, H) that predict the completion tokens."""
        inputs_GT = mx.array(batch.inputs_GT)
        rows_N, columns_N = mx.array(batch.rows_N), mx.array(batch.columns_N)
        if not batch.prompt:
            return self._model.hidden(inputs_GT, None, view)[rows_N, columns_N]
        prompt = [PromptLayer() for _ in self._model.make_cache()]
        last_11H = self._model.hidden(mx.array([batch.prompt]), prompt, view)[:, -1:]
        hidden_GTH = mx.broadcast_to(last_11H, (inputs_GT.shape[0], 1, last_11H.shape[-1]))
        if inputs_GT.shape[1]:
            continuation = [ContinuationLayer(layer) for layer in prompt]
            hidden_GTH = mx.concatenate([hidden_GTH, self._model.hidden(inputs_GT, continuation, view)], axis=1)
        return hidden_GTH[rows_N, columns_N]

    def _head(self, hidden_NH: mx.array, batch: MicroBatch) -> tuple[mx.array, TokenStatistics]:
        """Gradient of the loss with respect to `hidden_NH`, and the statistics."""
        tokens_N, temperature_N = mx.array(batch.tokens_N), mx.array(batch.temperature_N)
        chunks = [slice(start, start + self._chunk) for start in range(0, batch.num_tokens, self._chunk)]
        parts = [self._scores(hidden_NH[chunk], tokens_N[chunk], temperature_N[chunk], len(chunks)) for chunk in chunks]
        logprobs_N = mx.concatenate([logprobs for logprobs, _ in parts])
        loss, loss_gradient_N = mx.value_and_grad(policy_loss)(
            logprobs_N, mx.array(batch.behaviour_N), mx.array(batch.advantages_N), mx.array(batch.weights_N), self._objective
        )
        gradients = [
            self._pull_back(hidden_NH[chunk], tokens_N[chunk], temperature_N[chunk], loss_gradient_N[chunk], len(chunks))
            for chunk in chunks
        ]
        entropies_N = mx.concatenate([entropy for _, entropy in parts])
        statistics = TokenStatistics(loss=loss, logprobs_N=logprobs_N, entropies_N=entropies_N)
        return mx.concatenate(gradients), statistics

    def _scores(
        self, hidden_NH: mx.array, tokens_N: mx.array, temperature_N: mx.array, num_chunks: int
    ) -> tuple[mx.array, mx.array]:
        scaled_NV = scaled_logits(self._model.head(hidden_NH), temperature_N)
        scores = token_logprobs(scaled_NV, tokens_N), entropies(scaled_NV)
        return _now(scores, num_chunks)

    def _pull_back(
        self, hidden_NH: mx.array, tokens_N: mx.array, temperature_N: mx.array, cotangent_N: mx.array, num_chunks: int
    ) -> mx.array:
        def logprobs(hidden: mx.array) -> mx.array:
            return token_logprobs(scaled_logits(self._model.head(hidden), temperature_N), tokens_N)

        _, (gradient,) = mx.vjp(logprobs, [hidden_NH], [cotangent_N])
        return _now((gradient,), num_chunks)[0]


def _now(arrays: tuple[mx.array, ...], num_chunks: int) -> tuple[mx.array, ...]:
    """Evaluate between chunks, or a lazy graph would hold the logits of all of them."""
    if num_chunks > 1:
        mx.eval(arrays)
    return arrays
