"""Greedy tokens per second of mlx-lm with a draft model (`stream_generate`), and without: one prompt at a time."""

import json
import sys
import time
from typing import Any

from job import Job, read_job
from mlx_lm import stream_generate
from mlx_lm_model import encode_chat, load_model
from problems import load_problems

DRAFTS = 3


def measure(job: Job) -> dict[str, list[dict[str, float]]]:
    model, tokenizer = load_model(job.model)
    draft, _ = load_model(job.draft or job.model)
    problems = load_problems(job.data, job.prompts)
    chats = [[{"role": one.role, "content": one.content} for one in problem.messages] for problem in problems]
    prompts = [encode_chat(tokenizer, chat) for chat in chats]
    ways: dict[str, dict[str, Any]] = {"none": {}, "draft": {"draft_model": draft, "num_draft_tokens": DRAFTS}}
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(job.repeats):
        for way, more in ways.items():
            began, began_cpu, num_tokens = time.perf_counter(), time.process_time(), 0
            for prompt in prompts:
                num_tokens += sum(1 for _ in stream_generate(model, tokenizer, prompt, job.max_tokens, **more))
            seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
            speeds = {"tokens_per_second": num_tokens / seconds, "tokens_per_cpu_second": num_tokens / cpu_seconds}
            found[way].append(speeds)
    return found


print(json.dumps(measure(read_job(sys.argv[1]))))
