"""Seconds and peak memory of LoRA training as mlx-lm does it: its layers, its compiled step, AdamW.

With `compiled: false` its step is not compiled as a whole, which takes minutes for a recurrence that loops over tokens;
with `checkpoint: true` layers are computed again in the backward pass, as by its `--grad-checkpoint`.

Its own loss computes logits for prompts, too, and leaves them out of the sum; `head: completions` is the same loss of
completion tokens alone, which ours and PyTorch's side compute. Unless the settings name the rows of a pass, it looks
for those with which it is fastest; what does not fit into memory is left out.
"""

import gc
import sys
import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.trainer import default_loss, grad_checkpoint
from mlx_lm.tuner.utils import linear_to_lora_layers

from bench.compare import Settings, tune
from bench.workers.loads import SHAPES, Shape
from bench.workers.random_model import random_base

COMPILED_WARM_UP = 2  # the second update finds moments that the first one has made, and is compiled anew


class Updates:
    def __init__(self, shape: Shape, rows: int, prompt: int, completion: int, rank: int) -> None:
        self._model = random_base(shape)
        self._model.freeze()
        modules = [module for layer in self._model.layers for module in layer.named_modules()]
        linears = {name for name, module in modules if isinstance(module, nn.Linear | SwitchLinear)}
        keys = {name for name in linears if not name.endswith(".gate")}  # no router
        linear_to_lora_layers(
            self._model, shape["num_hidden_layers"], {"rank": rank, "scale": 2.0, "dropout": 0.0, "keys": keys}
        )
        self._model.train()
        mx.eval(self._model.parameters())
        self._parameters = dict(tree_flatten(self._model.trainable_parameters()))
        self._calls = {type(layer): type(layer).__call__ for layer in self._model.layers}
        self._prompt, length = prompt, prompt + completion
        # one token more, as mlx-lm pads: then the inputs have the length that its fused attention needs
        self._tokens = mx.array(np.random.default_rng(0).integers(0, shape["vocab_size"], (rows, length + 1), np.int32))
        self._lengths = mx.array([[prompt, length]] * rows)

    def seconds(self, settings: Settings, repeats: int) -> list[float]:
        """Of each update, after those that warm up."""
        model, rows = self._model, settings["rows"]
        # updates that did not fit into memory have left parameters that would be computed again
        model.load_weights([*self._parameters.items()], strict=False)
        for layer_class, call in self._calls.items():
            layer_class.__call__ = call
        if settings.get("checkpoint", False):
            for layer in {type(layer): layer for layer in model.layers}.values():
                grad_checkpoint(layer)
        optimizer = mlx.optimizers.AdamW(learning_rate=1e-5)
        loss_of = default_loss if settings["head"] == "all" else self._completion_loss
        value_and_grad = nn.value_and_grad(model, loss_of)
        state = [model.state, optimizer.state, mx.random.state]
        passes = self._tokens.shape[0] // rows

        def step(batch: mx.array, spans: mx.array, gathered: Any, do_update: bool) -> tuple[mx.array, Any]:
            (loss, _), gradients = value_and_grad(model, batch, spans)
            if gathered is not None:
                gradients = tree_map(lambda one, other: one + other, gradients, gathered)
            if do_update:
                optimizer.update(model, tree_map(lambda one: one / passes, gradients))
                gradients = None
            return loss, gradients

        is_compiled = settings.get("compiled", True)
        if is_compiled:
            step = mx.compile(step, inputs=state, outputs=state)
        warm_up = COMPILED_WARM_UP if is_compiled else 1
        found: list[float] = []
        for repeat in range(repeats + warm_up):
            if repeat == warm_up:
                mx.reset_peak_memory()
            began = time.perf_counter()
            gathered = None
            for place in range(passes):
                part = slice(place * rows, (place + 1) * rows)
                loss, gathered = step(self._tokens[part], self._lengths[part], gathered, place == passes - 1)
                mx.eval(state, loss, gathered)
            found.append(time.perf_counter() - began)
        return found[warm_up:]

    def _completion_loss(self, model: nn.Module, batch: mx.array, lengths: mx.array) -> tuple[mx.array, mx.array]:
        """`default_loss` with the head for the tokens alone that count in it."""
        first = self._prompt - 1
        owner = getattr(model, "language_model", model)
        hidden = owner.model(batch[:, :-1])[:, first:]
        logits = owner.lm_head(hidden) if "lm_head" in owner else owner.model.embed_tokens.as_linear(hidden)
        losses = nn.losses.cross_entropy(logits, batch[:, 1 + first :])
        return losses.astype(mx.float32).sum() / losses.size, mx.array(losses.size)


def main(
    *,
    shape: str,
    groups: int,
    group_size: int,
    prompt: int,
    completion: int,
    passes: Sequence[int],
    settings: Settings,
    repeats: int = 3,
    rank: int = 16,
) -> dict[str, Any]:
    updates = Updates(SHAPES[shape], groups * group_size, prompt, completion, rank)

    def trial(settings: Settings) -> float | None:
        try:
            (seconds,) = updates.seconds(settings, 1)
        except RuntimeError as error:  # out of memory
            print(f"{settings}: {str(error)[:200]}", file=sys.stderr)
            seconds = None
        gc.collect()
        mx.clear_cache()
        return seconds

    if "rows" not in settings:
        settings = tune({**settings, "rows": passes[0]}, {"rows": passes}, trial)[0].settings
    seconds = updates.seconds(settings, repeats)
    return {"seconds": seconds, "peak_gb": mx.get_peak_memory() / 1e9, "settings": settings}
