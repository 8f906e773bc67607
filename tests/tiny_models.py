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
    "head_dim": 64,  # of which a quarter is rotated; MLX's CUDA build cannot launch that of a quarter of 16
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
DEEPSEEK = (
    EXPERTS
    | LATENT
    | {
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "q_lora_rank": 32,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    }
)
DEEPSEEK_ROPE = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "mscale_all_dim": 1.0}
GEMMA4 = DENSE | {
    "num_hidden_layers": 4,
    "vocab_size": VOCABULARY_SIZE,
    "vocab_size_per_layer_input": VOCABULARY_SIZE,
    "global_head_dim": 32,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
}
LLAMA4_ROPE = {
    "rope_theta": 10000.0,
    "rope_type": "default",
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 16,
}
WINDOW_ROPES = {
    kind: {"rope_theta": 10000.0, "rope_type": "default"} for kind in ("sliding_attention", "full_attention")
}
LONGCAT = LATENT | {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
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
    "attention_bias": False,
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
    # keys and values alone: dense
    "afm7": DENSE
    | {
        "hidden_dim": 64,
        "num_layers": 4,
        "num_kv_reuse_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "hidden_dim_scale_factor": 1.5,
    },
    "apertus": DENSE
    | {"mlp_bias": False, "attention_bias": False, "post_norm": False, "qk_norm": True, "tie_word_embeddings": False},
    "bitnet": DENSE,
    "cohere2": DENSE | {"num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": 2},
    "ernie4_5": DENSE | {"use_bias": False, "tie_word_embeddings": True},
    "exaone": DENSE | {"num_layers": 2, "layer_norm_epsilon": 1e-5, "activation_function": "silu"},
    "exaone4": DENSE
    | {
        "num_hidden_layers": 4,
        "tie_word_embeddings": False,
        "rope_scaling": None,
        "sliding_window": 8,
        "sliding_window_pattern": "LG",
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma3": {
        "text_config": DENSE
        | {
            "num_hidden_layers": 4,
            "model_type": "gemma3_text",
            "vocab_size": VOCABULARY_SIZE,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 16,
        }
    },
    "gemma3n": {
        "text_config": DENSE
        | {
            "model_type": "gemma3n_text",
            "vocab_size": VOCABULARY_SIZE,
            "num_hidden_layers": 4,
            "intermediate_size": [96] * 4,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCABULARY_SIZE,
            "sliding_window": 8,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
            "hidden_size_per_layer_input": 16,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
        }
    },
    "gemma4": {"text_config": GEMMA4 | {"model_type": "gemma4_text"}},
    "gemma4_text": GEMMA4,
    "glm": DENSE,
    "glm4": DENSE | {"attention_bias": False, "partial_rotary_factor": 0.5},
    "gptj": OLD | {"rotary_dim": 8},
    "helium": DENSE | {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False},
    "hunyuan_v1_dense": DENSE,
    "internlm2": DENSE | {"bias": False},
    "internlm3": DENSE | {"bias": False, "qkv_bias": False},
    "iquestloopcoder": DENSE | {"loop_window_size": 8},
    "lille-130m": {
        "block_size": 512,
        "layer_norm_eps": 1e-5,
        "n_embd": 64,
        "n_head": 4,
        "n_kv_heads": 2,
        "n_layer": 2,
        "rope_theta": 10000.0,
    },
    "llama4_text": DENSE
    | {
        "intermediate_size_mlp": 96,
        "tie_word_embeddings": False,
        "no_rope_layers": [1, 0],
        "use_qk_norm": True,
    },
    "mimo": DENSE | {"num_nextn_predict_layers": 1},
    "minicpm": DENSE | {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 4},
    "minicpm3": DENSE
    | LATENT
    | {
        "dim_model_base": 32,
        "q_lora_rank": 32,
        "scale_depth": 1.4,
        "scale_emb": 4,
        "rope_scaling": {
            "type": "longrope",
            "original_max_position_embeddings": 256,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0] * 4,
        },
    },
    "ministral3": DENSE | {"tie_word_embeddings": False, "rope_parameters": LLAMA4_ROPE},
    "mistral3": {
        "text_config": DENSE
        | {
            "model_type": "ministral3",
            "vocab_size": VOCABULARY_SIZE,
            "tie_word_embeddings": False,
            "rope_parameters": LLAMA4_ROPE,
        }
    },
    "muse_glimmer": DENSE | {"num_hidden_layers": 4, "sliding_window": 8},
    "nanbeige": DENSE,
    "nanochat": DENSE,
    "nemotron": DENSE | {"hidden_act": "relu2", "norm_eps": 1e-5},
    "nemotron-nas": DENSE
    | {
        "num_hidden_layers": 3,
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
        ],
    },
    "olmo3": DENSE | {"num_hidden_layers": 4, "sliding_window": 8},
    "openelm": {
        "num_transformer_layers": 2,
        "model_dim": 64,
        "head_dim": 16,
        "ffn_dim_divisor": 16,
        "num_query_heads": [4, 4],
        "num_kv_heads": [2, 2],
        "ffn_multipliers": [1.0, 2.0],
        "rms_norm_eps": 1e-5,
        "max_context_length": 512,
    },
    "phi": DENSE,
    "phi3small": DENSE
    | {
        "dense_attention_every_n_layers": 2,
        "vocab_size": 100_352,  # mlx-lm masks tokens from 100,256 on by their numbers
        "ff_intermediate_size": 96,
        "gegelu_limit": 20.0,
        "layer_norm_epsilon": 1e-5,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 4,
        "blocksparse_vert_stride": 4,
    },
    "pixtral": {
        "text_config": DENSE | {"model_type": "llama", "vocab_size": VOCABULARY_SIZE, "tie_word_embeddings": False}
    },
    "plamo": DENSE | {"n_shared_head": 2},
    "plamo3": DENSE | {"num_hidden_layers": 4, "window_size": 8, "sliding_window_pattern": 2},
    "qwen": DENSE | {"kv_channels": 16},
    "qwen2_vl": {
        "text_config": DENSE | {"model_type": "qwen2", "vocab_size": VOCABULARY_SIZE, "tie_word_embeddings": False}
    },
    "qwen3_vl": {
        "text_config": DENSE | {"model_type": "qwen3", "vocab_size": VOCABULARY_SIZE, "tie_word_embeddings": True}
    },
    "seed_oss": DENSE,
    "smollm3": DENSE | {"num_hidden_layers": 4, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
    "spark2_5": DENSE | {"num_hidden_layers": 4, "sliding_window": 8, "rope_parameters": WINDOW_ROPES},
    "stablelm": DENSE | {"use_qkv_bias": False, "partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5},
    "talkie": DENSE,
    "telechat3": DENSE,
    "youtu_llm": DENSE | LATENT | {"q_lora_rank": 32},
    # keys and values alone: mixtures
    "Klear": EXPERTS
    | {
        "attention_bias": False,
        "mlp_only_layers": [0],
        "num_experts": 4,
        "decoder_sparse_step": 1,
        "n_shared_experts": 1,
    },
    "afmoe": EXPERTS
    | {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_experts": 4,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
        "sliding_window": 8,
    },
    "bailing_moe": EXPERTS | {"num_experts": 4, "num_shared_experts": 1, "first_k_dense_replace": 1, "topk_group": 1},
    "dbrx": {
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "max_seq_len": 512,
    },
    "deepseek": EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "deepseek_v2": DEEPSEEK | {"rope_scaling": DEEPSEEK_ROPE},
    "deepseek_v32": DEEPSEEK | {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 16},
    "dots1": EXPERTS
    | {"first_k_dense_replace": 1, "n_routed_experts": 4, "n_shared_experts": 1, "routed_scaling_factor": 1.0},
    "ernie4_5_moe": EXPERTS
    | {
        "use_bias": False,
        "tie_word_embeddings": True,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
        "moe_num_shared_experts": 1,
    },
    "exaone_moe": EXPERTS
    | {
        "num_experts": 4,
        "num_shared_experts": 1,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "is_moe_layer": [False, True],
    },
    "glm4_moe": EXPERTS
    | {
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "rope_scaling": None,
        "use_qk_norm": True,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "partial_rotary_factor": 0.5,
    },
    "glm4_moe_lite": DEEPSEEK,
    "glm_moe_dsa": DEEPSEEK
    | {
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 16,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "attention_bias": False,
    },
    "granitemoe": DENSE
    | {
        "logits_scaling": 2.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 4.0,
        "residual_multiplier": 0.5,
        "attention_bias": False,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "hunyuan": DENSE
    | {
        "attention_bias": False,
        "moe_topk": 2,
        "num_experts": 4,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "use_cla": False,
        "cla_share_factor": 2,
        "rope_scaling": {"factor": 1.0, "alpha": 1.0, "type": "dynamic"},
    },
    "kimi_k25": {"text_config": DEEPSEEK | {"model_type": "kimi_k2", "vocab_size": VOCABULARY_SIZE}},
    "kimi_vl": {"text_config": DEEPSEEK | {"model_type": "deepseek_v3", "vocab_size": VOCABULARY_SIZE}},
    "laguna": EXPERTS
    | {
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "llama4": {
        "text_config": EXPERTS
        | {
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "vocab_size": VOCABULARY_SIZE,
            "attention_bias": False,
            "attention_chunk_size": 8,
            "interleave_moe_layer_step": 1,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "rope_scaling": None,
            "use_qk_norm": True,
        }
    },
    "longcat_flash": LONGCAT,
    "mellum": EXPERTS
    | {
        "num_experts": 4,
        "tie_word_embeddings": False,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": WINDOW_ROPES,
    },
    "mimo_v2_flash": EXPERTS
    | {
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": 8,
        "n_shared_experts": None,
        "n_routed_experts": 4,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "n_group": 1,
        "topk_group": 1,
        "layernorm_epsilon": 1e-5,
        "v_head_dim": 16,
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
        "partial_rotary_factor": 0.5,
    },
    "minimax": EXPERTS | {"num_local_experts": 4, "shared_intermediate_size": 32, "rotary_dim": 8},
    "minimax_m3_vl": {
        "text_config": EXPERTS
        | {
            "model_type": "minimax_m3",
            "vocab_size": VOCABULARY_SIZE,
            "dense_intermediate_size": 96,
            "shared_intermediate_size": 32,
            "num_local_experts": 4,
            "intermediate_size": 32,
        }
    },
    "mistral4": DEEPSEEK | {"rope_parameters": LLAMA4_ROPE},
    "muse_spark": {
        "text_config": EXPERTS
        | {
            "model_type": "muse_spark_text",
            "vocab_size": VOCABULARY_SIZE,
            "post_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "layer_rope_theta": [10000.0, 10000.0],
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 8,
            "final_logit_softcapping": 20.0,
            "output_multiplier": 1.0,
            "num_local_experts": 4,
            "moe_hidden_size": 32,
        }
    },
    "lfm2-vl": {
        "text_config": DENSE
        | {
            "model_type": "lfm2",
            "vocab_size": VOCABULARY_SIZE,
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": 64,
            "block_ff_dim": 96,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "full_attn_idxs": [1],
        }
    },
    "olmoe": EXPERTS | {"num_experts": 4},
    "phimoe": DENSE
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.0] * 8,
            "short_factor": [1.0] * 8,
            "long_mscale": 1.0,
            "short_mscale": 1.0,
            "original_max_position_embeddings": 256,
        },
    },
    "phixtral": {
        "num_vocab": VOCABULARY_SIZE,
        "model_dim": 64,
        "num_heads": 4,
        "num_layers": 2,
        "rotary_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen2_moe": EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32},
    "qwen3_vl_moe": {
        "text_config": EXPERTS
        | {
            "model_type": "qwen3_moe",
            "vocab_size": VOCABULARY_SIZE,
            "num_experts": 4,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "tie_word_embeddings": False,
        }
    },
    "solar_open": EXPERTS
    | {
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "tie_word_embeddings": False,
        "partial_rotary_factor": 0.5,
    },
    "step3p5": EXPERTS
    | {
        "num_attention_groups": 2,
        "sliding_window": 8,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"],
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
