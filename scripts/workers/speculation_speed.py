"""Speed of the engine with each way to speculate, in turns in one process, and how many drafts were accepted.

Two tasks: problems, and problems that follow their own solutions, where much of what is sampled has been there before.
"""

import json
import sys
import time
from functools import partial

from job import Job, read_job
from problems import load_problems

from parallm.device.blas import load_blas, set_blas_threads
from parallm.device.streams import DeviceStreams
from parallm.engine.engine import Engine
from parallm.engine.settings import EngineSettings, SpeculationSettings
from parallm.model.adapters.table import AdapterTable
from parallm.model.load import load_shared_model
from parallm.model.settings import ModelSettings
from parallm.types import BASE, GenerationRequest, SamplingParams, TokenEvent

Tokens = tuple[int, ...]


class Bench:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.blas = load_blas(job.device)
        self.model = load_shared_model(ModelSettings(path=job.model))
        self.streams = DeviceStreams(partial(set_blas_threads, self.blas))
        self.ways = {name: SpeculationSettings(method=name) for name in ("none", "ngram")}  # type: ignore[arg-type]
        if job.draft is not None:
            self.ways["draft"] = SpeculationSettings(method="draft", draft_model=job.draft)
        questions = [self.model.tokenizer.encode_chat(one.messages) for one in load_problems(job.data, job.prompts)]
        solutions, _ = self.run("none", questions, 0.0)
        self.tasks = {
            "problems": questions,
            "again": [(*one, *two[:-1], *self.line, *one) for one, two in zip(questions, solutions, strict=True)],
        }

    @property
    def line(self) -> Tokens:
        return self.model.tokenizer.encode_more("\n")

    def run(self, way: str, prompts: list[Tokens], temperature: float) -> tuple[list[Tokens], dict[str, float]]:
        """All completions, and what they took."""
        events: list[TokenEvent] = []
        settings = EngineSettings(max_rows=self.job.rows, prefix_cache=False, speculation=self.ways[way])
        parts = self.model, AdapterTable(), self.streams, settings
        engine = Engine(*parts, emit=events.extend, report=lambda _, error: self.stop(error))
        sampling = SamplingParams(max_tokens=self.job.max_tokens, temperature=temperature, seed=self.job.seed)
        for place, prompt in enumerate(prompts):
            request = GenerationRequest(request_id=str(place), prompt_tokens=prompt, sampling=sampling, model=BASE)
            engine.add(request, False)
        seconds, cpu_seconds = time.perf_counter(), time.process_time()
        while engine.has_work("serving"):
            engine.step("serving")
        seconds, cpu_seconds = time.perf_counter() - seconds, time.process_time() - cpu_seconds
        made = {event.request_id: event.completion.tokens for event in events if event.completion}
        num_tokens = sum(map(len, made.values()))
        counts = engine.speculation
        return [made[str(place)] for place in range(len(prompts))], {
            "tokens_per_second": num_tokens / seconds,
            "tokens_per_cpu_second": num_tokens / cpu_seconds,
            "drafted": counts.num_drafted / num_tokens,
            "accepted": counts.num_accepted / num_tokens,
        }

    def stop(self, error: Exception) -> None:
        raise error

    def measure(self) -> dict[str, object]:
        """Of each task, temperature and way: what each round took; with the same tokens every time."""
        found: dict[str, list[dict[str, float]]] = {}
        for task, prompts in self.tasks.items():
            for kind, temperature in (("greedy", 0.0), ("sampled", 1.0)):
                expected, _ = self.run("none", prompts, temperature)
                for _ in range(self.job.repeats):
                    for way in self.ways:
                        tokens, figures = self.run(way, prompts, temperature)
                        assert tokens == expected, f"{way} samples other tokens than none"
                        found.setdefault(f"{task}/{kind}/{way}", []).append(figures)
        return {"found": found, "blas": self.blas.name}


print(json.dumps(Bench(read_job(sys.argv[1])).measure()))
