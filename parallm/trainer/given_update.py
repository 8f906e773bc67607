"""Updates between two steps on trajectories that clients bring. The control routes call it."""

import itertools
import logging
from collections.abc import Sequence
from functools import partial

from parallm.errors import CheckpointError, InvalidRequest, TrainingStopped
from parallm.learner.settings import Advantage
from parallm.model.adapters.names import of_alias
from parallm.rollout.given_trajectories import check_trajectories, groups_of, with_signal
from parallm.trainer.context import TrainerContext
from parallm.trainer.loop import Loop
from parallm.types import LATEST, Completion, GenerationRequest, GivenTrajectory, GivenUpdate, SamplingParams

logger = logging.getLogger(__name__)


class GivenUpdates:
    """Updates of one policy, on the asyncio thread. An update makes a version and counts as no step."""

    def __init__(
        self,
        loop: Loop,
        context: TrainerContext,
        *,
        advantage: Advantage,
        max_off_policy_steps: int,
        max_tokens: int,
        num_token_ids: int,
    ) -> None:
        """`max_tokens`: the limit of a completion, as for `Learner.update`."""
        self._loop = loop
        self._context = context
        self._advantage = advantage
        self._limit = max_off_policy_steps
        self._max_tokens = max_tokens
        self._num_token_ids = num_token_ids
        self._count = itertools.count()

    async def update(
        self, given: Sequence[GivenTrajectory], *, serve: bool | None, checkpoint_name: str | None
    ) -> GivenUpdate:
        """Train on these after the present step. `serve`: whether clients get the new version; None: as after a step.

        Raises InvalidRequest for trajectories that cannot be trained on, Unavailable after the end of training,
        CheckpointError if the update succeeded and its named checkpoint could not be saved.
        """
        work = partial(self._update, given, serve=serve, checkpoint_name=checkpoint_name)
        return await self._loop.pacing.between_steps(work)

    async def _update(
        self, given: Sequence[GivenTrajectory], *, serve: bool | None, checkpoint_name: str | None
    ) -> GivenUpdate:
        version = self._context.learner.adapter.version
        check_trajectories(given, version=version, limit=self._limit, num_token_ids=self._num_token_ids)
        if checkpoint_name is not None:
            self._context.checkpoints.check_name(checkpoint_name)
        groups = groups_of(given, await self._logprobs(given), version)
        trained = with_signal(groups, self._advantage)
        try:
            report = await self._loop.update_between_steps(trained, max_tokens=self._max_tokens, serve=serve)
        except TrainingStopped as error:  # the advantage does not accept a reward
            raise InvalidRequest(str(error), "trajectories") from error
        folder = await self._saved(checkpoint_name, report.version) if checkpoint_name is not None else None
        served = self._context.adapters.resolve(self._context.policy)
        update = GivenUpdate(
            version=report.version,
            is_served=served is not None and served.version == report.version,
            has_moved=report.skipped is None and report.has_moved,
            num_trajectories=len(given),
            num_trained=sum(len(group.trajectories) for group in trained),
            num_recomputed=sum(trajectory.logprobs is None for trajectory in given),
            num_tokens=report.num_tokens,
            loss=report.loss,
            gradient_norm=report.gradient_norm,
            kl_to_behaviour=report.kl_to_behaviour,
            skipped=report.skipped,
            checkpoint=folder,
        )
        logger.info("an update between steps on given trajectories: %s", update)
        return update

    async def _saved(self, name: str, version: int) -> str:
        try:
            return str(await self._loop.save_as(name))
        except CheckpointError as error:
            raise CheckpointError(f"version {version} was made, and {error}") from error

    async def _logprobs(self, given: Sequence[GivenTrajectory]) -> list[tuple[float, ...]]:
        """The given log-probs, or those of the engine, which equal the learner's bit for bit."""
        unknown = [trajectory for trajectory in given if trajectory.logprobs is None]
        completions = await self._context.engine.generate_all([self._request(trajectory) for trajectory in unknown])
        computed = (
            _last_logprobs(group[0], len(trajectory.tokens))
            for group, trajectory in zip(completions, unknown, strict=True)
        )
        return [next(computed) if trajectory.logprobs is None else trajectory.logprobs for trajectory in given]

    def _request(self, trajectory: GivenTrajectory) -> GenerationRequest:
        return GenerationRequest(
            request_id=f"given-{self._context.policy}-{next(self._count)}",
            prompt_tokens=(*trajectory.prompt_tokens, *trajectory.tokens),
            sampling=SamplingParams(max_tokens=0, temperature=trajectory.temperature, prompt_logprobs=0),
            model=of_alias(LATEST, self._context.policy),
            traffic="rollout",
            is_continued=False,
        )


def _last_logprobs(completion: Completion, count: int) -> tuple[float, ...]:
    scored = (completion.prompt_logprobs or ())[-count:]
    return tuple(0.0 if each is None else each.logprob for each in scored)
