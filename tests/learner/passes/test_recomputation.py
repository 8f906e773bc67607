from dataclasses import replace

import mlx.core as mx
import pytest
from mlx_lm.models import llama

from parallm.errors import ConfigError
from parallm.learner.passes import recomputation
from parallm.learner.passes.recomputation import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    activation_bytes,
    checkpoints_layers,
    head_chunk_bytes,
    overlaps_passes,
    pass_tokens,
)
from parallm.learner.settings import LearnerSettings
from parallm.model.shared_model import SharedModel

H200_BYTES = 150 * 10**9
SHAPES = {  # layers, hidden, intermediate, heads, key-value heads, vocabulary
    "25.7M": ((8, 512, 1408, 8, 4, 16_000), 65_536),
    "0.5B": ((24, 896, 4864, 14, 2, 151_936), 28 * 1024),
    "8B": ((32, 4096, 14_336, 32, 8, 128_256), 5120),
}


def shaped(nano: SharedModel, shape: tuple[int, ...]) -> SharedModel:
    """A model whose weights are never computed."""
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    config = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    base = llama.Model(llama.ModelArgs.from_dict(config | dict(zip((*names, "vocab_size"), shape, strict=True))))
    base.set_dtype(mx.bfloat16)
    return replace(nano, base=base, trunk_owner=base, trunk_name="model", dtype=mx.bfloat16)


@pytest.mark.cpu
def test_a_pass_on_a_cpu_has_1024_tokens_unless_a_number_is_given(nano: SharedModel) -> None:
    assert pass_tokens(LearnerSettings(), nano) == 1024
    assert pass_tokens(LearnerSettings(micro_batch_tokens=300), nano) == 300


@pytest.mark.parametrize("name", SHAPES)
def test_a_pass_on_a_gpu_fills_a_share_of_its_memory(
    name: str, nano: SharedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recomputation, "on_cuda", lambda: True)
    monkeypatch.setattr(recomputation, "device_memory", lambda: H200_BYTES)
    shape, expected = SHAPES[name]
    model = shaped(nano, shape)
    assert pass_tokens(LearnerSettings(), model) == expected
    monkeypatch.setattr(recomputation, "device_memory", lambda: H200_BYTES // 4)
    assert 1024 <= pass_tokens(LearnerSettings(), model) <= expected
    assert not checkpoints_layers(LearnerSettings(), model, pass_tokens(LearnerSettings(), model))


def test_a_share_of_the_logits_of_a_pass_is_computed_at_once_within_limits(nano: SharedModel) -> None:
    model, settings = replace(shaped(nano, SHAPES["0.5B"][0]), vocabulary_size=151_936), LearnerSettings()
    of_token = 2 * model.vocabulary_size
    for tokens in (16_000, 28 * 1024):
        assert head_chunk_bytes(settings, model, tokens) == tokens * of_token // 48
    assert head_chunk_bytes(settings, model, 1024) == MIN_CHUNK_BYTES
    assert head_chunk_bytes(settings, model, 1 << 18) == MAX_CHUNK_BYTES
    assert head_chunk_bytes(LearnerSettings(head_chunk_bytes=1 << 20), model, 4096) == 1 << 20


def test_a_mixture_has_longer_passes_on_a_gpu_one_after_the_other(
    nano: SharedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recomputation, "on_cuda", lambda: True)
    monkeypatch.setattr(recomputation, "device_memory", lambda: H200_BYTES)
    dense = shaped(nano, SHAPES["8B"][0])
    mixture = replace(dense, experts_per_token=8)
    tokens, more = (pass_tokens(LearnerSettings(), model) for model in (dense, mixture))
    assert more > 1.9 * tokens
    assert not checkpoints_layers(LearnerSettings(), mixture, more)
    assert overlaps_passes(dense, tokens, checkpoints=False)
    assert not overlaps_passes(mixture, more, checkpoints=False)
    assert overlaps_passes(mixture, more, checkpoints=True)


def test_a_pass_of_a_model_that_fills_the_gpu_is_the_smallest(
    nano: SharedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recomputation, "on_cuda", lambda: True)
    monkeypatch.setattr(recomputation, "device_memory", lambda: nano.base_bytes)
    assert pass_tokens(LearnerSettings(), nano) == 1024


def test_what_a_pass_keeps_counts_the_inputs_and_outputs_of_all_linear_layers(nano: SharedModel) -> None:
    layer = nano.base.layers[0]
    linears = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj, layer.self_attn.o_proj]
    linears += [layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj]
    assert activation_bytes(nano) == 4 * nano.num_layers * sum(sum(one.linear.weight.shape) for one in linears)


def test_layers_are_checkpointed_where_a_pass_would_need_half_of_the_memory(
    nano: SharedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 1000 * activation_bytes(nano)
    for room, expected in ((2.1 * needed, False), (1.9 * needed, True)):
        monkeypatch.setattr(recomputation, "device_memory", lambda room=room: nano.base_bytes + room)
        assert checkpoints_layers(LearnerSettings(), nano, 1000) is expected
    assert not checkpoints_layers(LearnerSettings(checkpoint_layers="none"), nano, 10**9)
    assert checkpoints_layers(LearnerSettings(checkpoint_layers="all"), nano, 1)


def test_a_model_without_a_list_of_layers_is_refused_or_left_alone(
    nano: SharedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recomputation, "has_layers", lambda _: False)
    with pytest.raises(ConfigError, match=r"learner\.checkpoint_layers=all"):
        checkpoints_layers(LearnerSettings(checkpoint_layers="all"), nano, 1)
    assert not checkpoints_layers(LearnerSettings(), nano, 10**9)
