"""Seconds and peak memory of an update with PyTorch, transformers and PEFT: bfloat16, SDPA, AdamW.

A policy-gradient loss; logits are computed for completion tokens only, as TRL does.
"""

import json
import sys
import time

import torch
from peft import LoraConfig, get_peft_model
from shapes import SHAPES, UpdateJob
from transformers import LlamaConfig, LlamaForCausalLM


def main(job: UpdateJob) -> None:
    shape = SHAPES[job.shape]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fields = {name: value for name, value in shape.config().items() if name != "model_type"}
    config = LlamaConfig(**fields, attn_implementation="sdpa")
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    with torch.device(device):
        base = LlamaForCausalLM(config)
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5)
    rows, length = job.groups * job.group_size, job.prompt + job.completion
    tokens = torch.randint(0, shape.vocabulary, (rows, length), device=device)
    count = rows * job.completion

    def one_step() -> None:
        for part in tokens.split(job.micro_batch):
            logits = model(part[:, :-1], logits_to_keep=job.completion).logits.float()
            logprobs = torch.log_softmax(logits, dim=-1).gather(-1, part[:, -job.completion :, None])[..., 0]
            ratio = torch.exp(logprobs - logprobs.detach())
            (-ratio.sum() / count).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()

    seconds: list[float] = []
    for repeat in range(job.repeats + 1):
        if repeat == 1 and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        one_step()
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None
    print(json.dumps({"seconds": seconds[1:], "peak_gb": peak}))


main(UpdateJob(**json.loads(sys.argv[1])))
