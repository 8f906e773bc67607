"""Make a mixture of experts of the embedded policy, from a seed: each layer's MLP becomes experts that differ a little.

    python scripts/build_mixture.py --out /tmp/mixture --seed 0

The folder has Mixtral's architecture and 9.7M parameters. Each expert is a copy of nano's MLP with noise, the routers
are random (a dense model becomes a mixture by copies in https://arxiv.org/abs/2212.05055, too). So the mixture writes
as nano does before it is trained. Nothing is downloaded, and the folder is not part of the repository:
`tests/learning/test_grown_models.py` shows that it learns arithmetic by GRPO as nano does.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from parallm.device.blas import load_blas
from parallm.device.settings import DeviceSettings

load_blas(DeviceSettings())

import mlx.core as mx  # noqa: E402  a BLAS must be loaded before MLX

from parallm.model.load import NANO  # noqa: E402

EXPERTS, CHOSEN = 16, 2
NOISE = 0.1
"""Standard deviation of an expert's noise over that of the matrix which it copies."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    mx.random.seed(options.seed)
    weights = mx.load(str(NANO / "model.safetensors"))
    config = json.loads((NANO / "config.json").read_text())
    mixed = dict(mixture(weights, config["num_hidden_layers"]))
    config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    config |= {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN}
    save(options.out, mixed, config)
    print(f"{sum(array.size for array in mixed.values()):,} parameters", flush=True)


def mixture(weights: dict[str, mx.array], num_layers: int) -> Iterator[tuple[str, mx.array]]:
    """Yield the arrays of a mixture by their names in mlx-lm's model."""
    for name, array in weights.items():
        parent, is_mlp, layer = name.partition(".mlp.")
        experts = f"{parent}.block_sparse_moe.switch_mlp.{layer}"
        yield (experts, copies(array, EXPERTS)) if is_mlp else (name, array)
    width = weights["model.norm.weight"].size
    for index in range(num_layers):
        yield f"model.layers.{index}.block_sparse_moe.gate.weight", random_router(width, EXPERTS)


def copies(matrix: mx.array, experts: int) -> mx.array:
    """(outputs, inputs) -> (experts, outputs, inputs)"""
    return matrix + mx.random.normal((experts, *matrix.shape)) * NOISE * mx.std(matrix)


def random_router(width: int, experts: int) -> mx.array:
    """Weights (experts, width) that give inputs behind a norm logits with a deviation of about 1."""
    return mx.random.normal((experts, width)) * width**-0.5


def save(folder: Path, weights: dict[str, mx.array], config: dict[str, object]) -> None:
    """Write a folder that mlx-lm loads, with nano's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(NANO / name, folder / name)


if __name__ == "__main__":
    main()
