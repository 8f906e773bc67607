"""A model as a user of mlx-lm has it, for comparisons. It knows nothing of our engine."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import load
from mlx_lm.generate import BatchGenerator
from mlx_lm.tuner.utils import linear_to_lora_layers

import parallm

RANK, SCALE = 16, 2.0
SIZE_OF_B = 0.01


def load_model(path: str) -> tuple[nn.Module, Any]:
    """mlx-lm's model in float32, the fast type of Linux CPUs, and its tokenizer."""
    folder = Path(parallm.__file__).parent / "model" / "nano" if path == "nano" else path
    model, tokenizer = load(str(folder))[:2]
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model, tokenizer


def add_lora(model: nn.Module, *, random_b: bool) -> None:
    """Freeze the base and put mlx-lm's LoRA layers on all linear layers."""
    model.freeze()
    layer = model.layers[0]
    names = [name for name, module in layer.named_modules() if isinstance(module, nn.Linear | nn.QuantizedLinear)]
    linear_to_lora_layers(model, len(model.layers), {"rank": RANK, "scale": SCALE, "dropout": 0.0, "keys": names})
    if random_b:
        for _, module in model.named_modules():
            if "lora_b" in module:
                module.lora_b = SIZE_OF_B * mx.random.normal(module.lora_b.shape)
    mx.eval(model.parameters())


def encode_chat(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(tokenizer.encode(text, add_special_tokens=False))
    return list(tokenizer.encode("\n".join(message["content"] for message in messages) + "\n"))


def sample_all(
    model: nn.Module, tokenizer: Any, prompts: list[list[int]], max_tokens: int, rows: int, prompts_at_once: int = 8
) -> list[list[int]]:
    """Complete every prompt at temperature 1 with mlx-lm's continuous batching; the end token included."""
    generator = BatchGenerator(
        model,
        max_tokens=max_tokens,
        stop_tokens=[[token] for token in tokenizer.eos_token_ids],
        sampler=lambda logprobs: mx.random.categorical(logprobs),
        completion_batch_size=rows,
        prefill_batch_size=min(prompts_at_once, rows),
    )
    identifiers = generator.insert(prompts, [max_tokens] * len(prompts))
    tokens: dict[int, list[int]] = {identifier: [] for identifier in identifiers}
    while responses := generator.next_generated():
        for response in responses:
            tokens[response.uid].append(response.token)
    generator.close()
    return [tokens[identifier] for identifier in identifiers]
