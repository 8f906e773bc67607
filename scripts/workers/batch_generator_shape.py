"""Times of mlx-lm's BatchGenerator on a shape with random weights, part by part: what engine_shape.py is asked for.

Greedy, as ours, with the same weights, prompts and arrivals. Unless the job gives its settings, each part first looks
for those with which it is fastest, one setting after the other, on a shorter load where the load is long; it prints
what it tried.

rows: completions that decode together. prompts: that are computed together. chunk: tokens of each that are computed in
one forward. copies: a prompt that several rows have is computed once, and its keys and values are handed in for each.
"""

import gc
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache
from parts import run_parts
from random_load import Arrival, Tokens, random_arrivals, random_prompts, random_storm
from random_model import random_base
from shapes import SHAPES, EngineJob, read_engine_job
from tuning import Settings, Trial, tune

from parallm.engine.step_failures import is_out_of_memory

PREFILL_ROWS, GROUPS, GROUP_SIZE = 32, 4, 8
DEFAULTS = {"prompts": 8, "chunk": 2048}
"""Of BatchGenerator."""
AT_ONCE = (1, 4, 8, 16, 32)
CHUNKS = (128, 512, 2048)
SERVED_CHOICES: Mapping[str, Sequence[int]] = {"prompts": (1, 8, 32), "chunk": (512, 2048)}
TUNED_SHARE = 4
"""A long load is tuned on so many times fewer requests."""


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
            "mixed": partial(self.served, random_arrivals, tuned_share=TUNED_SHARE),
            "storm": partial(self.served, random_storm, tuned_share=1),
        }

    def same_lengths(self, rows: int) -> dict[str, Any]:
        """Rows that begin and end together."""
        return self._tuned_turns(rows, 1, self._job.prompt, self._job.new, {"prompts": _up_to(rows)})

    def prefill(self) -> dict[str, Any]:
        """Prompts of which one token each is sampled; tokens of prompts are counted."""
        length = self._job.group_prompt
        choices = {"prompts": AT_ONCE, "chunk": CHUNKS}
        return self._tuned_turns(PREFILL_ROWS, 1, length, 1, choices) | {"tokens": PREFILL_ROWS * length}

    def groups(self) -> dict[str, Any]:
        """Groups that share their prompts, from the first prompt token to the last sampled one."""
        choices = {"prompts": (8, 32), "chunk": CHUNKS, "copies": (False, True)}
        return self._tuned_turns(GROUPS, GROUP_SIZE, self._job.group_prompt, self._job.new, choices)

    def served(
        self, arrivals_of: Callable[[EngineJob, int, int], list[Arrival]], *, tuned_share: int
    ) -> dict[str, Any]:
        """Requests of all lengths at the times of their arrivals; before them a quarter of others that warm up.

        How many rows decode together shows on the whole load only, so that is tried on it, and the fastest counts. What
        does not fit into memory is left out.
        """
        job, vocabulary = self._job, self._shape.vocabulary
        start = job.peer_settings or {**DEFAULTS, "rows": job.peer_rows[0]}
        self._serve(arrivals_of(job, vocabulary, 1)[: max(1, job.requests // 4)], start)
        short = arrivals_of(replace(job, requests=max(1, job.requests // tuned_share)), vocabulary, 2)
        trials = self._tried(start, SERVED_CHOICES, lambda settings: self._serve(short, settings)[0])
        arrivals = arrivals_of(job, vocabulary, 0)
        latencies: dict[float, list[float]] = {}

        def whole(settings: Settings) -> float | None:
            try:
                seconds, found = self._serve(arrivals, settings)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                seconds = None
            else:
                latencies[seconds] = found
            gc.collect()
            mx.clear_cache()
            return seconds

        best = trials[0].settings if trials else start
        by_rows = tune(best, {} if job.peer_settings else {"rows": job.peer_rows}, whole)
        seconds = by_rows[0].seconds
        assert seconds is not None
        return {
            "tokens": sum(one.num_new for one in arrivals),
            "seconds": [seconds],
            "latency": median(latencies[seconds]),
            "settings": by_rows[0].settings,
            "tried": [[trial.settings, trial.seconds] for trial in (*trials, *by_rows)],
        }

    def _tuned_turns(
        self, prompts: int, rows_each: int, length: int, new: int, choices: Mapping[str, Sequence[Any]]
    ) -> dict[str, Any]:
        """`repeats` turns with the best of `choices`, each of them tried in one turn after one that warms up."""
        rows = prompts * rows_each
        turn = iter(range(1_000_000))

        def timed(settings: Settings) -> tuple[float, float]:
            distinct = random_prompts(self._shape.vocabulary, prompts, length, next(turn))
            return self._complete([one for one in distinct for _ in range(rows_each)], new, settings)

        own = {"prompts": min(rows, DEFAULTS["prompts"]), "rows": rows} | ({"copies": False} if rows_each > 1 else {})
        start = self._job.peer_settings or {**DEFAULTS, **own}
        timed(start)
        trials = self._tried(start, choices, lambda settings: timed(settings)[0])
        best = trials[0].settings if trials else start
        seconds, steps = zip(*(timed(best) for _ in range(self._job.repeats)), strict=True)
        return {
            "tokens": rows * new,
            "seconds": seconds,
            "step_seconds": steps,
            "settings": best,
            "tried": [[trial.settings, trial.seconds] for trial in trials],
        }

    def _tried(
        self, start: Settings, choices: Mapping[str, Sequence[Any]], seconds_of: Callable[[Settings], float]
    ) -> list[Trial]:
        """Fastest first; none where the job gives the settings."""
        return [] if self._job.peer_settings else tune(start, choices, seconds_of)

    def _complete(self, prompts: Sequence[Tokens], new: int, settings: Settings) -> tuple[float, float]:
        """Seconds of all, and of the median step."""
        units: list[float] = []
        began = time.perf_counter()
        generator = self._generator(settings)
        self._insert(generator, prompts, new, settings)
        num_found = 0
        while True:
            start = time.perf_counter()
            responses = generator.next_generated()
            if not responses:
                break
            units.append(time.perf_counter() - start)
            num_found += len(responses)
        seconds = time.perf_counter() - began
        generator.close()
        _check(num_found, len(prompts) * new)
        return seconds, median(units)

    def _insert(self, generator: BatchGenerator, prompts: Sequence[Tokens], new: int, settings: Settings) -> None:
        limits = [new] * len(prompts)
        if not settings.get("copies"):
            generator.insert([list(prompt) for prompt in prompts], limits)
            return
        caches = {prompt: self._computed(prompt, settings["chunk"]) for prompt in dict.fromkeys(prompts)}
        generator.insert(
            [[prompt[-1]] for prompt in prompts],
            limits,
            caches=[caches[prompt] for prompt in prompts],  # it copies them when it puts rows together
            all_tokens=[list(prompt[:-1]) for prompt in prompts],
        )

    def _computed(self, prompt: Tokens, chunk: int) -> list[Any]:
        """Keys and values of a prompt but for its last token."""
        cache = make_prompt_cache(self._base)
        for first in range(0, len(prompt) - 1, chunk):
            self._base(mx.array([prompt[first : min(first + chunk, len(prompt) - 1)]]), cache=cache)
            mx.eval([one.state for one in cache])
        return list(cache)

    def _serve(self, arrivals: Sequence[Arrival], settings: Settings) -> tuple[float, list[float]]:
        """Seconds of all, and from each request's arrival to its last token."""
        generator = self._generator(settings)
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
        seconds = time.perf_counter() - began
        generator.close()
        _check(num_found, sum(one.num_new for one in arrivals))
        return seconds, [ends[place] - began - one.seconds for place, one in enumerate(arrivals)]

    def _generator(self, settings: Settings) -> BatchGenerator:
        rows = settings["rows"]
        return BatchGenerator(
            self._base,
            completion_batch_size=rows,
            prefill_batch_size=min(rows, settings["prompts"]),
            prefill_step_size=settings["chunk"],
        )


def _up_to(rows: int) -> Sequence[int]:
    return sorted({min(count, rows) for count in (*AT_ONCE, rows)})


def _check(found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(f"{found} tokens, expected {expected}")


JOB = read_engine_job(sys.argv[1])
run_parts(JOB.parts, Bench(JOB).parts())
