"""Times of mlx-lm's BatchGenerator on a shape with random weights, part by part: what engine_shape.py is asked for.

Greedy, as ours, with the same weights, prompts, arrivals and number of rows. Prompts of one length are computed 32 at a
time; those of the mixed load 8 at a time, which is mlx-lm's own choice.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from parts import run_parts
from random_load import Arrival, Tokens, random_arrivals, random_prompts, random_storm
from random_model import random_base
from shapes import SHAPES, EngineJob, read_engine_job

PROMPTS_AT_ONCE, MIXED_AT_ONCE = 32, 8
WARM_UP_TOKENS = 8
PREFILL_ROWS, GROUPS, GROUP_SIZE = 32, 4, 8


class Bench:
    def __init__(self, job: EngineJob) -> None:
        self._job = job
        self._shape = SHAPES[job.shape]
        mx.random.seed(0)
        self._base = random_base(self._shape)
        self._base.eval()
        mx.eval(self._base.parameters())

    def parts(self) -> dict[str, Callable[[], dict[str, Any]]]:
        return {
            "b1": partial(self.same_lengths, 1),
            "b64": partial(self.same_lengths, 64),
            "b128": partial(self.same_lengths, 128),
            "prefill": self.prefill,
            "groups": self.groups,
            "mixed": partial(self.served, random_arrivals),
            "storm": partial(self.served, random_storm),
        }

    def same_lengths(self, rows: int) -> dict[str, Any]:
        """Rows that begin and end together."""
        new = self._job.new
        self._complete(self._prompts(rows, 0), WARM_UP_TOKENS)
        seconds, steps = zip(
            *(self._complete(self._prompts(rows, 1 + turn), new) for turn in range(self._job.repeats)), strict=True
        )
        return {"tokens": rows * new, "seconds": seconds, "step_seconds": steps}

    def prefill(self) -> dict[str, Any]:
        """Prompts of which one token each is sampled; tokens of prompts are counted."""
        length = self._job.group_prompt
        turns = [
            self._complete(self._prompts(PREFILL_ROWS, turn, length), 1)[0] for turn in range(1 + self._job.repeats)
        ]
        return {"tokens": PREFILL_ROWS * length, "seconds": turns[1:]}

    def groups(self) -> dict[str, Any]:
        """Groups that share their prompts, which it computes for each row."""
        turns = []
        for turn in range(1 + self._job.repeats):
            prompts = [one for one in self._prompts(GROUPS, turn, self._job.group_prompt) for _ in range(GROUP_SIZE)]
            turns.append(self._complete(prompts, self._job.new)[0])
        return {"tokens": GROUPS * GROUP_SIZE * self._job.new, "seconds": turns[1:]}

    def served(self, arrivals_of: Callable[[EngineJob, int, int], list[Arrival]]) -> dict[str, Any]:
        """Requests of all lengths at the times of their arrivals; before them a quarter of others that warm up."""
        vocabulary = self._shape.vocabulary
        self._serve(arrivals_of(self._job, vocabulary, 1)[: max(1, self._job.requests // 4)])
        arrivals = arrivals_of(self._job, vocabulary, 0)
        began = time.perf_counter()
        ends = self._serve(arrivals)
        return {
            "tokens": sum(one.num_new for one in arrivals),
            "seconds": [time.perf_counter() - began],
            "latency": median(end - began - one.seconds for end, one in zip(ends, arrivals, strict=True)),
        }

    def _prompts(self, rows: int, seed: int, length: int = 0) -> list[Tokens]:
        return random_prompts(self._shape.vocabulary, rows, length or self._job.prompt, seed)

    def _complete(self, prompts: Sequence[Tokens], new: int) -> tuple[float, float]:
        """Seconds of all, and of the median step."""
        units: list[float] = []
        began = time.perf_counter()
        generator = self._generator(len(prompts), PROMPTS_AT_ONCE)
        generator.insert([list(prompt) for prompt in prompts], [new] * len(prompts))
        found = 0
        while True:
            start = time.perf_counter()
            responses = generator.next_generated()
            if not responses:
                break
            units.append(time.perf_counter() - start)
            found += len(responses)
        seconds = time.perf_counter() - began
        generator.close()
        _check(found, len(prompts) * new)
        return seconds, median(units)

    def _serve(self, arrivals: Sequence[Arrival]) -> list[float]:
        """When each of them had its last token."""
        generator = self._generator(self._job.mixed_rows, MIXED_AT_ONCE)
        coming = deque(arrivals)
        ends: dict[int, float] = {}
        num_inserted, num_found = 0, 0
        began = time.perf_counter()
        while len(ends) < len(arrivals):
            while coming and coming[0].seconds <= time.perf_counter() - began:
                one = coming.popleft()
                generator.insert([list(one.prompt)], [one.num_new])
                num_inserted += 1
            if num_inserted == len(ends):
                time.sleep(max(0.0, coming[0].seconds - (time.perf_counter() - began)))
                continue
            responses = generator.next()[1]
            num_found += len(responses)
            ends.update({one.uid: time.perf_counter() for one in responses if one.finish_reason})
        generator.close()
        _check(num_found, sum(one.num_new for one in arrivals))
        return [ends[place] for place in range(len(arrivals))]

    def _generator(self, rows: int, prompts: int) -> BatchGenerator:
        return BatchGenerator(self._base, completion_batch_size=rows, prefill_batch_size=min(rows, prompts))


def _check(found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(f"{found} tokens, expected {expected}")


JOB = read_engine_job(sys.argv[1])
run_parts(JOB.parts, Bench(JOB).parts())
