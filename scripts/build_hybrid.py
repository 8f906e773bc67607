"""Make a hybrid policy of the embedded one, from a seed: every other layer's attention becomes a Mamba-2 layer.

    python scripts/build_hybrid.py --out /tmp/hybrid --seed 0

The folder has Granite 4's architecture, and everything of nano but the attention of the layers replaced; then all of it
is trained on nano's corpus until the new layers do what the old ones did (as https://arxiv.org/abs/2408.15237 converts
large models). Nothing is downloaded, and the folder is not part of the repository. How it learns arithmetic by GRPO is
measured by `tests/learning/test_grown_models.py`.
"""

import argparse
import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer

from parallm.device.blas import load_blas
from parallm.device.settings import DeviceSettings

load_blas(DeviceSettings())

import mlx.core as mx  # noqa: E402  a BLAS must be loaded before MLX
import mlx.nn as nn  # noqa: E402
from build_nano import accuracy_by_level, train  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.models.granitemoehybrid import Model, ModelArgs  # noqa: E402

from parallm.model.load import NANO  # noqa: E402
from parallm.model.patches.recurrence import install_recurrence  # noqa: E402

RECURRENT = {
    "layer_types": ["mamba", "attention", "mamba", "attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 64,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    options = parser.parse_args()
    mx.random.seed(options.seed)
    model, config = hybrid_of_nano()
    tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    print(f"{sum(array.size for _, array in tree_flatten(model.parameters())):,} parameters", flush=True)
    train(model, tokenizer, options.seed, options.steps, options.batch_size, options.learning_rate)
    save(options.out, model, config)
    print("before RL, greedy:", accuracy_by_level(model, tokenizer, 0.0, 500), flush=True)


def hybrid_of_nano() -> tuple[nn.Module, dict[str, object]]:
    """The model before its training, and its config.json."""
    config = json.loads((NANO / "config.json").read_text()) | RECURRENT
    config |= {
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "attention_multiplier": config["head_dim"] ** -0.5,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
    }
    model = Model(ModelArgs.from_dict(config))
    model.load_weights(str(NANO / "model.safetensors"), strict=False)
    install_recurrence(model)
    return model, config


def save(folder: Path, model: nn.Module, config: dict[str, object]) -> None:
    """Write a folder that mlx-lm loads."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(NANO / name, folder / name)


if __name__ == "__main__":
    main()
