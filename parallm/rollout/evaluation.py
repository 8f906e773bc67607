"""What a version does on held-out problems: greedy accuracy, rewards, and pass@k of samples."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from parallm.environment.environment import AnyEnvironment, environment_of
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.reports import EvaluatedCompletion, Evaluation, EvaluationReport
from parallm.rollout.confidence_intervals import mean_estimate, pass_at, share_estimate, support
from parallm.rollout.reward_model import RewardModel
from parallm.rollout.runner import RolloutRunner, ScoredEpisode
from parallm.rollout.scoring import REWARD_MODEL, FaultLog, raise_if_none_scored
from parallm.rollout.settings import EpisodeSettings
from parallm.rollout.tool_calls import encode_problem
from parallm.seeds import mix
from parallm.types import Completion, GenerationRequest, Problem, SamplingParams

EVALUATION = -1  # where a training step mixes its number into the seed
Progress = Callable[[int, int], None]
"""Called with the number of what is finished and of all."""
GenerateCounted = Callable[[Sequence[GenerationRequest], Callable[[int], None]], Awaitable[list[list[Completion]]]]
"""`AsyncEngine.generate_all`, or anything like it."""


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
class EvaluationOutcomes:
    """Scored completions of all problems, in their order."""

    greedy: Sequence[EvaluatedCompletion]
    samples: Sequence[Sequence[EvaluatedCompletion]]
    """Of each problem; empty where nothing was sampled."""

    @property
    def completions(self) -> list[EvaluatedCompletion]:
        return [*self.greedy, *(one for row in self.samples for one in row)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Answers each problem once at temperature 0, and samples it where asked to.

    A completion counts as right if its part `correct` is 1. One that cannot be scored counts as wrong, its reward and
    parts as 0.
    """

    generate_all: GenerateCounted
    tokenizer: ChatTokenizer
    environment: AnyEnvironment
    problems: Sequence[Problem]
    max_tokens: int
    samples: Samples | None = None
    rollout: EpisodeSettings = EpisodeSettings()
    """For the number of turns and the time limit of a score."""
    reward_model: RewardModel | None = None
    fault_log: FaultLog = field(default_factory=FaultLog)

    async def evaluate(self, step: int, version: int, model: str, progress: Progress) -> Evaluation:
        """What `model` does on the problems, with the greedy completions.

        Raises EnvironmentFailed if not one completion could be scored.
        """
        outcomes = await self.outcomes(model, progress)
        return Evaluation(report=self.report(outcomes, step, version), completions=outcomes.greedy)

    async def outcomes(self, model: str, progress: Progress) -> EvaluationOutcomes:
        """Every problem with its scores, for comparing models problem by problem."""
        greedy = SamplingParams(max_tokens=self.max_tokens, temperature=0.0)
        requests = [self._request(place, model, greedy) for place in range(len(self.problems))]
        if self.samples is not None:
            requests += [self._sampled(place, model, self.samples) for place in range(len(self.problems))]
        rows = await self._scored(requests, progress)
        return EvaluationOutcomes(
            greedy=[completion_of(row[0], sample=None) for row in rows[: len(self.problems)]],
            samples=[
                [completion_of(one, sample=place) for place, one in enumerate(row)]
                for row in rows[len(self.problems) :]
            ],
        )

    def report(self, outcomes: EvaluationOutcomes, step: int, version: int) -> EvaluationReport:
        """The outcomes in a few numbers, each with its 95% interval."""
        greedy, samples = outcomes.greedy, self.samples
        names = sorted({name for one in greedy for name in one.parts})
        parts = {name: [one.parts.get(name, 0.0) for one in greedy] for name in names}
        accuracy = share_estimate(sum(one.is_correct for one in greedy), len(greedy))
        num_correct = [sum(one.is_correct for one in row) for row in outcomes.samples]
        return EvaluationReport(
            step=step,
            version=version,
            num_problems=len(greedy),
            accuracy=accuracy.mean,
            low=accuracy.low,
            high=accuracy.high,
            reward=mean_estimate([one.reward for one in greedy], *self._reward_range(parts)),
            reward_parts={name: mean_estimate(values) for name, values in parts.items()},
            pass_at={k: pass_at(k, samples.count, num_correct) for k in samples.ks} if samples else {},
            num_samples=samples.count if samples else 0,
            temperature=samples.temperature if samples else 0.0,
        )

    def _reward_range(self, parts: Mapping[str, Sequence[float]]) -> tuple[float, float]:
        """The least and the most that any problem's environment pays for its parts."""
        supports = {name: support(values) for name, values in parts.items()}
        added = {} if self.reward_model is None else {REWARD_MODEL: self.reward_model.weight}
        ranges = []
        for problem in self.problems:
            weights = {**environment_of(self.environment, problem).weights, **added}
            ends = [sorted(weight * end for end in supports.get(name, (0.0, 1.0))) for name, weight in weights.items()]
            ranges.append((sum(least for least, _ in ends), sum(most for _, most in ends)))
        return min(least for least, _ in ranges), max(most for _, most in ranges)

    async def _scored(self, requests: Sequence[GenerationRequest], progress: Progress) -> list[list[ScoredEpisode]]:
        """The episodes of each request, whose problems come round as often as needed."""
        problems = [self.problems[place % len(self.problems)] for place in range(len(requests))]
        stage = RolloutRunner(
            partial(self._generated, progress),
            self.tokenizer,
            self.environment,
            max_turns=self.rollout.max_turns,
            score_seconds=self.rollout.score_seconds,
            reward_model=self.reward_model,
        )
        rows = await stage.run_episodes(problems, requests)
        scores = [(problem, one.score) for problem, row in zip(problems, rows, strict=True) for one in row]
        faults = [(problem, score.fault) for problem, score in scores if score.fault]
        self.fault_log.log("evaluation", faults)
        raise_if_none_scored("evaluation", [fault for _, fault in faults], len(scores) - len(faults))
        return rows

    async def _generated(self, progress: Progress, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        total = sum(request.n for request in requests)
        return await self.generate_all(requests, lambda done: progress(done, total))

    def _sampled(self, place: int, model: str, samples: Samples) -> GenerationRequest:
        seed = mix(mix(samples.seed, EVALUATION), place)
        sampling = SamplingParams(max_tokens=self.max_tokens, temperature=samples.temperature, seed=seed)
        return self._request(place, model, sampling, count=samples.count)

    def _request(self, place: int, model: str, sampling: SamplingParams, count: int = 1) -> GenerationRequest:
        kind = "sampled" if count > 1 or sampling.temperature else "greedy"
        return GenerationRequest(
            request_id=f"evaluation-{model}-{kind}-{place}",
            prompt_tokens=encode_problem(self.tokenizer, self.problems[place]),
            sampling=sampling,
            n=count,
            model=model,
            traffic="rollout",
        )


def completion_of(scored: ScoredEpisode, *, sample: int | None) -> EvaluatedCompletion:
    episode, score = scored.episode, scored.score
    return EvaluatedCompletion(
        problem_id=episode.problem.problem_id,
        prompt="\n".join(message.content for message in episode.problem.messages),
        completion=episode.text,
        answer=episode.problem.answer,
        is_correct=score.is_correct,
        reward=0.0 if score.fault is not None else score.reward,
        parts=score.parts,
        finish_reason=episode.finish_reason,
        num_tokens=len(episode.tokens),
        sample=sample,
    )
