"""Make a hybrid policy of the embedded one, from a seed: Mamba-2 layers in place of attention, experts beside its MLPs.

    python scripts/build_hybrid.py --out /tmp/hybrid --seed 0

The folder has Granite 4's architecture and 9.9M parameters. Half of the layers get Mamba-2 mixers, which learn from
nano itself on the prompts and answers of its corpus: first each to do what the attention of its layer did
(https://arxiv.org/abs/2408.10189), then together to give nano's probabilities. Then half of each MLP becomes experts,
copies with noise (`build_mixture.py`). Nothing is downloaded, and the folder is not part of the repository:
`tests/learning/test_grown_models.py` shows that it learns arithmetic by GRPO as nano does.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tokenizers import Tokenizer

from parallm.device.blas import load_blas
from parallm.device.settings import DeviceSettings

load_blas(DeviceSettings())

import mlx.core as mx  # noqa: E402  a BLAS must be loaded before MLX
import mlx.nn as nn  # noqa: E402
import mlx.optimizers as optim  # noqa: E402
import numpy as np  # noqa: E402
from build_mixture import copies, random_router, save  # noqa: E402
from build_nano import PAD, batches, documents  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.models.granitemoehybrid import Model, ModelArgs  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402

from parallm.model.load import NANO  # noqa: E402
from parallm.model.patches.recurrence import install_recurrence  # noqa: E402

RECURRENT = {
    "layer_types": ["mamba", "attention", "attention", "mamba"],
    "mamba_n_heads": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 64,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
EXPERTS, CHOSEN = 32, 2
SHEETS = 0.2
"""Share of bare sums among the documents."""
Loss = Callable[[nn.Module, mx.array, mx.array], mx.array]
"""Of a model, token ids (B, T) and the mask (B, T) of tokens that nano learned."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--imitation-steps", type=int, default=120)
    parser.add_argument("--distillation-steps", type=int, default=160)
    parser.add_argument("--batch-size", type=int, default=48)
    options = parser.parse_args()
    mx.random.seed(options.seed)
    np.random.seed(options.seed)
    nano, _ = load_model(NANO)
    model, config = hybrid_of_nano()
    tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    source = batches(documents(tokenizer, options.seed, SHEETS), options.batch_size)
    train(model, source, options.imitation_steps, 5e-3, lambda *batch: imitation_loss(nano, *batch))
    train(model, source, options.distillation_steps, 2e-3, lambda *batch: distillation_loss(nano, *batch))
    weights = dict(with_experts(dict(tree_flatten(model.parameters())), config["intermediate_size"] // 2))
    config |= {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN}
    config |= dict.fromkeys(("intermediate_size", "shared_intermediate_size"), config["intermediate_size"] // 2)
    save(options.out, weights, config)
    print(f"{sum(array.size for array in weights.values()):,} parameters", flush=True)


def hybrid_of_nano() -> tuple[nn.Module, dict[str, object]]:
    """The model without experts, in which only the new layers are to be trained, before that; and its config.json."""
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
    model.freeze()
    for layer in recurrent_layers(model).values():
        layer.mamba.unfreeze()
    return model, config


def recurrent_layers(model: nn.Module) -> dict[int, nn.Module]:
    return {index: layer for index, layer in enumerate(model.layers) if layer.layer_type == "mamba"}


def imitation_loss(nano: nn.Module, model: nn.Module, ids: mx.array, _: mx.array) -> mx.array:
    """Sum over the new layers of their squared error on nano's inputs, over the variance of its attention's outputs."""
    mask = ids != PAD
    recurrent = recurrent_layers(model)
    hidden = nano.model.embed_tokens(ids)
    losses = []
    for index, layer in enumerate(nano.layers):
        normed = layer.input_layernorm(hidden)
        attended = layer.self_attn(normed, "causal")
        if index in recurrent:
            error = recurrent[index].mamba(normed, None) - attended
            deviation = attended - attended.mean((0, 1))
            losses.append((error.square().mean(-1) * mask).sum() / (deviation.square().mean(-1) * mask).sum())
        hidden = hidden + attended
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return sum(losses, start=mx.array(0.0))


def distillation_loss(nano: nn.Module, model: nn.Module, ids: mx.array, mask: mx.array) -> mx.array:
    """KL per token to learn, from nano to the model."""
    logprobs, wanted = (nn.log_softmax(one(ids[:, :-1])) for one in (model, nano))
    divergences = (mx.exp(wanted) * (wanted - logprobs)).sum(-1)
    return (divergences * mask[:, 1:]).sum() / mask.sum()


def train(
    model: nn.Module, source: Iterator[tuple[mx.array, mx.array]], steps: int, peak: float, loss_of: Loss
) -> None:
    """Train in place, with a warm-up and a cosine that ends at a fiftieth of the peak."""
    warm_up = min(20, steps // 2)
    rise, fall = optim.linear_schedule(0, peak, warm_up), optim.cosine_decay(peak, steps - warm_up, peak * 0.02)
    optimizer = optim.AdamW(optim.join_schedules([rise, fall], [warm_up]), betas=[0.9, 0.98], bias_correction=True)
    value_and_grad = nn.value_and_grad(model, loss_of)
    for step in range(steps):
        loss, gradients = value_and_grad(model, *next(source))
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


def with_experts(weights: Mapping[str, mx.array], shared: int) -> Iterator[tuple[str, mx.array]]:
    """Yield the arrays of the hybrid with experts: the first `shared` neurons of each MLP stay, the rest is copied.

    As the weights of the chosen experts sum up to 1, the model computes what it did but for the noise.
    """
    for name, array in weights.items():
        if ".mlp." not in name:
            yield name, array
        elif name.endswith("down_proj.weight"):
            layer = name.partition(".mlp.")[0]
            gate, up = (weights[f"{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up"))
            yield f"{layer}.shared_mlp.input_linear.weight", mx.concatenate([gate[:shared], up[:shared]])
            yield f"{layer}.shared_mlp.output_linear.weight", array[:, :shared]
            experts = {"gate": gate[shared:], "up": up[shared:], "down": array[:, shared:]}
            for part, matrix in experts.items():
                yield f"{layer}.block_sparse_moe.switch_mlp.{part}_proj.weight", copies(matrix, EXPERTS)
            yield f"{layer}.block_sparse_moe.router.layer.weight", random_router(array.shape[0], EXPERTS)


if __name__ == "__main__":
    main()
