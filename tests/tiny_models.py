"""Tiny models with random weights of the architectures that mlx-lm knows: a table of configs, and what builds them.

`build_model("qwen3_5")` gives the module, `write_model(folder, "qwen3_5")` a folder with the tokenizer of the embedded
model. An entry's key is the name of mlx-lm's file; the entry overrides `model_type` where config.json says another one.

MLX takes the BLAS that is there when it loads: whoever imports this outside of pytest calls `load_blas` first.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes

from parallm.model.load import NANO

VOCABULARY_SIZE = 385
"""Of the embedded model's tokenizer, which the tiny models share."""
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
    "falcon_h1": DENSE
    | MAMBA2
    | {
        "mamba_d_ssm": 128,
        "tie_word_embeddings": False,
        "ssm_multipliers": [0.9, 1.2, 1.1, 0.8, 1.3],
        "mlp_multipliers": [1.2, 0.8],
        "embedding_multiplier": 1.3,
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 1.2,
        "ssm_in_multiplier": 1.1,
        "ssm_out_multiplier": 0.9,
        "key_multiplier": 0.7,
        "lm_head_multiplier": 0.8,
    },
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
    "qwen3_next": GATED_DELTA
    | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
    },
    "olmo_hybrid": DENSE
    | {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "mamba2": RECURRENT
    | {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": [0.001, 100.0],
        "time_step_rank": "auto",
    },
    "plamo2": DENSE
    | {
        "hidden_size_per_head": 16,
        "attention_window_size": 512,
        "mamba_d_state": 16,
        "mamba_num_heads": 8,
        "mamba_step": 2,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "gear": DENSE
    | {
        "num_hidden_layers": 3,
        "layer_types": ["conv_mixer", "sliding_attention", "full_attention"],
        "sliding_window": 8,
    },
    "baichuan_m1": DENSE | {"sliding_window": 8, "sliding_window_layers": [1], "conv_window": 2},
    "rwkv7": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "norm_eps": 1e-5,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
        "max_position_embeddings": 512,
    },
    "bailing_moe_linear": EXPERTS
    | {
        "num_experts": 4,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "layer_group_size": 2,
        "group_norm_size": 2,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "topk_group": 1,
    },
    "bailing_hybrid": EXPERTS
    | LATENT
    | {
        "num_experts": 4,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "layer_group_size": 2,
        "group_norm_size": 2,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    },
    "bailing_moe_v3": EXPERTS
    | LATENT
    | {
        "model_type": "bailing_hybrid",
        "architectures": ["BailingMoeV3ForCausalLM"],
        "num_experts": 4,
        "num_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "layer_group_size": 2,
        "q_lora_rank": 32,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    },
    "kimi_k3": {
        "text_config": DENSE
        | LATENT
        | {
            "vocab_size": VOCABULARY_SIZE,
            "linear_attn_config": {
                "kda_layers": [1],
                "full_attn_layers": [2],
                "num_heads": 4,
                "head_dim": 16,
                "short_conv_kernel_size": 4,
            },
            "num_experts": 4,
            "num_experts_per_token": 2,
            "moe_intermediate_size": 32,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "activation_situ_beta": 1.0,
            "activation_situ_linear_beta": 1.0,
            "attn_res_block_size": 2,
            "q_lora_rank": 32,
            "mla_use_output_gate": True,
        }
    },
    "longcat_flash_ngram": LATENT
    | {
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 32,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "num_layers": 2,
        "max_position_embeddings": 512,
        "num_attention_heads": 4,
        "q_lora_rank": 32,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "ngram_vocab_size_ratio": 3,
        "emb_neighbor_num": 3,
        "emb_split_num": 2,
    },
}

HYBRIDS = (
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid", "kimi_linear", "kimi_k3", "bailing_moe_v3"),  # delta rules
    *("mamba", "jamba", "mamba2", "nemotron_h", "granitemoehybrid", "falcon_h1", "plamo2"),  # state spaces
    *("lfm2", "lfm2_moe", "gear", "baichuan_m1"),  # short convolutions
    *("recurrent_gemma", "rwkv7", "bailing_moe_linear", "bailing_hybrid"),  # other recurrences
)
"""Architectures whose layers keep states that no position indexes, beside attention or alone."""


def config_of(architecture: str) -> dict[str, Any]:
    """config.json of an entry of `ARCHITECTURES`."""
    config = {"model_type": architecture, "vocab_size": VOCABULARY_SIZE, "eos_token_id": 1}
    return config | ARCHITECTURES[architecture]


def build_model(architecture: str, seed: int = 7, **changes: Any) -> nn.Module:
    """A model of mlx-lm with random float32 weights, in evaluation mode; `changes` are fields of its config."""
    config = config_of(architecture) | changes
    model_class, arguments_class = _get_classes(config)
    mx.random.seed(seed)  # biases stay as they are made
    model: nn.Module = model_class(arguments_class.from_dict(config))
    if not hasattr(model, "_no_grad"):
        nn.Module.__init__(model)  # recurrent_gemma's class leaves it out
    arrays = tree_flatten(model.parameters())
    keys = iter(mx.random.split(mx.random.key(seed), max(1000, len(arrays))))
    model.update(tree_unflatten([(name, spread(name, array, next(keys))) for name, array in arrays]))
    model.eval()
    mx.eval(model.parameters())
    return model


def write_model(folder: Path, architecture: str, seed: int = 7, **changes: Any) -> None:
    """`build_model` as a folder, with the tokenizer of the embedded model."""
    model = build_model(architecture, seed, **changes)
    arrays = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config_of(architecture) | changes))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(NANO / name, folder / name)


def spread(name: str, array: mx.array, key: mx.array) -> mx.array:
    """Weights large enough that tokens differ and that the two best are rarely close, and gates that forget at once,
    slowly and hardly: with mlx-lm's own nearly all forget at once, and a wrong state would not show."""
    last = name.rpartition(".")[2]
    if last == "A_log":
        return mx.random.uniform(math.log(0.01), math.log(16), array.shape, key=key)
    if last == "dt_bias":
        return mx.random.uniform(-4, 1, array.shape, key=key)
    if "conv" in name and array.ndim > 2:
        return mx.random.normal(array.shape, key=key) * 0.5
    if array.ndim >= 2 and last == "weight":
        return mx.random.normal(array.shape, key=key) * (2 / array.shape[-1] ** 0.5)
    if array.dtype == mx.float32 and not mx.any(array).item():  # made to be learned or loaded
        return mx.random.normal(array.shape, key=key) * 0.3
    return array
