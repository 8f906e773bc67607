"""What all tests share: a BLAS that is loaded before MLX, and small models with random weights in real folders."""

import json
import os
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from parallm.device.blas import load_blas, set_blas_threads
from parallm.device.settings import DeviceSettings

os.environ["PARALLM_CONFIG"] = "off"  # no test reads the user's configuration file
BLAS = load_blas(DeviceSettings())
set_blas_threads(BLAS, 1)  # what the streams do, too: several threads on few, busy cores wait for each other

import mlx.core as mx  # noqa: E402  # only now: MLX takes the BLAS that is there when it loads
import mlx.nn as nn  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.convert import convert  # noqa: E402
from mlx_lm.utils import _get_classes  # noqa: E402

from parallm.device.streams import DeviceStreams  # noqa: E402
from parallm.model.kernels.cuda import on_cuda  # noqa: E402
from parallm.model.load import NANO, load_shared_model  # noqa: E402
from parallm.model.settings import LoraSettings, ModelSettings  # noqa: E402
from parallm.model.shared_model import SharedModel  # noqa: E402

VOCABULARY_SIZE = 385  # of the embedded model's tokenizer, which the small models share
DENSE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}
OLD = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512, "n_ctx": 512, "layer_norm_epsilon": 1e-5}
RECURRENT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
}
EXPERTS = DENSE | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
GATED_DELTA = DENSE | {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "tie_word_embeddings": False,
}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": DENSE | {"tie_word_embeddings": False},
    "qwen2": DENSE | {"tie_word_embeddings": True},
    "qwen3": DENSE | {"tie_word_embeddings": True},
    "gemma": DENSE,
    "gemma2": DENSE | {"query_pre_attn_scalar": 16},
    "gemma3_text": DENSE
    | {"num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    "phi3": DENSE,
    "mistral": DENSE | {"tie_word_embeddings": False},
    "mixtral": DENSE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": DENSE,
    "cohere": DENSE | {"layer_norm_eps": 1e-5, "use_qk_norm": False},
    "granite": DENSE
    | {
        "logits_scaling": 2.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 4.0,
        "residual_multiplier": 0.5,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "starcoder2": DENSE | {"norm_epsilon": 1e-5},
    "gpt_neox": DENSE | {"layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.25},
    "gpt2": OLD,
    "gpt_bigcode": OLD | {"n_inner": 128},
    "mamba": RECURRENT
    | {"state_size": 8, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 4},
    "jamba": RECURRENT
    | {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
    },
    "qwen3_moe": EXPERTS
    | {"num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": True},
    "qwen3_5": GATED_DELTA,
    "qwen3_5_moe": GATED_DELTA
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "deepseek_v3": EXPERTS
    | LATENT
    | {"n_shared_experts": 1, "n_routed_experts": 4, "q_lora_rank": 32, "first_k_dense_replace": 1},
    "gpt_oss": DENSE | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "lfm2": DENSE
    | {
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1],
    },
    "lfm2_moe": EXPERTS
    | {
        "num_experts": 4,
        "use_expert_bias": True,
        "num_dense_layers": 1,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "full_attn_idxs": [1],
    },
    "nemotron_h": DENSE
    | {
        "num_hidden_layers": 4,
        "hybrid_override_pattern": ["M", "*", "-", "E"],
        "attention_bias": False,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    "falcon_h1": DENSE | MAMBA2 | {"mamba_d_ssm": 128, "tie_word_embeddings": False},
    "granitemoehybrid": DENSE
    | MAMBA2
    | {
        "attention_bias": False,
        "embedding_multiplier": 4.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "kimi_linear": DENSE
    | LATENT
    | {
        "linear_attn_config": {
            "kda_layers": [1],
            "full_attn_layers": [2],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
        "model_max_length": 512,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 32,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "recurrent_gemma": DENSE
    | {
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": 16,
        "block_types": ["recurrent", "attention"],
    },
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cpu") is not None and on_cuda():
        pytest.skip("states a fact of a CPU")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a small model of an architecture that mlx-lm knows, with random weights and the nano tokenizer."""

    @cache
    def make(architecture: str) -> Path:
        folder = tmp_path_factory.mktemp(architecture)
        write_model(folder, architecture)
        return folder

    return make


@pytest.fixture(scope="session")
def load_tiny(tiny_model: Callable[[str], Path]) -> Callable[..., SharedModel]:
    """`tiny_model` as the engine gets it, loaded once: `load_tiny("llama", rank=4, targets="experts")`."""

    @cache
    def load(architecture: str, rank: int = 4, targets: str | tuple[str, ...] | None = None) -> SharedModel:
        lora = LoraSettings(rank=rank, targets=targets)
        return load_shared_model(ModelSettings(path=str(tiny_model(architecture)), lora=lora))

    return load


@pytest.fixture(scope="session")
def tiny_quantized(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a small model as `mlx_lm.convert -q` makes it: `tiny_quantized("llama", bits=4)`."""

    @cache
    def make(architecture: str, *, bits: int, mode: str = "affine") -> Path:
        folder = tmp_path_factory.mktemp(f"{architecture}-{mode}-{bits}") / "model"
        source = str(tiny_model(architecture))
        convert(source, str(folder), quantize=True, q_bits=bits, q_group_size=32, q_mode=mode)
        return folder

    return make


@pytest.fixture(scope="session")
def nano() -> SharedModel:
    """The embedded model as the engine gets it."""
    return load_shared_model(ModelSettings())


@pytest.fixture(scope="session")
def streams() -> DeviceStreams:
    """The streams of the thread that runs the tests."""
    return DeviceStreams(partial(set_blas_threads, BLAS))


def write_model(folder: Path, architecture: str) -> None:
    config = {"model_type": architecture, "vocab_size": VOCABULARY_SIZE, "eos_token_id": 1}
    config |= ARCHITECTURES[architecture]
    model_class, arguments_class = _get_classes(config)
    mx.random.seed(7)  # biases stay as they are made
    model: nn.Module = model_class(arguments_class.from_dict(config))
    keys = iter(mx.random.split(mx.random.key(7), 1000))
    arrays = {name: spread(name, array, next(keys)) for name, array in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(NANO / name, folder / name)


def spread(name: str, array: mx.array, key: mx.array) -> mx.array:
    """Weights large enough that the tokens differ and that the two best are rarely close."""
    if array.ndim < 2 or not name.endswith("weight"):
        return array
    return mx.random.normal(array.shape, key=key) * (2 / array.shape[-1] ** 0.5)
