"""Seconds and peak memory of GRPO steps with TRL's GRPOTrainer and transformers' `generate` on random weights.

bfloat16 with SDPA attention and TF32 on a GPU, no gradient checkpointing, the whole step's completions sampled in one
batch. What is not named here has TRL's default. Runs in an environment without MLX.
"""

import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.workers.number_words import even_share, random_prompts

ON_GPU = torch.cuda.is_available()
GENERATION: dict[str, dict[str, Any]] = {
    "plain": {},
    "static": {"cache_implementation": "static"},
    "continuous": {"use_transformers_continuous_batching": True},
}


def main(*, model: str, vocabulary: int, warm_up: int, steps: int, generation: str, **sizes: int) -> dict[str, Any]:
    torch.set_float32_matmul_precision("high")
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    network = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16 if ON_GPU else torch.float32, attn_implementation="sdpa"
    )
    prompts = random_prompts((warm_up + steps) * sizes["prompts"], sizes["prompt"], vocabulary)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = TimedTrainer(
            model=network,
            processing_class=tokenizer,
            reward_funcs=[reward],
            args=arguments(warm_up + steps, GENERATION[generation], sizes, folder),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
            callbacks=[clock],
        )
        trainer.train()
    generating, sampling = trainer.spent["generate_and_score"], trainer.spent["generate"]
    times: dict[str, list[Any]] = {
        "seconds": clock.seconds,
        "sampling": sampling,
        "scoring": [both - one for both, one in zip(generating, sampling, strict=True)],
        "update": [whole - both for whole, both in zip(clock.seconds, generating, strict=True)],
        "sampled_tokens": trainer.sampled_tokens,
    }
    peak = torch.cuda.max_memory_allocated() / 1e9 if ON_GPU else None
    return {name: values[warm_up:] for name, values in times.items()} | {"peak_gb": peak}


def arguments(steps: int, generation: dict[str, Any], sizes: dict[str, int], folder: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        use_cpu=not ON_GPU,
        bf16=ON_GPU,
        gradient_checkpointing=False,
        max_steps=steps,
        per_device_train_batch_size=sizes["rows"],
        gradient_accumulation_steps=sizes["prompts"] * sizes["group_size"] // sizes["rows"],
        num_generations=sizes["group_size"],
        max_completion_length=sizes["completion"],
        temperature=1.0,
        loss_type="dapo",
        beta=0.0,
        learning_rate=1e-6,
        disable_tqdm=True,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        **generation,
    )


def reward(completions: list[str], **_: Any) -> list[float]:
    return [even_share(text) for text in completions]


class TimedTrainer(GRPOTrainer):
    """TRL's trainer with a clock around its parts, whose results lie on the host at their ends."""

    def __init__(self, **options: Any) -> None:
        self.spent: dict[str, list[float]] = {"generate": [], "generate_and_score": []}
        self.sampled_tokens: list[int] = []
        super().__init__(**options)

    def _generate(self, *arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        result = super()._generate(*arguments, **options)
        self.spent["generate"].append(time.perf_counter() - began)
        self.sampled_tokens.append(sum(map(len, result[1])))
        return result

    def _generate_and_score_completions(self, *arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        result = super()._generate_and_score_completions(*arguments, **options)
        self.spent["generate_and_score"].append(time.perf_counter() - began)
        return result


class Clock(TrainerCallback):
    """Times whole steps: the batch's first pass samples."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if ON_GPU:
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.began)
