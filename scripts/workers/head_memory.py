"""Peak bytes of log-probs and their gradient for many tokens: our head in chunks, and all logits at once."""

import json
import sys

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.llama import Model, ModelArgs
from shapes import Shape

from parallm.learner.passes.lm_head import ChunkedHead, run_stages
from parallm.learner.settings import LearnerSettings
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.model.load import NANO, load_tokenizer, share_model
from parallm.model.settings import ModelSettings

HIDDEN = 256


def main(tokens: int, vocabulary: int) -> None:
    shape = Shape(
        hidden=HIDDEN, intermediate=64, layers=1, heads=4, key_value_heads=4, head_size=64, vocabulary=vocabulary
    )
    base: nn.Module = Model(ModelArgs.from_dict(shape.config()))
    model = share_model(base, shape.config(), ChatTokenizer(load_tokenizer(NANO)), ModelSettings())
    hidden_NH = mx.random.normal((tokens, HIDDEN)).astype(model.dtype)
    tokens_N = mx.random.randint(0, vocabulary, (tokens,))
    ones_N = mx.ones((tokens,))
    mx.eval(hidden_NH, tokens_N, ones_N)

    def chunked() -> mx.array:
        head = ChunkedHead(model, LearnerSettings().head_chunk_bytes)
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
    found: list[mx.array] = []
    for compute in (chunked, whole):
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        found.append(compute())
        mx.eval(found[-1])
        peaks.append(mx.get_peak_memory() - before)
    difference = mx.abs(found[0] - found[1]).max() / mx.abs(found[1]).max()
    print(json.dumps({"chunked": peaks[0], "whole": peaks[1], "difference": float(difference.item())}))


main(*json.loads(sys.argv[1]))
