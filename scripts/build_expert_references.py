"""Write tests/model/adapters/expert_references.json: log-probs of PEFT with adapters of experts, its own and ours.

    python -m venv VENV && VENV/bin/pip install torch transformers==5.23.0 peft==0.21.2
    VENV/bin/python scripts/build_expert_references.py .venv/bin/python

The argument is an interpreter with ParaLLM: it writes an adapter of each base in PEFT's format, which PEFT then loads
here. A reference has a config, shapes of weights and of PEFT's own adapter, the arrays of both from seeds, and what
PEFT makes of a text.
"""

import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "model" / "adapters"))

from expert_cases import REFERENCES, TOKENS, write_adapter, write_base  # noqa: E402

DIGITS = 7
SIZES = {
    "vocab_size": 385,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
MIXTURE = SIZES | {"num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True}
CASES: dict[str, dict[str, Any]] = {
    "mixtral": SIZES | {"num_local_experts": 4},
    "qwen2_moe": MIXTURE
    | {"norm_topk_prob": False, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen3_moe": MIXTURE | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "olmoe": SIZES | {"num_experts": 4, "norm_topk_prob": True},
    "gpt_oss": SIZES
    | {
        "num_local_experts": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 150_000.0},
    },
    "granitemoe": SIZES | {"num_local_experts": 4, "logits_scaling": 2.0, "attention_multiplier": 0.25},
    "lfm2_moe": MIXTURE
    | {
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 0,
        "tie_word_embeddings": True,
        "conv_L_cache": 3,
        "use_expert_bias": True,
    },
    "glm4_moe": MIXTURE
    | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 0},
}
ROPE = {"rope_theta": 10_000.0, "rope_scaling": None}
OF_HUB = {
    **dict.fromkeys(("qwen2_moe", "olmoe", "granitemoe"), ROPE),
    "qwen3_moe": ROPE | {"num_experts": 4},
    "lfm2_moe": {"rope_theta": 10_000.0},
    "gpt_oss": {"rope_theta": 150_000.0},
    "glm4_moe": ROPE | {"partial_rotary_factor": 0.5},
}
"""Keys that configs on the hub have for mlx-lm, and that transformers no longer writes."""
EXPORT = """
import sys
import parallm.device.blas as blas
from parallm.device.settings import DeviceSettings
blas.load_blas(DeviceSettings())
from tests.model.adapters.test_expert_files import export
export(sys.argv[1], sys.argv[2])
"""


def main() -> None:
    warnings.filterwarnings("ignore")
    cases = {}
    for name in CASES:
        try:
            with tempfile.TemporaryDirectory() as folder:
                cases[name] = reference(name, Path(folder), sys.argv[1])
            sys.stdout.write(f"{name}\n")
        except Exception as error:  # noqa: BLE001  # the others are written
            sys.stdout.write(f"{name}: {type(error).__name__}: {error}\n")
    REFERENCES.write_text(json.dumps(cases, indent=1) + "\n")


def reference(name: str, folder: Path, interpreter: str) -> dict[str, Any]:
    config = AutoConfig.for_model(name, **CASES[name])
    config.dtype = "float32"
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    plain.save_pretrained(folder / "plain")
    weights = shapes_of(folder / "plain" / "model.safetensors")
    written = json.loads((folder / "plain" / "config.json").read_text()) | OF_HUB.get(name, {})
    case: dict[str, Any] = {"config": written, "weights": weights}
    base = write_base(case, folder / "base")
    case["base"] = logprobs(load(base))
    own = peft.get_peft_model(load(base), lora(name))
    own.save_pretrained(folder / "own")
    saved = json.loads((folder / "own" / "adapter_config.json").read_text())
    saved["base_model_name_or_path"] = ""
    case["adapter"] = {"config": saved, "tensors": shapes_of(folder / "own" / "adapter_model.safetensors")}
    case["with_theirs"] = with_adapter(base, write_adapter(case["adapter"], folder / "theirs"))
    subprocess.run(
        [interpreter, "-c", EXPORT, str(write_base(case, folder / "mlx", for_mlx=True)), str(folder / "ours")],
        check=True,
        cwd=ROOT,
    )
    case["with_ours"] = with_adapter(base, folder / "ours")
    return case


def lora(name: str) -> peft.LoraConfig:
    block = {"granitemoe": "block_sparse_moe", "lfm2_moe": "feed_forward"}.get(name, "mlp")
    return peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=["o_proj" if name != "lfm2_moe" else "out_proj"],
        target_parameters=[f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj"],
        rank_pattern={"down_proj": 2},
        task_type="CAUSAL_LM",
    )


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def with_adapter(base: Path, folder: Path) -> list[list[float]]:
    """Log-probs with an adapter, all of whose tensors PEFT has taken."""
    model = load(base)
    adapted = peft.PeftModel.from_pretrained(model, folder).eval()
    present = {name for name, _ in adapted.named_parameters() if ".lora_" in name}
    stored = {name.replace(".weight", ".default.weight") for name in shapes_of(folder / "adapter_model.safetensors")}
    if present != stored:
        raise ValueError(f"PEFT has other tensors: {sorted(present ^ stored)[:4]}")
    return logprobs(adapted)


def logprobs(model: Any) -> list[list[float]]:
    """Of each token of the text but the first (one number), and of all tokens at its end."""
    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([TOKENS])).logits[0].double(), dim=-1)
    own = [round(float(rows[index, token]), DIGITS) for index, token in enumerate(TOKENS[1:])]
    return [own, [round(float(value), DIGITS) for value in rows[-1]]]


def shapes_of(path: Path) -> dict[str, list[int]]:
    header = path.read_bytes()
    length = int.from_bytes(header[:8], "little")
    entries = json.loads(header[8 : 8 + length])
    return {name: entry["shape"] for name, entry in sorted(entries.items()) if name != "__metadata__"}


if __name__ == "__main__":
    main()
