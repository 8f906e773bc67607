"""Tokens per second of mlx-lm's BatchGenerator for the same prompts, as many copies of each as completions."""

import json
import sys
import time

import mlx.core as mx
from job import Job, read_job
from mlx_lm_model import add_lora, encode_chat, load_model, sample_all
from problems import load_problems


def measure(job: Job) -> dict[str, float]:
    mx.random.seed(job.seed)
    model, tokenizer = load_model(job.model)
    if job.lora:
        add_lora(model, random_b=True)
    model.eval()
    prompts = [
        encode_chat(tokenizer, [{"role": one.role, "content": one.content} for one in problem.messages])
        for problem in load_problems(job.data, job.prompts)
        for _ in range(job.group_size)
    ]
    sample_all(model, tokenizer, prompts[:2], 8, 2)
    began = time.perf_counter()
    completions = sample_all(model, tokenizer, prompts, job.max_tokens, job.rows, job.prompts_at_once)
    seconds = time.perf_counter() - began
    tokens = sum(map(len, completions))
    return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}


print(json.dumps(measure(read_job(sys.argv[1]))))
