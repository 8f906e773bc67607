"""Seconds and peak memory of an update with PyTorch, transformers and PEFT: a policy-gradient loss, AdamW.

Logits are computed for completion tokens only, as TRL does; no layer is computed again in the backward. Unless
settings are given, it looks for those with which it is fastest, one after the other, each in one update after one that
warms up. What does not fit into memory, or does not run, is left out.

rows: of a pass. adapters: type of LoRA's matrices. precision: torch.set_float32_matmul_precision. attention: kernels
of scaled_dot_product_attention, `any` leaves the choice to PyTorch. compiled: the loss through torch.compile. has_fla:
whether transformers finds flash-linear-attention's kernels for recurrent layers.
"""

import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from bench.compare import Settings, tune
from bench.workers.loads import SHAPES, Shape

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
GPU_CHOICES: Mapping[str, Sequence[Any]] = {
    "adapters": ("bfloat16",),
    "precision": ("high",),
    "attention": ("flash", "cudnn"),
}
"""Tried beside those of `START`."""
START = {"adapters": "float32", "precision": "highest", "attention": "any", "compiled": False}
"""What one gets without asking for anything."""


class Updates:
    def __init__(self, shape: Shape, rows: int, prompt: int, completion: int) -> None:
        torch.set_default_dtype(torch.bfloat16 if ON_GPU else torch.float32)
        with torch.device(DEVICE):
            base = random_base(shape)
        self._completion = completion
        self._model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
        self._trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        # one token more, so that the inputs have a length that kernels like
        self._tokens = torch.randint(0, shape["vocab_size"], (rows, prompt + completion + 1), device=DEVICE)

    def seconds(self, settings: Settings, repeats: int) -> list[float]:
        """Of each update, after one that warms up."""
        torch.set_float32_matmul_precision(settings["precision"])
        for parameter in self._trained:
            parameter.data = parameter.data.to(getattr(torch, settings["adapters"]))
            parameter.grad = None
        optimizer = torch.optim.AdamW(self._trained, lr=1e-5, fused=ON_GPU)
        loss_of = torch.compile(self._loss) if settings["compiled"] else self._loss
        found: list[float] = []
        for repeat in range(repeats + 1):
            if repeat == 1 and ON_GPU:
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            with kernels(settings["attention"]):
                self._update(loss_of, optimizer, settings["rows"])
            found.append(time.perf_counter() - began)
        return found[1:]

    def _update(self, loss_of: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.AdamW, rows: int) -> None:
        count = self._tokens.shape[0] * self._completion
        for part in self._tokens.split(rows):
            (loss_of(part) / count).backward()
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if ON_GPU:
            torch.cuda.synchronize()

    def _loss(self, part: torch.Tensor) -> torch.Tensor:
        logits = self._model(part[:, :-1], logits_to_keep=self._completion).logits.float()
        logprobs = torch.log_softmax(logits, dim=-1).gather(-1, part[:, -self._completion :, None])[..., 0]
        return -torch.exp(logprobs - logprobs.detach()).sum()


def random_base(shape: Shape) -> PreTrainedModel:
    fields = {name: value for name, value in shape.items() if name != "model_type"}
    if shape["model_type"] == "qwen3_5":
        return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**fields, attn_implementation="sdpa"))
    return LlamaForCausalLM(LlamaConfig(**fields, attn_implementation="sdpa"))


def kernels(name: str) -> AbstractContextManager[None]:
    return sdpa_kernel(KERNELS[name]) if name in KERNELS else nullcontext()


def main(
    *,
    shape: str,
    groups: int,
    group_size: int,
    prompt: int,
    completion: int,
    passes: Sequence[int],
    settings: Settings | None,
    repeats: int = 3,
) -> dict[str, Any]:
    updates = Updates(SHAPES[shape], groups * group_size, prompt, completion)

    def trial(settings: Settings) -> float | None:
        try:
            (seconds,) = updates.seconds(settings, 1)
        except Exception as error:  # noqa: BLE001  # out of memory, or no such kernel: other settings are tried
            print(f"{settings}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
            seconds = None
        gc.collect()
        torch.compiler.reset()
        if ON_GPU:
            torch.cuda.empty_cache()
        return seconds

    best = settings
    if best is None:
        trials = tune({**START, "rows": passes[0]}, {"rows": passes, **(GPU_CHOICES if ON_GPU else {})}, trial)
        # other passes may fit now; what takes a minute to compile comes last
        best = tune(trials[0].settings, {"rows": passes, "compiled": (True,)}, trial)[0].settings
    seconds = updates.seconds(best, repeats)
    peak = torch.cuda.max_memory_allocated() / 1e9 if ON_GPU else None
    has_fla = find_spec("fla") is not None
    return {"seconds": seconds, "peak_gb": peak, "settings": best, "has_fla": has_fla}
