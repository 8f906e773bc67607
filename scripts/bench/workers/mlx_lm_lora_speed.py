"""Runs mlx-lm-lora's own `train_grpo` in its own environment and times what it does between two calls of its parts.

Its sampling is replaced by the trajectories of the file, so that an iteration is exactly an update, unless it `samples`
by itself. `rows` completions decode together and share a forward and backward pass; train_grpo itself takes the number
of prompts for that. Imports nothing of ours: it runs where parallm is not installed.
"""

import json
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers
from mlx_lm import load
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm_lora.trainer import grpo_trainer

RANK, SCALE = 16, 2.0


def main(
    *,
    model: str,
    trajectories: str,
    prompts: int,
    rows: int,
    max_tokens: int,
    repeats: int,
    samples: bool,
    seed: int,
    group_size: int = 8,
) -> dict[str, list[float]]:
    mx.random.seed(seed)
    network, tokenizer = load(model)[:2]
    network.set_dtype(mx.float32)
    network.freeze()
    layer = network.layers[0]
    names = [name for name, module in layer.named_modules() if isinstance(module, nn.Linear)]
    linear_to_lora_layers(network, len(network.layers), {"rank": RANK, "scale": SCALE, "dropout": 0.0, "keys": names})
    mx.eval(network.parameters())
    groups = json.loads(Path(trajectories).read_text())[:prompts]
    set_rows(rows)
    clock = Clock(groups, rows, fixed=not samples)
    grpo_trainer.generate_grpo = clock.wrap(grpo_trainer.generate_grpo)
    dataset = [(group[0]["prompt_tokens"], [0], str(place), "") for place, group in enumerate(groups)]
    grpo_trainer.train_grpo(
        model=network,
        ref_model=None,
        tokenizer=tokenizer,
        optimizer=mlx.optimizers.AdamW(learning_rate=1e-6, bias_correction=True),
        train_dataset=dataset,
        val_dataset=None,
        reward_funcs=[clock.reward],
        args=arguments(len(groups), repeats, group_size, max_tokens),
        end_answer_token="",
    )
    clock.stop()
    times = {"seconds": clock.seconds, "rollout": clock.sampling, "tokens": clock.tokens, "trained": clock.tokens}
    return {name: values[1:] for name, values in times.items()}


def set_rows(rows: int) -> None:
    """Completions of one forward and backward pass, which train_grpo takes from the number of prompts in a step."""
    differentiate = grpo_trainer._grpo_value_and_grad

    def with_rows(value_and_grad: Any, model: nn.Module, _: int, **options: Any) -> Any:
        return differentiate(value_and_grad, model, rows, **options)

    grpo_trainer._grpo_value_and_grad = with_rows


def arguments(num_prompts: int, repeats: int, group_size: int, max_tokens: int) -> Any:
    return grpo_trainer.GRPOTrainingArgs(
        batch_size=num_prompts,
        iters=repeats + 1,
        steps_per_report=10**6,
        steps_per_eval=10**6,
        steps_per_save=10**6,
        max_seq_length=4096,
        adapter_file="/dev/null",
        group_size=group_size,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        max_completion_length=max_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        grpo_loss_type="bnpo",
    )


class Clock:
    """Takes the time from one call of the sampling function to the next: sampling, rewards and the update."""

    def __init__(self, groups: list[Any], rows: int, *, fixed: bool) -> None:
        self.groups = groups
        self.rows = rows
        self.fixed = fixed
        self.seconds: list[float] = []
        self.sampling: list[float] = []
        """Seconds of them."""
        self.tokens: list[int] = []
        """Sampled, and trained on."""
        self.began: float | None = None

    def stop(self) -> None:
        if self.began is not None:
            self.seconds.append(time.perf_counter() - self.began)
        self.began = time.perf_counter()

    def wrap(self, sample: Any) -> Any:
        def timed(**options: Any) -> Any:
            self.stop()
            options["batch_size"] = self.rows
            began = time.perf_counter()
            found = self.from_file(options["prompt_tokens"]) if self.fixed else sample(**options)
            mx.eval(found[0])
            self.sampling.append(time.perf_counter() - began)
            self.tokens.append(sum(completion.size for completion in found[0]))
            return found

        return timed

    def from_file(self, prompts: list[Any]) -> Any:
        by_prompt = {tuple(group[0]["prompt_tokens"]): group for group in self.groups}
        completions, texts, indices = [], [], []
        for place, prompt in enumerate(prompts):
            for row in by_prompt[tuple(prompt)]:
                completions.append(mx.array(row["tokens"], dtype=mx.int32))
                texts.append(row["text"])
                indices.append(place)
        mx.eval(completions)
        return completions, texts, indices

    def reward(self, completions: list[str], **_: Any) -> list[float]:
        """Alternates, so that every group has signal and every token is trained on."""
        return [float(place % 2) for place in range(len(completions))]
