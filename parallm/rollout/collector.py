"""Problems -> requests -> scored groups of trajectories: one step's worth at a time."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from parallm.environment.environment import AnyEnvironment
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.rollout.curriculum import Curriculum
from parallm.rollout.episode import trajectory_of
from parallm.rollout.problems import ProblemCursor, Stream
from parallm.rollout.reward_model import RewardModel
from parallm.rollout.runner import GenerateAll, RolloutRunner, ScoredEpisode
from parallm.rollout.scoring import NO_TOKENS, FaultLog
from parallm.rollout.settings import RolloutSettings
from parallm.rollout.shaping import loss_mask, shape_reward
from parallm.rollout.tool_calls import encode_problem
from parallm.seeds import mix
from parallm.types import FaultyEpisode, GenerationRequest, Problem, SamplingParams, Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """What one step has sampled. Completions that could not be scored are not in the groups."""

    first: tuple[TrajectoryGroup, ...]
    """Groups of the first draw, with signal or without: rewards of these are an unbiased picture of the policy."""
    sampled: tuple[TrajectoryGroup, ...]
    """All groups, replacements included."""
    seconds: float
    problems_skipped: int = 0
    """Draws that the curriculum left out."""

    @property
    def with_signal(self) -> tuple[TrajectoryGroup, ...]:
        return tuple(group for group in self.sampled if group.has_signal)

    def to_train(self, *, needs_all: bool) -> tuple[TrajectoryGroup, ...]:
        """The groups with signal, or with `needs_all` every group of which something was scored."""
        return tuple(group for group in self.sampled if group.trajectories) if needs_all else self.with_signal

    @property
    def num_tokens(self) -> int:
        """Tokens of completions, those of replies and of faulty ones included."""
        scored = sum(len(one.tokens) for group in self.sampled for one in group.trajectories)
        return scored + sum(len(one.tokens) for group in self.sampled for one in group.faulty)

    @property
    def faults(self) -> Mapping[str, int]:
        """How often each kind of fault has happened."""
        return dict(sorted(Counter(one.kind for group in self.sampled for one in group.faulty).items()))


class Collector:
    """Samples with the newest policy and scores. Runs on the asyncio thread; several steps may be under way at a time.

    Every random choice follows from the seed, the step and the place in the step, so a resumed run samples the same.
    """

    def __init__(
        self,
        generate_all: GenerateAll,
        tokenizer: ChatTokenizer,
        environment: AnyEnvironment,
        stream: Stream,
        settings: RolloutSettings,
        seed: int,
        reward_model: RewardModel | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._runner = RolloutRunner(
            generate_all,
            tokenizer,
            environment,
            max_turns=settings.max_turns,
            score_seconds=settings.score_seconds,
            reward_model=reward_model,
        )
        self.stream = stream
        self.problem_cursor = ProblemCursor(stream)
        self.curriculum = Curriculum(self.problem_cursor, settings.curriculum, seed)
        self._settings = settings
        self._seed = seed
        self._fault_log = FaultLog()

    async def collect(self, step: int, model: str) -> RolloutBatch:
        """Sample `problems_per_step` groups; where too few of them have signal, replace the others.

        Groups without signal (all rewards equal) teach nothing: https://arxiv.org/abs/2503.14476, dynamic sampling.
        Where nothing at all could be scored, others would not be either. Raises what generating raises; an
        environment's faults are counted and logged.
        """
        began = time.perf_counter()
        wanted = self._settings.problems_per_step
        problems, skipped = self._draw(wanted, step)
        first = await self._sample(problems, step, 0, model)
        groups = list(first)
        for _ in range(self._settings.refill_rounds):
            num_with_signal = sum(group.has_signal for group in groups)
            is_scored = any(group.trajectories for group in groups)
            if num_with_signal >= wanted * self._settings.refill_below or not is_scored:
                break
            problems, more = self._draw(wanted - num_with_signal, step)
            skipped += more
            groups += await self._sample(problems, step, len(groups), model)
        return RolloutBatch(
            first=tuple(first),
            sampled=tuple(groups),
            seconds=time.perf_counter() - began,
            problems_skipped=skipped,
        )

    async def resample(
        self, groups: Sequence[TrajectoryGroup], step: int, first_place: int, model: str
    ) -> list[TrajectoryGroup]:
        """Sample the problems of `groups` once more, with seeds of the places from `first_place` on."""
        return await self._sample([group.problem for group in groups], step, first_place, model)

    def _draw(self, count: int, step: int) -> tuple[list[Problem], int]:
        """Problems for `step`, and how many others the curriculum has passed over for them."""
        before = self.curriculum.num_skipped
        problems = self.curriculum.take(count)
        self.problem_cursor.claim(step)
        return problems, self.curriculum.num_skipped - before

    async def _sample(
        self, problems: Sequence[Problem], step: int, first_place: int, model: str
    ) -> list[TrajectoryGroup]:
        requests = [self._request(problem, step, first_place + place, model) for place, problem in enumerate(problems)]
        rows = await self._runner.run_episodes(problems, requests)
        groups = [self._group(*pair) for pair in zip(problems, rows, strict=True)]
        self._fault_log.log(f"step {step + 1}", [(group.problem, one) for group in groups for one in group.faulty])
        return groups

    def _request(self, problem: Problem, step: int, place: int, model: str) -> GenerationRequest:
        sampling = SamplingParams(
            max_tokens=self._settings.max_tokens,
            temperature=self._settings.temperature,
            seed=mix(mix(self._seed, step), place),
        )
        return GenerationRequest(
            request_id=f"step-{step}-{place}-{model}",
            prompt_tokens=encode_problem(self._tokenizer, problem),
            sampling=sampling,
            n=self._settings.group_size,
            model=model,
            traffic="rollout",
            switches_in_flight=self._settings.switch_in_flight,
        )

    def _group(self, problem: Problem, row: Sequence[ScoredEpisode]) -> TrajectoryGroup:
        faults = [fault_of(scored) for scored in row]
        pairs = zip(row, faults, strict=True)
        return TrajectoryGroup(
            problem=problem,
            trajectories=tuple(self._trajectory(scored) for scored, fault in pairs if fault is None),
            faulty=tuple(fault for fault in faults if fault is not None),
            solve_rate=solve_rate(row),
        )

    def _trajectory(self, scored: ScoredEpisode) -> Trajectory:
        shaped, mask = shape_reward(scored, self._settings), loss_mask(scored, self._settings)
        return trajectory_of(scored.episode, reward=shaped.reward, parts=shaped.parts, loss_mask=mask)


def fault_of(scored: ScoredEpisode) -> FaultyEpisode | None:
    """Why an episode cannot be trained on: its score's fault, or that nothing was sampled."""
    if scored.score.fault is None and not scored.episode.tokens:
        return FaultyEpisode(kind=NO_TOKENS, detail="the engine has sampled nothing", text="", tokens=())
    return scored.score.fault


def solve_rate(row: Sequence[ScoredEpisode]) -> float | None:
    right = [scored.score.is_correct for scored in row if scored.score.fault is None]
    return fmean(right) if right else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    groups: tuple[TrajectoryGroup, ...]
    with_signal: tuple[TrajectoryGroup, ...]
    """Those to train on."""
    num_stale: int
    """What has become too old for a step since the last one was taken: trajectories of clients, groups of Atropos."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """More for the step's row of metrics.jsonl, under their flat names."""
