"""Problems -> requests -> scored groups of trajectories, for one training step at a time. Used by the trainers."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from parallm.environment.environment import AnyEnvironment
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.rollout.episode import trajectory_of
from parallm.rollout.problems import Curriculum, ProblemCursor, Stream
from parallm.rollout.reward_model import RewardModel
from parallm.rollout.runner import Generate, RolloutRunner, encode_problem
from parallm.rollout.scoring import NO_TOKENS, FaultLog, ScoredEpisode, loss_mask, shape_reward
from parallm.rollout.settings import RolloutSettings
from parallm.seeds import mix
from parallm.types import FaultyEpisode, GenerationRequest, Problem, SamplingParams, Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """The groups that one step has sampled. Completions that could not be scored are not in them."""

    first: tuple[TrajectoryGroup, ...]
    """Groups of the first draw, with signal or without: their rewards are an unbiased picture of the policy."""
    sampled: tuple[TrajectoryGroup, ...]
    """All groups, replacements included."""
    seconds: float
    problems_skipped: int = 0
    """Draws that the curriculum passed over."""

    @property
    def with_signal(self) -> tuple[TrajectoryGroup, ...]:
        return tuple(group for group in self.sampled if group.has_signal)

    def to_train(self, *, needs_all: bool) -> tuple[TrajectoryGroup, ...]:
        """The groups with signal, or with `needs_all` every group with a scored completion."""
        return tuple(group for group in self.sampled if group.trajectories) if needs_all else self.with_signal

    @property
    def num_tokens(self) -> int:
        """Tokens of all episodes, those of replies and of faulty ones included."""
        scored = sum(len(trajectory.tokens) for group in self.sampled for trajectory in group.trajectories)
        return scored + sum(len(fault.tokens) for group in self.sampled for fault in group.faulty)

    @property
    def faults(self) -> Mapping[str, int]:
        return dict(sorted(Counter(fault.kind for group in self.sampled for fault in group.faulty).items()))


class Collector:
    """Samples and scores a step's groups. Used on the asyncio thread; several steps may be under way at a time.

    Every random choice follows from the seed, the step and the index in the step, so a resumed run samples the same.
    """

    def __init__(
        self,
        generate: Generate,
        tokenizer: ChatTokenizer,
        environment: AnyEnvironment,
        stream: Stream,
        settings: RolloutSettings,
        seed: int,
        reward_model: RewardModel | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._runner = RolloutRunner(generate, tokenizer, environment, settings, reward_model)
        self.stream = stream
        self.problem_cursor = ProblemCursor(stream)
        self.curriculum = Curriculum(self.problem_cursor, settings.curriculum, seed)
        self._settings = settings
        self._seed = seed
        self._fault_log = FaultLog()

    async def collect(self, step: int, model: str) -> RolloutBatch:
        """Sample `problems_per_step` groups; if too few of them have signal, replace the others.

        Groups without signal (all rewards equal) teach nothing: https://arxiv.org/abs/2503.14476, dynamic sampling.
        A draw in which nothing could be scored is not replaced. Raises what generating raises; an environment's faults
        are counted and logged.
        """
        began = time.perf_counter()
        num_problems = self._settings.problems_per_step
        problems, skipped = self._draw(num_problems, step)
        first = await self._sample(problems, step, 0, model)
        groups = list(first)
        for _ in range(self._settings.refill_rounds):
            num_with_signal = sum(group.has_signal for group in groups)
            is_scored = any(group.trajectories for group in groups)
            if num_with_signal >= num_problems * self._settings.refill_below or not is_scored:
                break
            problems, more = self._draw(num_problems - num_with_signal, step)
            skipped += more
            groups += await self._sample(problems, step, len(groups), model)
        return RolloutBatch(
            first=tuple(first),
            sampled=tuple(groups),
            seconds=time.perf_counter() - began,
            problems_skipped=skipped,
        )

    def give_up(self, steps: Iterable[int]) -> None:
        """Draw the problems of these steps again, whose collections were cancelled."""
        self.problem_cursor.requeue(steps)

    async def resample(
        self, groups: Sequence[TrajectoryGroup], step: int, start: int, model: str
    ) -> list[TrajectoryGroup]:
        """Sample the problems of `groups` once more, with the seeds of the indices from `start` on."""
        return await self._sample([group.problem for group in groups], step, start, model)

    def _draw(self, count: int, step: int) -> tuple[list[Problem], int]:
        """Draw problems for `step`; return them and how many others the curriculum passed over."""
        before = self.curriculum.num_skipped
        problems = self.curriculum.take(count)
        self.problem_cursor.claim(step)
        return problems, self.curriculum.num_skipped - before

    async def _sample(self, problems: Sequence[Problem], step: int, start: int, model: str) -> list[TrajectoryGroup]:
        groups = await self._play(list(enumerate(problems, start)), step, model)
        self._fault_log.log(f"step {step + 1}", [(group.problem, fault) for group in groups for fault in group.faulty])
        return groups

    async def _play(self, numbered: Sequence[tuple[int, Problem]], step: int, model: str) -> list[TrajectoryGroup]:
        """Sample and score one group per problem, whose number in the step its seeds follow from."""
        problems = [problem for _, problem in numbered]
        requests = [self._request(problem, step, number, model) for number, problem in numbered]
        episodes = await self._runner.run_episodes(problems, requests)
        return [self._group(*pair) for pair in zip(problems, episodes, strict=True)]

    def _request(self, problem: Problem, step: int, index: int, model: str) -> GenerationRequest:
        sampling = SamplingParams(
            max_tokens=self._settings.max_tokens,
            temperature=self._settings.temperature,
            seed=mix(mix(self._seed, step), index),
        )
        return GenerationRequest(
            request_id=f"step-{step}-{index}-{model}",
            prompt_tokens=encode_problem(self._tokenizer, problem),
            sampling=sampling,
            n=self._settings.group_size,
            model=model,
            traffic="rollout",
            switches_in_flight=self._settings.switch_in_flight,
        )

    def _group(self, problem: Problem, episodes: Sequence[ScoredEpisode]) -> TrajectoryGroup:
        faults = [fault_of(scored) for scored in episodes]
        return TrajectoryGroup(
            problem=problem,
            trajectories=tuple(
                self._trajectory(scored) for scored, fault in zip(episodes, faults, strict=True) if fault is None
            ),
            faulty=tuple(fault for fault in faults if fault is not None),
            solve_rate=solve_rate(episodes),
        )

    def _trajectory(self, scored: ScoredEpisode) -> Trajectory:
        parts, reward = shape_reward(scored, self._settings)
        return trajectory_of(scored.episode, reward=reward, parts=parts, loss_mask=loss_mask(scored, self._settings))


def fault_of(scored: ScoredEpisode) -> FaultyEpisode | None:
    """Return why an episode cannot be trained on: its score's fault, or that nothing was sampled."""
    if scored.score.fault is None and not scored.episode.tokens:
        return scored.episode.faulty(NO_TOKENS, "the engine has sampled nothing")
    return scored.score.fault


def solve_rate(episodes: Sequence[ScoredEpisode]) -> float | None:
    """Return the share of right answers among the scored episodes; None without any."""
    correct = [scored.score.is_correct for scored in episodes if scored.score.fault is None]
    return fmean(correct) if correct else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The groups that one step takes from clients or from the environments of an Atropos run."""

    groups: tuple[TrajectoryGroup, ...]
    with_signal: tuple[TrajectoryGroup, ...]
    """The groups whose rewards differ."""
    trained: tuple[TrajectoryGroup, ...]
    """Those to train on: all, or those with signal."""
    num_stale: int
    """Number of trajectories of clients, or groups of Atropos, that have become too old since the last step."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Further figures of the step's row in metrics.jsonl, under flat names."""
