"""Gradients of a packed pass that knows which tokens are trained, on a GPU, where rows are padded and rotated apart."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama, qwen2, qwen3
from mlx_lm.utils import load_tokenizer

from parallm.learner.passes import packing
from parallm.learner.passes.gradient import hidden_at, trims_last_layer
from parallm.learner.passes.packing import Segment, packed_hidden, takes_rows
from parallm.model.adapters.initial import initial_arrays
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.model.kernels.cuda import has_kernels, on_cuda
from parallm.model.load import NANO, share_model
from parallm.model.lora.single import LoraScaling, single_lora
from parallm.model.settings import ModelSettings
from parallm.model.shared_model import SharedModel

SEGMENTS = [Segment(prompt=128), Segment(prompt=128), Segment(prompt=70, runs=((2, 50), (1, 20)))]
NUM_TOKENS = sum(sum(segment.sizes) for segment in SEGMENTS)
SOURCES = [*range(60, 128), *range(200, 256), *range(330, NUM_TOKENS)]


def model_of(module: object, dtype: mx.Dtype) -> SharedModel:
    config: dict[str, object] = {"model_type": module.__name__.rsplit(".", 1)[-1]}  # type: ignore[attr-defined]
    config |= {"hidden_size": 256, "intermediate_size": 352, "num_hidden_layers": 3, "vocab_size": 384}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-5}
    config |= {"rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": True}
    base = module.Model(module.ModelArgs.from_dict(config))  # type: ignore[attr-defined]
    base.set_dtype(dtype)
    return share_model(base, config, ChatTokenizer(load_tokenizer(NANO)), ModelSettings())


def gradient(model: SharedModel, *, trims: bool) -> mx.array:
    """Of a sum of hidden states with random factors, as one vector, float32."""
    arrays = initial_arrays(model.targets, 16, mx.random.key(0))
    keys = mx.random.split(mx.random.key(1), len(arrays))
    for name, key in zip(sorted(arrays), keys, strict=True):
        if name.endswith("lora_b"):
            arrays[name] = mx.random.normal(arrays[name].shape, key=key) / 64
    adapter = single_lora(
        arrays, LoraScaling(dict.fromkeys(model.targets, 2.0), {}, model.dtype, model.joined), widens=True
    )
    structure = adapter.structure()
    tokens = mx.array([(7 * place) % 380 + 1 for place in range(NUM_TOKENS)])
    factors_NH = mx.random.normal((len(SOURCES), 256), key=mx.random.key(2))

    def total(arrays: list[mx.array]) -> mx.array:
        lora, sources_N = structure.lora(arrays), np.array(SOURCES, np.int32)
        if trims:
            hidden_NH = hidden_at(model, tokens, SEGMENTS, lora, sources_N)
        else:
            hidden_NH = packed_hidden(model, tokens, SEGMENTS, lora)[mx.array(sources_N)]
        return (hidden_NH.astype(mx.float32) * factors_NH).sum()

    found = mx.grad(total)(adapter.arrays())
    return mx.concatenate([one.reshape(-1).astype(mx.float32) for one in found])


@pytest.mark.skipif(not on_cuda(), reason="needs MLX's CUDA build")
@pytest.mark.parametrize("module", [llama, qwen2, qwen3])
def test_gradients_of_a_trimmed_pass_are_those_of_the_whole_one(module: object) -> None:
    mx.random.seed(0)
    model = model_of(module, mx.bfloat16)
    assert trims_last_layer(model)
    expected, found = gradient(model, trims=False), gradient(model, trims=True)
    assert mx.linalg.norm(found - expected).item() <= 0.03 * mx.linalg.norm(expected).item()


@pytest.mark.skipif(not has_kernels(), reason="needs MLX's CUDA build")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("module", [llama, qwen3])
def test_gradients_of_rows_that_attend_in_one_launch_are_those_of_cudnn(
    module: object, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    mx.random.seed(0)
    model = model_of(module, dtype)
    assert takes_rows(model)
    found = gradient(model, trims=True)
    monkeypatch.setattr(packing, "attends_by_rectangles", lambda _: True)
    expected = gradient(model, trims=True)
    assert not takes_rows(model)
    assert mx.linalg.norm(found - expected).item() <= 0.03 * mx.linalg.norm(expected).item()
