"""Seconds and peak memory of LoRA training as mlx-lm does it: its layers, its loss, its compiled step, AdamW."""

import json
import sys
import time
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.tuner.trainer import default_loss
from mlx_lm.tuner.utils import linear_to_lora_layers
from shapes import SHAPES, UpdateJob

WARM_UP = 2  # the second update finds moments that the first one has made, and is compiled anew


def main(job: UpdateJob) -> None:
    shape = SHAPES[job.shape]
    model = Model(ModelArgs.from_dict(shape.config()))
    model.set_dtype(mx.bfloat16 if mx.default_device() != mx.Device(mx.cpu) else mx.float32)
    model.freeze()
    keys = [name for name, module in model.layers[0].named_modules() if isinstance(module, nn.Linear)]
    linear_to_lora_layers(model, shape.layers, {"rank": 16, "scale": 2.0, "dropout": 0.0, "keys": keys})
    optimizer = mlx.optimizers.AdamW(learning_rate=1e-5)
    model.train()
    mx.eval(model.parameters())
    rows, length = job.groups * job.group_size, job.prompt + job.completion
    # one token more, as mlx-lm pads: then the inputs have the length that its fused attention needs
    tokens = mx.array(np.random.default_rng(0).integers(0, shape.vocabulary, (rows, length + 1), np.int32))
    lengths = mx.array([[job.prompt, length]] * rows)
    value_and_grad = nn.value_and_grad(model, default_loss)
    state = [model.state, optimizer.state, mx.random.state]
    passes = rows // job.micro_batch

    @partial(mx.compile, inputs=state, outputs=state)
    def step(batch: mx.array, spans: mx.array, gathered: Any, do_update: bool) -> tuple[mx.array, Any]:
        (loss, _), gradients = value_and_grad(model, batch, spans)
        if gathered is not None:
            gradients = tree_map(lambda one, other: one + other, gradients, gathered)
        if do_update:
            optimizer.update(model, tree_map(lambda one: one / passes, gradients))
            gradients = None
        return loss, gradients

    seconds: list[float] = []
    for repeat in range(job.repeats + WARM_UP):
        if repeat == WARM_UP:
            mx.reset_peak_memory()
        began = time.perf_counter()
        gathered = None
        for place in range(passes):
            part = slice(place * job.micro_batch, (place + 1) * job.micro_batch)
            loss, gathered = step(tokens[part], lengths[part], gathered, place == passes - 1)
            mx.eval(state, loss, gathered)
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"seconds": seconds[WARM_UP:], "peak_gb": mx.get_peak_memory() / 1e9}))


main(UpdateJob(**json.loads(sys.argv[1])))
