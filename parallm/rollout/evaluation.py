"""What a version does on held-out problems: greedy accuracy, rewards, and pass@k of samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallm.environment.environment import Environment
from parallm.model.chat import ChatTokenizer
from parallm.rollout.collector import GenerateAll, generate_for
from parallm.rollout.estimates import mean_estimate, pass_at, wilson_interval
from parallm.seeds import mix
from parallm.types import EvaluationReport, GenerationRequest, Problem, SamplingParams

CORRECT = "correct"
EVALUATION = -1  # where a training step mixes its number into the seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """How to sample for pass@k. Every evaluation draws with the same random numbers, so versions compare well."""

    count: int
    """Of each problem."""
    temperature: float
    ks: Sequence[int]
    """None above `count`."""
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One scored completion."""

    is_correct: bool
    reward: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """Of all problems, in their order."""

    greedy: Sequence[Outcome]
    num_correct: Sequence[int]
    """Right ones among the samples of each problem; empty where nothing was sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Answers each problem once at temperature 0, and samples it where asked to.

    A completion counts as right if its part `correct` is 1.
    """

    generate_all: GenerateAll
    tokenizer: ChatTokenizer
    environment: Environment
    problems: Sequence[Problem]
    max_tokens: int
    samples: Samples | None = None

    async def evaluate(self, step: int, version: int, model: str) -> EvaluationReport:
        """What `model` does on the problems."""
        return self.report(await self.outcomes(model), step, version)

    async def outcomes(self, model: str) -> Outcomes:
        """Every problem with its scores, for comparing models problem by problem."""
        greedy = SamplingParams(max_tokens=self.max_tokens, temperature=0.0)
        requests = [self._request(place, model, greedy) for place in range(len(self.problems))]
        if self.samples is not None:
            requests += [self._sampled(place, model, self.samples) for place in range(len(self.problems))]
        scored = await self._scored(requests)
        return Outcomes(
            greedy=[row[0] for row in scored[: len(self.problems)]],
            num_correct=[sum(one.is_correct for one in row) for row in scored[len(self.problems) :]],
        )

    def report(self, outcomes: Outcomes, step: int, version: int) -> EvaluationReport:
        """The outcomes in a few numbers, each with its 95% interval."""
        greedy, samples = outcomes.greedy, self.samples
        names = sorted({name for one in greedy for name in one.parts})
        num_correct = sum(one.is_correct for one in greedy)
        low, high = wilson_interval(num_correct, len(greedy))
        return EvaluationReport(
            step=step,
            version=version,
            num_problems=len(greedy),
            accuracy=num_correct / len(greedy),
            low=low,
            high=high,
            reward=mean_estimate([one.reward for one in greedy]),
            reward_parts={name: mean_estimate([one.parts.get(name, 0.0) for one in greedy]) for name in names},
            pass_at={k: pass_at(k, samples.count, outcomes.num_correct) for k in samples.ks} if samples else {},
            num_samples=samples.count if samples else 0,
            temperature=samples.temperature if samples else 0.0,
        )

    async def _scored(self, requests: Sequence[GenerationRequest]) -> list[list[Outcome]]:
        """The outcomes of each request, whose problems come round as often as needed."""
        problems = [self.problems[place % len(self.problems)] for place in range(len(requests))]
        results = await generate_for(problems, requests, self.generate_all)
        pairs = zip(problems, results, strict=True)
        return [[self._outcome(problem, one.text) for one in completions] for problem, completions in pairs]

    def _outcome(self, problem: Problem, text: str) -> Outcome:
        parts, weights = self.environment.score(problem, text), self.environment.weights
        reward = sum(weights.get(name, 0.0) * value for name, value in parts.items())
        return Outcome(is_correct=_is_correct(parts), reward=reward, parts=parts)

    def _sampled(self, place: int, model: str, samples: Samples) -> GenerationRequest:
        seed = mix(mix(samples.seed, EVALUATION), place)
        sampling = SamplingParams(max_tokens=self.max_tokens, temperature=samples.temperature, seed=seed)
        return self._request(place, model, sampling, count=samples.count)

    def _request(self, place: int, model: str, sampling: SamplingParams, count: int = 1) -> GenerationRequest:
        kind = "sampled" if count > 1 or sampling.temperature else "greedy"
        return GenerationRequest(
            request_id=f"evaluation-{model}-{kind}-{place}",
            prompt_tokens=self.tokenizer.encode_chat(self.problems[place].messages),
            sampling=sampling,
            n=count,
            model=model,
            traffic="rollout",
        )


def _is_correct(score: Mapping[str, float]) -> bool:
    """Environments without a part `correct` count a completion as right if all parts are 1."""
    return bool(score[CORRECT] == 1) if CORRECT in score else all(value == 1 for value in score.values())
