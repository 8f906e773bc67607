"""Times of mlx-lm's BatchGenerator on a shape with random weights, part by part: what
engine_parts.py is asked for, too.

Greedy, as ours, with the same weights, prompts and arrivals. Unless the job gives its settings, each part first looks
for those with which it is fastest, one setting after the other, on a shorter load where the load is long; it prints
what it tried.

rows: completions that decode together. prompts: that are computed together. chunk: tokens of each that are computed in
one forward. copies: a prompt that several rows have is computed once, and its keys and values are handed in for each.
"""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from bench.compare import Settings, Trial, tune
from bench.workers.loads import (
    SHAPES,
    Arrival,
    Load,
    Tokens,
    check_tokens,
    random_arrivals,
    random_prompts,
    random_storm,
    read_load,
)
from bench.workers.parts import run_parts
from bench.workers.random_model import random_base
from parallm.engine.engine import is_out_of_memory

PREFILL_ROWS, GROUPS, GROUP_SIZE = 32, 4, 8
DEFAULTS = {"prompts": 8, "chunk": 2048}
"""Of BatchGenerator."""
AT_ONCE = (1, 4, 8, 16, 32)
CHUNKS = (128, 512, 2048)
SERVED_CHOICES: Mapping[str, Sequence[int]] = {"prompts": (1, 8, 32), "chunk": (512, 2048)}
LONG_TURN = 10.0
"""Seconds of a turn from which on one counts, with the settings that a part begins with."""
TUNED_SHARE = 4
"""A long load is tuned on a fourth of its requests."""


class Bench:
    def __init__(self, shape: str, load: Load) -> None:
        self._load = load
        self._shape = SHAPES[shape]
        mx.random.seed(0)
        self._base = random_base(self._shape)
        self._base.eval()
        mx.eval(self._base.parameters())

    def parts(self) -> dict[str, Callable[[], dict[str, Any]]]:
        return {
            "b1": partial(self.same_lengths, 1),
            "b32": partial(self.same_lengths, 32),
            "b64": partial(self.same_lengths, 64),
            "b128": partial(self.same_lengths, 128),
            "prefill": self.prefill,
            "groups": self.groups,
            "mixed": partial(self.served, random_arrivals, tuned_share=TUNED_SHARE),
            "storm": partial(self.served, random_storm, tuned_share=1),
        }

    def same_lengths(self, rows: int) -> dict[str, Any]:
        """Rows that begin and end together."""
        return self._tuned_turns(rows, 1, self._load.prompt, self._load.new, {"prompts": _up_to(rows)})

    def prefill(self) -> dict[str, Any]:
        """Prompts of which one token each is sampled; tokens of prompts are counted."""
        length = self._load.group_prompt
        choices = {"prompts": AT_ONCE, "chunk": CHUNKS}
        return self._tuned_turns(PREFILL_ROWS, 1, length, 1, choices) | {"tokens": PREFILL_ROWS * length}

    def groups(self) -> dict[str, Any]:
        """Groups that share their prompts, from the first prompt token to the last sampled one."""
        choices = {"prompts": (8, 32), "chunk": CHUNKS, "copies": (False, True)}
        return self._tuned_turns(GROUPS, GROUP_SIZE, self._load.group_prompt, self._load.new, choices)

    def served(self, arrivals_of: Callable[[Load, int, int], list[Arrival]], *, tuned_share: int) -> dict[str, Any]:
        """Requests of all lengths at the times of their arrivals; before them a quarter of others that warm up.

        How many rows decode together shows on the whole load only, so that is tried on it, and the fastest counts. What
        does not fit into memory is left out.
        """
        load, vocabulary = self._load, self._shape["vocab_size"]
        start = load.peer_settings or {**DEFAULTS, "rows": load.peer_rows[0]}
        self._serve(arrivals_of(load, vocabulary, 1)[: max(1, load.requests // 4)], start)
        short = arrivals_of(replace(load, requests=max(1, load.requests // tuned_share)), vocabulary, 2)
        trials = self._tried(start, SERVED_CHOICES, lambda settings: self._serve(short, settings))
        arrivals = arrivals_of(load, vocabulary, 0)

        def whole(settings: Settings) -> float | None:
            gc.collect()
            mx.clear_cache()
            try:
                return self._serve(arrivals, settings)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                return None

        best = trials[0].settings if trials else start
        fastest = tune(best, {} if load.peer_settings else {"rows": load.peer_rows}, whole)[0]
        tokens = sum(one.num_new for one in arrivals)
        return {"tokens": tokens, "seconds": [fastest.seconds], "settings": fastest.settings}

    def _tuned_turns(
        self, prompts: int, rows_each: int, length: int, new: int, choices: Mapping[str, Sequence[Any]]
    ) -> dict[str, Any]:
        """`repeats` turns with the best of `choices`, each of them tried in one turn after one that warms up."""
        rows = prompts * rows_each
        turn = iter(range(1_000_000))

        def timed(settings: Settings) -> float:
            distinct = random_prompts(self._shape["vocab_size"], prompts, length, next(turn))
            return self._complete([one for one in distinct for _ in range(rows_each)], new, settings)

        own = {"prompts": min(rows, DEFAULTS["prompts"]), "rows": rows} | ({"copies": False} if rows_each > 1 else {})
        start = self._load.peer_settings or {**DEFAULTS, **own}
        if timed(start) > LONG_TURN and (again := timed(start)) > LONG_TURN:  # the first one compiles
            return {"tokens": rows * new, "seconds": [again], "settings": start}
        trials = self._tried(start, choices, timed)
        best = trials[0].settings if trials else start
        seconds = [timed(best) for _ in range(self._load.repeats)]
        return {"tokens": rows * new, "seconds": seconds, "settings": best}

    def _tried(
        self, start: Settings, choices: Mapping[str, Sequence[Any]], seconds_of: Callable[[Settings], float]
    ) -> list[Trial]:
        """Fastest first; none where the load gives the settings."""
        return [] if self._load.peer_settings else tune(start, choices, seconds_of)

    def _complete(self, prompts: Sequence[Tokens], new: int, settings: Settings) -> float:
        """Seconds of all."""
        began = time.perf_counter()
        generator = self._generator(settings)
        self._insert(generator, prompts, new, settings)
        num_found = 0
        while responses := generator.next_generated():
            num_found += len(responses)
        seconds = time.perf_counter() - began
        generator.close()
        check_tokens(num_found, len(prompts) * new)
        return seconds

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

    def _serve(self, arrivals: Sequence[Arrival], settings: Settings) -> float:
        """Seconds of all."""
        generator = self._generator(settings)
        coming = deque(arrivals)
        num_inserted = num_ended = num_found = 0
        began = time.perf_counter()
        while num_ended < len(arrivals):
            while coming and coming[0].seconds <= time.perf_counter() - began:
                one = coming.popleft()
                generator.insert([list(one.prompt)], [one.num_new])
                num_inserted += 1
            if num_inserted == num_ended:
                time.sleep(max(0.0, coming[0].seconds - (time.perf_counter() - began)))
                continue
            responses = generator.next()[1]
            num_found += len(responses)
            num_ended += sum(one.finish_reason is not None for one in responses)
        seconds = time.perf_counter() - began
        generator.close()
        check_tokens(num_found, sum(one.num_new for one in arrivals))
        return seconds

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


def main(*, shape: str, parts: Sequence[str], load: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return run_parts(parts, Bench(shape, read_load(load)).parts())
