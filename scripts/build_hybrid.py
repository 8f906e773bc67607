"""Make a hybrid policy of the embedded one, from a seed: Mamba-2 layers in place of attention, experts beside its MLPs.

    python scripts/build_hybrid.py --out /tmp/hybrid --seed 0

The folder has Granite 4's architecture and 10.1M parameters. The first and the last layer get Mamba-2 mixers, which
learn from nano on the problems and sums of its corpus: first each to give what the attention of its layer gave
(https://arxiv.org/abs/2408.10189), then the whole model to give nano's probabilities. Then half of each MLP becomes
experts, copies with noise (`build_mixture.py`). Nothing is downloaded, and the folder is not part of the repository:
`tests/learning/test_grown_models.py` shows that it learns arithmetic by GRPO as nano does.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

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
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 64,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
"""Mixers learn to stand in for the attention of the first and the last layer more easily than of those between."""
EXPERTS, CHOSEN = 32, 2
SHEET_SHARE = 0.3
"""Share of bare sums among the documents."""
Loss = Callable[[nn.Module, mx.array, mx.array], mx.array]
"""Loss of a model for token ids (B, T) and a mask (B, T) of the tokens that nano learned."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--imitation-steps", type=int, default=50)
    parser.add_argument("--distillation-steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32)
    options = parser.parse_args()
    mx.random.seed(options.seed)
    np.random.seed(options.seed)
    nano, _ = load_model(NANO)
    model, config = hybrid_of_nano()
    tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    source = batches(documents(tokenizer, options.seed, SHEET_SHARE), options.batch_size)
    freeze_all_but_mixers(model)
    train(model, source, options.imitation_steps, 5e-3, lambda *batch: imitation_loss(nano, *batch))
    model.unfreeze()
    train(model, source, options.distillation_steps, 2e-3, lambda *batch: distillation_loss(nano, *batch))
    shared = config["intermediate_size"] // 2
    weights = dict(with_experts(dict(tree_flatten(model.parameters())), shared))
    config |= {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN}
    config |= {"intermediate_size": config["intermediate_size"] - shared, "shared_intermediate_size": shared}
    save(options.out, weights, config)
    print(f"{sum(array.size for array in weights.values()):,} parameters", flush=True)


def hybrid_of_nano() -> tuple[nn.Module, dict[str, Any]]:
    """The model without experts, before its training, and its config.json."""
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
    for mixer in mixers(model).values():
        remember_long(mixer)
    return model, config


def mixers(model: nn.Module) -> dict[int, nn.Module]:
    """The Mamba-2 mixers by the index of their layer."""
    return {index: layer.mamba for index, layer in enumerate(model.layers) if layer.layer_type == "mamba"}


def remember_long(mixer: nn.Module) -> None:
    """Draw time steps and decays as Mamba-2 does (https://arxiv.org/abs/2405.21060): some heads forget slowly.

    With mlx-lm's own initial values no head remembers more than a few tokens.
    """
    heads = (mixer.num_heads,)
    time_steps = mx.exp(mx.random.uniform(math.log(1e-3), math.log(1e-1), heads))
    mixer.dt_bias = time_steps + mx.log(-mx.expm1(-time_steps))  # softplus gives the time steps
    mixer.A_log = mx.log(mx.random.uniform(1, 16, heads))


def freeze_all_but_mixers(model: nn.Module) -> None:
    model.freeze()
    for mixer in mixers(model).values():
        mixer.unfreeze()


def imitation_loss(nano: nn.Module, model: nn.Module, ids: mx.array, _: mx.array) -> mx.array:
    """Sum over the mixers of the squared error on nano's inputs, over the variance of its attention's outputs."""
    mask = ids != PAD
    recurrent = mixers(model)
    hidden = nano.model.embed_tokens(ids)
    loss = mx.array(0.0)
    for index, layer in enumerate(nano.layers):
        normed = layer.input_layernorm(hidden)
        attended = layer.self_attn(normed, "causal")
        if index in recurrent:
            error = recurrent[index](normed, None) - attended
            deviation = attended - attended.mean((0, 1))
            loss += (error.square().mean(-1) * mask).sum() / (deviation.square().mean(-1) * mask).sum()
        hidden = hidden + attended
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return loss


def distillation_loss(nano: nn.Module, model: nn.Module, ids: mx.array, mask: mx.array) -> mx.array:
    """KL divergence in nats per token to learn, from nano to the model."""
    logprobs, target_logprobs = (nn.log_softmax(policy(ids[:, :-1])) for policy in (model, nano))
    divergences = (mx.exp(target_logprobs) * (target_logprobs - logprobs)).sum(-1)
    return (divergences * mask[:, 1:]).sum() / mask.sum()


def train(
    model: nn.Module, source: Iterator[tuple[mx.array, mx.array]], steps: int, peak: float, loss_of: Loss
) -> None:
    """Train in place, with a warm-up and a cosine that ends at a fiftieth of the peak."""
    warm_up = min(20, steps // 2)
    rise, fall = optim.linear_schedule(0, peak, warm_up), optim.cosine_decay(peak, steps - warm_up, peak * 0.02)
    schedule = optim.join_schedules([rise, fall], [warm_up])
    optimizer = optim.AdamW(schedule, betas=[0.9, 0.98], weight_decay=0.01, bias_correction=True)
    value_and_grad = nn.value_and_grad(model, loss_of)
    started = time.time()
    for step in range(steps):
        loss, gradients = value_and_grad(model, *next(source))
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step} loss {loss.item():.4f} {time.time() - started:.0f} s", flush=True)


def with_experts(weights: Mapping[str, mx.array], shared: int) -> Iterator[tuple[str, mx.array]]:
    """Yield the arrays of the hybrid with experts: the first `shared` neurons of each MLP stay, experts copy the rest.

    The weights of the chosen experts sum up to 1, so the model computes what it did but for the noise.
    """
    for name, array in weights.items():
        layer, is_mlp, matrix = name.partition(".mlp.")
        if not is_mlp:
            yield name, array
        elif matrix == "down_proj.weight":
            gate, up = (weights[f"{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up"))
            yield f"{layer}.shared_mlp.input_linear.weight", mx.concatenate([gate[:shared], up[:shared]])
            yield f"{layer}.shared_mlp.output_linear.weight", array[:, :shared]
            copied = {"gate": gate[shared:], "up": up[shared:], "down": array[:, shared:]}
            for part, neurons in copied.items():
                yield f"{layer}.block_sparse_moe.switch_mlp.{part}_proj.weight", copies(neurons, EXPERTS)
            yield f"{layer}.block_sparse_moe.router.layer.weight", random_router(array.shape[0], EXPERTS)


if __name__ == "__main__":
    main()
