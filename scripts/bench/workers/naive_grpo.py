"""The GRPO loop that one would write in an afternoon with mlx-lm alone: what a step of ours is compared with.

Rollouts by BatchGenerator, the whole logits through `nn.value_and_grad`, micro-batches of 16 rows sorted by length, no
refill of groups without signal.
"""

import time
from statistics import fmean
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers
import numpy as np
from mlx.utils import tree_map

from bench.problems import make_environment
from bench.workers.mlx_lm_model import add_lora, encode_chat, load_model, sample_all
from parallm.environment.environment import Environment

MICRO_BATCH_ROWS = 16
SAMPLED_ROWS, PROMPTS_AT_ONCE = 64, 32
"""With which BatchGenerator is about as fast as it gets."""
LEARNING_RATE = 1e-6
GROUP_SIZE = 8


def main(
    *, model: str, data: str | None, prompts: int, max_tokens: int, repeats: int, seed: int
) -> dict[str, list[float]]:
    mx.random.seed(seed)
    network, tokenizer = load_model(model)
    add_lora(network, random_b=False)
    network.eval()
    optimizer = mlx.optimizers.AdamW(
        learning_rate=LEARNING_RATE, betas=[0.9, 0.95], weight_decay=0, bias_correction=True
    )
    environment = make_environment(data, prompts)
    steps = [one_step(network, tokenizer, optimizer, environment, max_tokens) for _ in range(repeats + 1)]
    return {name: [step[name] for step in steps[1:]] for name in steps[0]}


def one_step(
    model: nn.Module, tokenizer: Any, optimizer: Any, environment: Environment, max_tokens: int
) -> dict[str, float]:
    """Sample, score, update. Returns seconds, tokens and the mean reward."""
    began = time.perf_counter()
    problems = [problem for problem in environment.problems("train") for _ in range(GROUP_SIZE)]
    prompts = [
        encode_chat(tokenizer, [{"role": one.role, "content": one.content} for one in problem.messages])
        for problem in problems
    ]
    completions = sample_all(model, tokenizer, prompts, max_tokens, SAMPLED_ROWS, PROMPTS_AT_ONCE)
    sampled = time.perf_counter()
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in completions]
    parts = [environment.score(problem, text) for problem, text in zip(problems, texts, strict=True)]
    rewards = np.array([sum(environment.weights[name] * value for name, value in part.items()) for part in parts])
    grouped = rewards.reshape(-1, GROUP_SIZE)
    advantages = (grouped - grouped.mean(1, keepdims=True)).reshape(-1)
    has_signal = np.repeat(grouped.std(1) > 0, GROUP_SIZE)
    rows = [
        (*row, advantage) for row, advantage in zip(zip(prompts, completions, strict=True), advantages, strict=True)
    ]
    update(model, optimizer, [row for row, keep in zip(rows, has_signal, strict=True) if keep])
    return {
        "rollout": sampled - began,
        "update": time.perf_counter() - sampled,
        "seconds": time.perf_counter() - began,
        "tokens": sum(map(len, completions)),
        "trained": sum(len(tokens) for tokens, keep in zip(completions, has_signal, strict=True) if keep),
        "reward": fmean(rewards),
    }


def update(model: nn.Module, optimizer: Any, rows: list[tuple[list[int], list[int], float]]) -> None:
    """One optimizer step over all rows (prompt, completion, advantage)."""
    if not rows:
        return
    num_tokens = sum(len(completion) for _, completion, _ in rows)
    rows = sorted(rows, key=lambda row: len(row[0]) + len(row[1]))
    value_and_grad = nn.value_and_grad(model, loss)
    total: Any = None
    for start in range(0, len(rows), MICRO_BATCH_ROWS):
        _, gradients = value_and_grad(model, *padded(rows[start : start + MICRO_BATCH_ROWS]), num_tokens)
        mx.eval(gradients)
        total = gradients if total is None else tree_map(lambda one, other: one + other, total, gradients)
    total, _ = mlx.optimizers.clip_grad_norm(total, 1.0)
    optimizer.update(model, total)
    mx.eval(model.trainable_parameters(), optimizer.state)


def padded(rows: list[tuple[list[int], list[int], float]]) -> tuple[mx.array, mx.array, mx.array]:
    """Token ids and loss mask (rows, longest), advantages (rows, 1)."""
    width = max(len(prompt) + len(completion) for prompt, completion, _ in rows)
    tokens, mask = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), np.float32)
    for place, (prompt, completion, _) in enumerate(rows):
        tokens[place, : len(prompt) + len(completion)] = prompt + completion
        mask[place, len(prompt) : len(prompt) + len(completion)] = 1
    return mx.array(tokens), mx.array(mask), mx.array(np.array([[row[2]] for row in rows], np.float32))


def loss(model: nn.Module, tokens: mx.array, mask: mx.array, advantages: mx.array, num_tokens: int) -> mx.array:
    logits = model(tokens[:, :-1])
    chosen = mx.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    logprobs = chosen - mx.logsumexp(logits, axis=-1)
    ratio = mx.exp(logprobs - mx.stop_gradient(logprobs))
    return -(ratio * advantages * mask[:, 1:]).sum() / num_tokens
