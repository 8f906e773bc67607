"""Greedy accuracy on held-out problems."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallm.environment.environment import Environment
from parallm.model.chat import ChatTokenizer
from parallm.rollout.collector import GenerateAll, generate_for
from parallm.types import EvaluationReport, GenerationRequest, Problem, SamplingParams

CORRECT = "correct"
Z_95 = 1.959964


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Answers each problem once at temperature 0. A completion counts as right if its part `correct` is 1."""

    generate_all: GenerateAll
    tokenizer: ChatTokenizer
    environment: Environment
    problems: Sequence[Problem]
    max_tokens: int

    async def evaluate(self, step: int, version: int, model: str) -> EvaluationReport:
        """Accuracy of `model` with a 95% Wilson interval, and the mean of every reward part."""
        sampling = SamplingParams(max_tokens=self.max_tokens, temperature=0.0)
        requests = [
            GenerationRequest(
                request_id=f"evaluation-{step}-{place}",
                prompt_tokens=self.tokenizer.encode_chat(problem.messages),
                sampling=sampling,
                model=model,
                traffic="rollout",
            )
            for place, problem in enumerate(self.problems)
        ]
        results = await generate_for(self.problems, requests, self.generate_all)
        pairs = zip(self.problems, results, strict=True)
        scores = [self.environment.score(problem, completions[0].text) for problem, completions in pairs]
        names = sorted({name for score in scores for name in score})
        num_correct = sum(_is_correct(score) for score in scores)
        low, high = wilson_interval(num_correct, len(scores))
        return EvaluationReport(
            step=step,
            version=version,
            num_problems=len(scores),
            accuracy=num_correct / len(scores),
            low=low,
            high=high,
            reward_parts={name: sum(score.get(name, 0.0) for score in scores) / len(scores) for name in names},
        )


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """95% confidence interval of a proportion (Wilson, 1927); never leaves [0, 1]."""
    share = successes / trials
    centre = share + Z_95**2 / (2 * trials)
    spread = Z_95 * math.sqrt(share * (1 - share) / trials + Z_95**2 / (4 * trials**2))
    scale = 1 + Z_95**2 / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def _is_correct(score: Mapping[str, float]) -> bool:
    """Environments without a part `correct` count a completion as right if all parts are 1."""
    return bool(score[CORRECT] == 1) if CORRECT in score else all(value == 1 for value in score.values())
