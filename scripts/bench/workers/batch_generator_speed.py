"""Tokens/s of mlx-lm's BatchGenerator for the same prompts, as many copies of each as completions."""

import time

import mlx.core as mx

from bench.problems import load_problems
from bench.workers.mlx_lm_model import add_lora, encode_chat, load_model, sample_all


def main(
    *,
    model: str,
    data: str | None,
    prompts: int,
    max_tokens: int,
    rows: int,
    prompts_at_once: int,
    group_size: int = 8,
    seed: int = 0,
    lora: bool = False,
) -> dict[str, float]:
    mx.random.seed(seed)
    network, tokenizer = load_model(model)
    if lora:
        add_lora(network, random_b=True)
    network.eval()
    encoded = [
        encode_chat(tokenizer, [{"role": one.role, "content": one.content} for one in problem.messages])
        for problem in load_problems(data, prompts)
        for _ in range(group_size)
    ]
    sample_all(network, tokenizer, encoded[:2], 8, 2)
    began = time.perf_counter()
    completions = sample_all(network, tokenizer, encoded, max_tokens, rows, prompts_at_once)
    return {"speed": sum(map(len, completions)) / (time.perf_counter() - began)}
