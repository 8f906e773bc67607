"""Log-probs and their gradient for many tokens take a fraction of the memory of all logits at once."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest
from bench.workers.loads import shape_of
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.utils import load_tokenizer

from parallm.learner.passes.lm_head import ChunkedHead, run_stages
from parallm.learner.passes.recomputation import head_chunk_bytes
from parallm.learner.settings import LearnerSettings
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.model.load import NANO, share_model
from parallm.model.settings import ModelSettings


@pytest.mark.skipif(mx.default_device() == mx.Device(mx.cpu), reason="all logits at once take gigabytes of a GPU")
def test_the_head_takes_a_tenth_of_the_memory(record_property: Callable[[str, object], None]) -> None:
    (chunked, whole), _ = peaks_and_difference(4096, 151_936)
    record_property("head.memory_ratio", chunked / whole)
    assert chunked < 0.1 * whole


def test_the_gradients_are_the_same() -> None:
    _, difference = peaks_and_difference(64, 384)
    assert difference < 1e-3


HIDDEN = 256


def peaks_and_difference(tokens: int, vocabulary: int) -> tuple[list[int], float]:
    """Peak bytes of our head in chunks and of all logits at once, and the relative difference of their gradients."""
    shape = shape_of(HIDDEN, 64, 1, 4, 4, 64, vocabulary)
    base: nn.Module = Model(ModelArgs.from_dict(shape))
    model = share_model(base, shape, ChatTokenizer(load_tokenizer(NANO)), ModelSettings())
    hidden_NH = mx.random.normal((tokens, HIDDEN)).astype(model.dtype)
    tokens_N = mx.random.randint(0, vocabulary, (tokens,))
    ones_N = mx.ones((tokens,))
    mx.eval(hidden_NH, tokens_N, ones_N)

    def chunked() -> mx.array:
        head = ChunkedHead(model, head_chunk_bytes(LearnerSettings(), model, tokens))
        scores = head.score(hidden_NH, tokens_N, ones_N, wants_slopes=True)
        gradient_NH, stages = head.backward(scores, ones_N)
        run_stages(scores.stages + stages)
        return gradient_NH

    def whole() -> mx.array:
        def total(hidden: mx.array) -> mx.array:
            logits_NV = model.head(hidden).astype(mx.float32)
            chosen_N = mx.take_along_axis(logits_NV, tokens_N[:, None], axis=-1)[:, 0]
            return (chosen_N - mx.logsumexp(logits_NV, axis=-1)).sum()

        return mx.grad(total)(hidden_NH)

    peaks: list[int] = []
    gradients: list[mx.array] = []
    for compute in (chunked, whole):
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        gradients.append(compute())
        mx.eval(gradients[-1])
        peaks.append(mx.get_peak_memory() - before)
    difference = mx.abs(gradients[0] - gradients[1]).max() / mx.abs(gradients[1]).max()
    return peaks, float(difference.item())
