"""Problems -> requests -> scored groups of trajectories: one step's worth at a time."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from parallm.environment.environment import Environment
from parallm.errors import ContextTooLong
from parallm.model.chat import ChatTokenizer
from parallm.rollout.ledger import Ledger
from parallm.rollout.problem_stream import ProblemStream
from parallm.rollout.settings import RolloutSettings
from parallm.rollout.trajectory import trajectory_of
from parallm.seeds import mix
from parallm.types import Completion, GenerationRequest, Problem, SamplingParams, Trajectory, TrajectoryGroup

GenerateAll = Callable[[Sequence[GenerationRequest]], Awaitable[list[list[Completion]]]]
"""`AsyncEngine.generate_all`, or anything like it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """What one step has sampled."""

    first: tuple[TrajectoryGroup, ...]
    """Groups of the first draw, with signal or without: rewards of these are an unbiased picture of the policy."""
    sampled: tuple[TrajectoryGroup, ...]
    """All groups, replacements included."""
    seconds: float

    @property
    def with_signal(self) -> tuple[TrajectoryGroup, ...]:
        return tuple(group for group in self.sampled if group.has_signal)

    @property
    def num_tokens(self) -> int:
        return sum(len(one.tokens) for group in self.sampled for one in group.trajectories)


class Collector:
    """Samples with the newest policy and scores. Runs on the asyncio thread; several steps may be under way at a time.

    Every random choice follows from the seed, the step and the place in the step, so a resumed run samples the same.
    """

    def __init__(
        self,
        generate_all: GenerateAll,
        tokenizer: ChatTokenizer,
        environment: Environment,
        stream: ProblemStream,
        settings: RolloutSettings,
        seed: int,
    ) -> None:
        self._generate_all = generate_all
        self._tokenizer = tokenizer
        self._environment = environment
        self.ledger = Ledger(stream)
        self._settings = settings
        self._seed = seed

    async def collect(self, step: int, model: str) -> Collection:
        """Sample `problems_per_step` groups; replace those without signal up to `refill_rounds` times.

        Groups without signal (all rewards equal) teach nothing: https://arxiv.org/abs/2503.14476, dynamic sampling.
        """
        began = time.perf_counter()
        wanted = self._settings.problems_per_step
        first = await self._sample(self._draw(wanted, step), step, 0, model)
        groups = list(first)
        for _ in range(self._settings.refill_rounds):
            missing = wanted - sum(group.has_signal for group in groups)
            if missing <= 0:
                break
            groups += await self._sample(self._draw(missing, step), step, len(groups), model)
        return Collection(first=tuple(first), sampled=tuple(groups), seconds=time.perf_counter() - began)

    async def again(
        self, groups: Sequence[TrajectoryGroup], step: int, first_place: int, model: str
    ) -> list[TrajectoryGroup]:
        """Sample the problems of `groups` once more, with seeds of the places from `first_place` on."""
        return await self._sample([group.problem for group in groups], step, first_place, model)

    def _draw(self, count: int, step: int) -> list[Problem]:
        problems = self.ledger.take(count)
        self.ledger.claim(step)
        return problems

    async def _sample(
        self, problems: Sequence[Problem], step: int, first_place: int, model: str
    ) -> list[TrajectoryGroup]:
        requests = [self._request(problem, step, first_place + place, model) for place, problem in enumerate(problems)]
        results = await generate_for(problems, requests, self._generate_all)
        return [self._group(*triple) for triple in zip(problems, requests, results, strict=True)]

    def _request(self, problem: Problem, step: int, place: int, model: str) -> GenerationRequest:
        sampling = SamplingParams(
            max_tokens=self._settings.max_tokens,
            temperature=self._settings.temperature,
            seed=mix(mix(self._seed, step), place),
        )
        return GenerationRequest(
            request_id=f"step-{step}-{place}",
            prompt_tokens=self._tokenizer.encode_chat(problem.messages),
            sampling=sampling,
            n=self._settings.group_size,
            model=model,
            traffic="rollout",
            switches_in_flight=self._settings.switch_in_flight,
        )

    def _group(self, problem: Problem, request: GenerationRequest, completions: list[Completion]) -> TrajectoryGroup:
        return TrajectoryGroup(
            problem=problem, trajectories=tuple(self._trajectory(problem, request, one) for one in completions)
        )

    def _trajectory(self, problem: Problem, request: GenerationRequest, completion: Completion) -> Trajectory:
        parts = dict(self._environment.score(problem, completion.text))
        weights = self._environment.weights
        reward = sum(weights.get(name, 0.0) * value for name, value in parts.items())
        return trajectory_of(request, completion, problem_id=problem.problem_id, reward=reward, parts=parts)


async def generate_for(
    problems: Sequence[Problem], requests: Sequence[GenerationRequest], generate_all: GenerateAll
) -> list[list[Completion]]:
    """`generate_all` of one request per problem. Raises ContextTooLong with the name of the longest problem."""
    try:
        return await generate_all(requests)
    except ContextTooLong as error:
        longest = max(range(len(requests)), key=lambda place: len(requests[place].prompt_tokens))
        raise ContextTooLong(f"problem {problems[longest].problem_id}: {error}", error.parameter) from error
