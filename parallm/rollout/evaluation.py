"""Evaluation on held-out problems: greedy accuracy, rewards, and pass@k of samples.

Used by the trainers and by `python -m parallm.evaluate`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from parallm.environment.environment import AnyEnvironment, environment_of
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.reports import EvaluatedCompletion, Evaluation, EvaluationReport
from parallm.rollout.confidence_intervals import mean_estimate, pass_at, share_estimate, support
from parallm.rollout.reward_model import RewardModel
from parallm.rollout.runner import Generate, RolloutRunner, encode_problem
from parallm.rollout.scoring import REWARD_MODEL, FaultLog, ScoredEpisode, raise_if_none_scored
from parallm.rollout.settings import EpisodeSettings
from parallm.seeds import mix
from parallm.types import GenerationRequest, Problem, SamplingParams

EVALUATION = -1  # takes the place of a training step's number in the seed
Progress = Callable[[int, int], None]
"""Called with the number of scored completions and of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """How to sample for pass@k. Every evaluation draws with the same random numbers, so versions compare well."""

    count: int
    """Samples of each problem."""
    temperature: float
    ks: Sequence[int]
    """Each at most `count`."""
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOutcomes:
    """Scored completions of all problems, in their order."""

    greedy: Sequence[EvaluatedCompletion]
    samples: Sequence[Sequence[EvaluatedCompletion]]
    """Samples of each problem; empty if pass@k is off."""

    @property
    def completions(self) -> list[EvaluatedCompletion]:
        return [*self.greedy, *(sample for samples in self.samples for sample in samples)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Answers each problem once at temperature 0, and several times at the samples' temperature.

    A completion that cannot be scored counts as wrong, its reward and parts as 0.
    """

    generate: Generate
    tokenizer: ChatTokenizer
    environment: AnyEnvironment
    problems: Sequence[Problem]
    rollout: EpisodeSettings
    samples: Samples | None = None
    reward_model: RewardModel | None = None
    fault_log: FaultLog = field(default_factory=FaultLog)

    async def evaluate(self, step: int, version: int, model: str, progress: Progress) -> Evaluation:
        """Evaluate `model`; return the report with the greedy completions.

        Raises EnvironmentFailed if not one completion could be scored.
        """
        outcomes = await self.outcomes(model, progress)
        return Evaluation(report=self.report(outcomes, step, version), completions=outcomes.greedy)

    async def outcomes(self, model: str, progress: Progress) -> EvaluationOutcomes:
        """Return the scores problem by problem, for a comparison of models."""
        requests, num_problems = self._requests(model), len(self.problems)
        if self.samples is not None:
            requests += self._requests(model, self.samples)
        groups = await self._scored(requests, progress)
        return EvaluationOutcomes(
            greedy=[completion_of(group[0], sample=None) for group in groups[:num_problems]],
            samples=[
                [completion_of(scored, sample=index) for index, scored in enumerate(group)]
                for group in groups[num_problems:]
            ],
        )

    def report(self, outcomes: EvaluationOutcomes, step: int, version: int) -> EvaluationReport:
        """Return the means of the outcomes, each with its 95% interval."""
        greedy, samples = outcomes.greedy, self.samples
        names = sorted({name for completion in greedy for name in completion.parts})
        parts = {name: [completion.parts.get(name, 0.0) for completion in greedy] for name in names}
        accuracy = share_estimate(sum(completion.is_correct for completion in greedy), len(greedy))
        num_correct = [sum(sample.is_correct for sample in group) for group in outcomes.samples]
        return EvaluationReport(
            step=step,
            version=version,
            num_problems=len(greedy),
            accuracy=accuracy.mean,
            low=accuracy.low,
            high=accuracy.high,
            reward=mean_estimate([completion.reward for completion in greedy], *self._reward_range(parts)),
            reward_parts={name: mean_estimate(values) for name, values in parts.items()},
            pass_at={k: pass_at(k, samples.count, num_correct) for k in samples.ks} if samples else {},
            num_samples=samples.count if samples else 0,
            temperature=samples.temperature if samples else 0.0,
        )

    def _reward_range(self, parts: Mapping[str, Sequence[float]]) -> tuple[float, float]:
        """Return the smallest and the largest reward that any problem's environment gives for its parts."""
        supports = {name: support(values) for name, values in parts.items()}
        extra = {} if self.reward_model is None else {REWARD_MODEL: self.reward_model.weight}
        ranges = []
        for problem in self.problems:
            weights = {**environment_of(self.environment, problem).weights, **extra}
            ends = [sorted(weight * end for end in supports.get(name, (0.0, 1.0))) for name, weight in weights.items()]
            ranges.append((sum(low for low, _ in ends), sum(high for _, high in ends)))
        return min(low for low, _ in ranges), max(high for _, high in ranges)

    async def _scored(self, requests: Sequence[GenerationRequest], progress: Progress) -> list[list[ScoredEpisode]]:
        """Return the episodes of each request; requests go through the problems in order, once or twice."""
        problems = [self.problems[index % len(self.problems)] for index in range(len(requests))]
        total = sum(request.n for request in requests)
        groups = await self._play(problems, requests, lambda done: progress(done, total))
        pairs = [(problem, scored) for problem, group in zip(problems, groups, strict=True) for scored in group]
        faults = [(problem, scored.score.fault) for problem, scored in pairs if scored.score.fault]
        self.fault_log.log("evaluation", faults)
        raise_if_none_scored("evaluation", [fault for _, fault in faults], len(pairs) - len(faults))
        return groups

    async def _play(
        self, problems: Sequence[Problem], requests: Sequence[GenerationRequest], progress: Callable[[int], None]
    ) -> list[list[ScoredEpisode]]:
        """Return the episodes of each request; `progress` gets their number after each score."""
        runner = RolloutRunner(self.generate, self.tokenizer, self.environment, self.rollout, self.reward_model)
        return await runner.run_episodes(problems, requests, progress)

    def _requests(self, model: str, samples: Samples | None = None) -> list[GenerationRequest]:
        """Return a request of each problem: greedy, or for `samples`."""
        sampling = SamplingParams(max_tokens=self.rollout.max_tokens, temperature=0.0)
        if samples is not None:
            sampling = replace(sampling, temperature=samples.temperature, seed=mix(samples.seed, EVALUATION))
        return [
            GenerationRequest(
                request_id=f"evaluation-{model}-{'greedy' if samples is None else 'sampled'}-{index}",
                prompt_tokens=encode_problem(self.tokenizer, problem),
                sampling=sampling if sampling.seed is None else replace(sampling, seed=mix(sampling.seed, index)),
                n=1 if samples is None else samples.count,
                model=model,
                traffic="rollout",
            )
            for index, problem in enumerate(self.problems)
        ]


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
