"""Write tests/learner/hybrids/references: logits and gradients of transformers for tiny hybrids, float32 on a CPU.

    python -m venv VENV && VENV/bin/pip install torch transformers==5.23.0
    VENV/bin/python scripts/build_hybrid_references.py

A reference has config.json, the shapes of the weights with their seed, a prompt with its completions, the logits of
each whole row, and the gradients of a weighted sum of the completions' log-probs with respect to every linear layer,
each times a vector. It needs nothing of ours.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "learner" / "hybrids"))

from reference_folders import REFERENCES, directions, loss_weights, make_weights, short_name  # noqa: E402

VOCABULARY, DIGITS = 32, 7
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128}
SIZES |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_theta": 10000.0}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
DELTA |= {"linear_value_head_dim": 16, "linear_conv_kernel_dim": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": []}
EXPERTS |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "norm_topk_prob": True}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_d_conv": 4}
MAMBA |= {"mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False, "mamba_chunk_size": 16}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": SIZES
    | DELTA
    | {"full_attention_interval": 2, "rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}},
    "qwen3_next": SIZES
    | DELTA
    | EXPERTS
    | {"full_attention_interval": 2, "rope_parameters": ROPE, "partial_rotary_factor": 0.5},
    "olmo_hybrid": SIZES
    | DELTA
    | SPECIAL
    | {"linear_num_value_heads": 2, "linear_allow_neg_eigval": True, "attention_bias": False}
    | {"layer_types": ["linear_attention", "full_attention"]},
    "mamba2": {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings")}
    | SPECIAL
    | {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "conv_kernel": 4, "expand": 2, "use_bias": False}
    | {"use_conv_bias": True, "layer_norm_epsilon": 1e-5, "rms_norm": True, "chunk_size": 16}
    | {"time_step_limit": [0.001, 100.0]},
    "nemotron_h": {name: value for name, value in SIZES.items() if name != "num_hidden_layers"}
    | SPECIAL
    | {
        "hybrid_override_pattern": "M*-M",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
    }
    | {"conv_kernel": 4, "use_conv_bias": True, "use_bias": False, "mamba_proj_bias": False, "attention_bias": False}
    | {"mlp_bias": False, "layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2", "chunk_size": 16},
    "granitemoehybrid": SIZES
    | MAMBA
    | SPECIAL
    | {"embedding_multiplier": 2.0, "attention_multiplier": 0.25, "logits_scaling": 2.0, "residual_multiplier": 0.5}
    | {"layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2}
    | {"shared_intermediate_size": 24, "attention_bias": False, "position_embedding_type": "rope"},
    "falcon_h1": SIZES
    | MAMBA
    | SPECIAL
    | {"mamba_d_ssm": 64, "mamba_rms_norm": False, "ssm_multipliers": [0.9, 1.2, 1.1, 0.8, 1.3]}
    | {"mlp_multipliers": [1.2, 0.8], "embedding_multiplier": 1.3, "attention_in_multiplier": 1.0}
    | {"attention_out_multiplier": 1.2, "ssm_in_multiplier": 1.1, "ssm_out_multiplier": 0.9, "key_multiplier": 1.0}
    | {"lm_head_multiplier": 0.8, "projectors_bias": False, "attention_bias": False, "mlp_bias": False},
    "lfm2": SIZES
    | SPECIAL
    | {"norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "block_dim": 32, "block_ff_dim": 48}
    | {"block_multiple_of": 16, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False}
    | {"full_attn_idxs": [1], "tie_embedding": True, "tie_word_embeddings": True},
}
OF_MLX_LM = {
    "qwen3_5_text": {"model_type": "qwen3_5"},
    "mamba2": {"intermediate_size": 64, "time_step_rank": 2},
}
"""Fields that mlx-lm reads in another form.

Not covered: Mamba2 of several groups, which mlx-lm normalises as one, and of Falcon-H1 key_multiplier, which mlx-lm
does not apply, and attention_in_multiplier, which it does not apply to values."""
RENAMED = {
    "olmo_hybrid": {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
}
"""Parts of tensors' names that mlx-lm calls otherwise."""
PROMPT, COMPLETIONS = 14, (27, 5)
"""Tokens; the longer row crosses the border of a chunk of every size."""


def build(name: str, seed: int) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **CONFIGS[name]), dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # names and config.json as checkpoints have them
        file = Path(folder) / "model.safetensors"
        config = json.loads((Path(folder) / "config.json").read_text()) | CONFIGS[name] | OF_MLX_LM.get(name, {})
        shapes = {key: list(array.shape) for key, array in load_file(file).items()}
        reference: dict[str, Any] = {"files": {"config.json": config}, "seed": seed, "tensors": shapes}
        reference["renamed"] = RENAMED.get(name, {})
        save_file({key: torch.tensor(array) for key, array in make_weights(reference).items()}, file)
        model = type(model).from_pretrained(folder, config=model.config, dtype=torch.float32).eval()
    chance = np.random.RandomState(seed)
    prompt = chance.randint(3, VOCABULARY, PROMPT).tolist()
    completions = [chance.randint(3, VOCABULARY, count).tolist() for count in COMPLETIONS]
    loss, logits = torch.zeros(()), []
    for place, completion in enumerate(completions):
        row = model(torch.tensor([prompt + completion]), use_cache=False).logits[0]
        logprobs = torch.log_softmax(row[len(prompt) - 1 : -1], dim=-1)
        chosen = logprobs.gather(-1, torch.tensor(completion)[:, None])[:, 0]
        loss = loss + (chosen * torch.tensor(loss_weights(len(completion), place))).sum()
        logits.append(rounded(row))
    loss.backward()
    linears = {f"{key}.weight": module for key, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    own = {short_name(key): module.weight.grad for key, module in linears.items() if "layers." in key}
    along = directions({key: tuple(gradient.shape) for key, gradient in own.items()})
    products = {key: rounded(gradient @ torch.tensor(along[key])) for key, gradient in own.items()}
    return reference | {"prompt": prompt, "completions": completions, "logits": logits, "gradients": products}


def rounded(values: torch.Tensor) -> Any:
    if values.ndim:
        return [rounded(value) for value in values]
    return float(f"{float(values.detach()):.{DIGITS}g}")


if __name__ == "__main__":
    REFERENCES.mkdir(exist_ok=True)
    for seed, name in enumerate(CONFIGS):
        text = json.dumps(build(name, seed))
        (REFERENCES / f"{name}.json").write_text(text + "\n")
        print(f"{name}: {len(text)} bytes")
