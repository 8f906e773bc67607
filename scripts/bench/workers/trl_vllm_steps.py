"""Seconds and peak memory of GRPO steps with TRL's GRPOTrainer and vLLM in its process, completions of ragged lengths.

As `trl_grpo_steps.py`; vLLM samples a step's completions together, with CUDA graphs, torch.compile and its cache of
prefixes. TRL merges the adapter into the base and loads all weights into vLLM before each step. One vLLM serves
the trainers with all numbers of rows, since it takes a minute to start.
"""

import gc
import os
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.generation import vllm_generation

from bench.workers.loads import limits_of_step
from bench.workers.number_words import random_prompts
from bench.workers.trl_grpo_steps import Clock, TimedTrainer, arguments, reward


def main(
    *, model: str, vocabulary: int, warm_up: int, steps: int, rows: Sequence[int], shortest: int, **sizes: int
) -> Iterator[dict[str, Any]]:
    """A result for each number of rows of a training pass. `shortest`: tokens of the shortest completion."""
    torch.set_float32_matmul_precision("high")
    vllm_generation.LLM = SharedLLM(vllm_generation.LLM, rows=sizes["prompts"] * sizes["group_size"])
    for count in rows:
        try:
            result = timed_steps(model, vocabulary, warm_up, steps, shortest, sizes | {"rows": count})
        except Exception as error:  # noqa: BLE001  # whatever it was, other numbers of rows are measured
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        yield {"settings": {"rows": count}, **result}
        gc.collect()
        torch.cuda.empty_cache()
    os._exit(0)  # vLLM's threads may outlive its engine


class SharedLLM:
    """vLLM for all trainers: made by the first one, for as many sequences as a step has."""

    def __init__(self, make: Any, rows: int) -> None:
        self._make, self._rows = make, rows
        self._llm: Any = None

    def __call__(self, **options: Any) -> Any:
        if options["max_num_seqs"] != self._rows:
            raise ValueError(f"TRL asks for {options['max_num_seqs']} sequences at once, expected {self._rows}")
        if self._llm is None:
            self._llm = self._make(**options)
            self._llm.generate_all = self._llm.generate
        return self._llm


def timed_steps(
    model: str, vocabulary: int, warm_up: int, steps: int, shortest: int, sizes: dict[str, int]
) -> dict[str, Any]:
    prompts = random_prompts((warm_up + steps) * sizes["prompts"], sizes["prompt"], vocabulary)
    clock = Clock()
    torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.3,
            "vllm_max_model_length": sizes["prompt"] + sizes["completion"],
            "generation_kwargs": {"ignore_eos": True},
        }
        trainer = TimedTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa"),
            processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
            reward_funcs=[reward],
            args=arguments(warm_up + steps, options, sizes, folder),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
            callbacks=[clock],
        )
        limited = LimitedGeneration(trainer.vllm_generation, (shortest, sizes["completion"]))
        trainer.train()
    generating, sampling = trainer.spent["generate_and_score"], trainer.spent["generate"]
    times: dict[str, list[Any]] = {
        "seconds": clock.seconds,
        "sampling": [both - one for both, one in zip(sampling, limited.publishing, strict=True)],
        "publishing": limited.publishing,
        "scoring": [both - one for both, one in zip(generating, sampling, strict=True)],
        "update": [whole - both for whole, both in zip(clock.seconds, generating, strict=True)],
        "sampled_tokens": trainer.sampled_tokens,
    }
    peak = torch.cuda.max_memory_allocated() / 1e9
    return {name: values[warm_up:] for name, values in times.items()} | {"peak_gb": peak}


class LimitedGeneration:
    """Gives each completion of a step its own limit, and times how the policy gets to vLLM."""

    def __init__(self, generation: Any, bounds: tuple[int, int]) -> None:
        self.publishing: list[float] = []
        self._bounds = bounds
        self._llm, self._sync = generation.llm, generation.sync_weights
        generation.llm.generate, generation.sync_weights = self.generate, self.sync_weights

    def generate(self, prompts: Sequence[Any], sampling_params: Any, **options: Any) -> Any:
        params = []
        for limit in limits_of_step(len(self.publishing) - 1, len(prompts), self._bounds):
            params.append(sampling_params.clone())
            params[-1].max_tokens = limit
        return self._llm.generate_all(prompts, sampling_params=params, **options)

    def sync_weights(self) -> None:
        began = time.perf_counter()
        self._sync()
        torch.cuda.synchronize()
        self.publishing.append(time.perf_counter() - began)
