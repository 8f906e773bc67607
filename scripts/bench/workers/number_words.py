"""Prompts of random words, paid by the share of words that are even numbers: for models with random weights.

Word `17` is token 17 of the tokenizer that `random_checkpoint.py` writes, and words are parted by spaces.
"""

import random
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar

from parallm.types import Message, Problem, Split


def random_prompts(count: int, length: int, vocabulary: int) -> list[str]:
    """`count` texts of `length` tokens, the same in every process."""
    generator = random.Random(0)
    return [" ".join(str(generator.randrange(vocabulary - 1)) for _ in range(length)) for _ in range(count)]


def even_share(text: str) -> float:
    words = text.split()
    return sum(word[-1] in "02468" for word in words) / max(1, len(words))


class NumberWords:
    """With completions of some length, the rewards of a group are as good as never all equal: each has signal."""

    weights: ClassVar[Mapping[str, float]] = {"even": 1.0}
    score_seconds: ClassVar[list[float]] = []
    """Of every call in this process, in order."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        self._prompts = random_prompts(count, length, vocabulary)

    def problems(self, split: Split) -> Sequence[Problem]:
        if split == "test":
            return []
        return [
            Problem(problem_id=str(place), messages=(Message(role="user", content=text),), answer="")
            for place, text in enumerate(self._prompts)
        ]

    def score(self, problem: Problem, text: str) -> Mapping[str, float]:
        began = time.perf_counter()
        share = even_share(text)
        self.score_seconds.append(time.perf_counter() - began)
        return {"even": share}
