"""What a version does on held-out problems: greedy accuracy, rewards, and pass@k of samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from parallm.environment.environment import AnyEnvironment
from parallm.model.chat import ChatTokenizer
from parallm.reports import EvaluationReport
from parallm.rollout.estimates import mean_estimate, pass_at, wilson_interval
from parallm.rollout.functions import prompt_of
from parallm.rollout.reward_model import RewardModel
from parallm.rollout.scoring import FaultLog, Score, refuse_without_scores
from parallm.rollout.settings import EpisodeSettings
from parallm.rollout.stage import GenerateAll, Stage
from parallm.seeds import mix
from parallm.types import GenerationRequest, Problem, SamplingParams

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

    A completion counts as right if its part `correct` is 1. One that cannot be scored counts as wrong, its reward and
    parts as 0.
    """

    generate_all: GenerateAll
    tokenizer: ChatTokenizer
    environment: AnyEnvironment
    problems: Sequence[Problem]
    max_tokens: int
    samples: Samples | None = None
    rollout: EpisodeSettings = EpisodeSettings()
    """For the number of turns and the time limit of a score."""
    reward_model: RewardModel | None = None
    fault_log: FaultLog = field(default_factory=FaultLog)

    async def evaluate(self, step: int, version: int, model: str) -> EvaluationReport:
        """What `model` does on the problems. Raises EnvironmentFailed if not one completion could be scored."""
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
        stage = Stage(
            self.generate_all,
            self.tokenizer,
            self.environment,
            max_turns=self.rollout.max_turns,
            score_seconds=self.rollout.score_seconds,
            reward_model=self.reward_model,
        )
        rows = [[scored.score for scored in row] for row in await stage.play(problems, requests)]
        faults = [(problem, one.fault) for problem, row in zip(problems, rows, strict=True) for one in row if one.fault]
        self.fault_log.log("evaluation", faults)
        refuse_without_scores("evaluation", [fault for _, fault in faults], sum(map(len, rows)) - len(faults))
        return [[outcome_of(one) for one in row] for row in rows]

    def _sampled(self, place: int, model: str, samples: Samples) -> GenerationRequest:
        seed = mix(mix(samples.seed, EVALUATION), place)
        sampling = SamplingParams(max_tokens=self.max_tokens, temperature=samples.temperature, seed=seed)
        return self._request(place, model, sampling, count=samples.count)

    def _request(self, place: int, model: str, sampling: SamplingParams, count: int = 1) -> GenerationRequest:
        kind = "sampled" if count > 1 or sampling.temperature else "greedy"
        return GenerationRequest(
            request_id=f"evaluation-{model}-{kind}-{place}",
            prompt_tokens=prompt_of(self.tokenizer, self.problems[place]),
            sampling=sampling,
            n=count,
            model=model,
            traffic="rollout",
        )


def outcome_of(score: Score) -> Outcome:
    return Outcome(
        is_correct=score.is_correct, reward=0.0 if score.fault is not None else score.reward, parts=score.parts
    )
