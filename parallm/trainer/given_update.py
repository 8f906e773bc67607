"""Updates between two steps, on trajectories that clients bring."""

import itertools
import logging
from collections.abc import Sequence
from functools import partial

from parallm.errors import CheckpointError, InvalidRequest, TrainingStopped
from parallm.learner.settings import Advantage
from parallm.model_names import of_alias
from parallm.rollout.given import check_given, groups_of, with_signal
from parallm.trainer.loop import Loop
from parallm.trainer.parts import Parts
from parallm.types import LATEST, GenerationRequest, SamplingParams
from parallm.updates import GivenTrajectory, GivenUpdate

logger = logging.getLogger(__name__)


class GivenUpdates:
    """Of one policy. For the asyncio thread. An update makes a version and counts as no step."""

    def __init__(
        self,
        loop: Loop,
        parts: Parts,
        *,
        advantage: Advantage,
        max_off_policy_steps: int,
        max_tokens: int,
        num_token_ids: int,
    ) -> None:
        """`max_tokens` is the limit of a completion, as for the learner's `update`."""
        self._loop = loop
        self._parts = parts
        self._advantage = advantage
        self._limit = max_off_policy_steps
        self._max_tokens = max_tokens
        self._num_token_ids = num_token_ids
        self._count = itertools.count()

    async def update(
        self, given: Sequence[GivenTrajectory], *, serve: bool | None, checkpoint_name: str | None
    ) -> GivenUpdate:
        """Train on these after the present step. `serve`: whether clients get the new version; None: as of other steps.

        Raises InvalidRequest for what cannot be learned from, Unavailable when training has ended, and CheckpointError
        where the update was made and could not be saved under its name.
        """
        work = partial(self._update, given, serve=serve, checkpoint_name=checkpoint_name)
        return await self._loop.pacing.between_steps(work)

    async def _update(
        self, given: Sequence[GivenTrajectory], *, serve: bool | None, checkpoint_name: str | None
    ) -> GivenUpdate:
        version = self._parts.learner.adapter.version
        check_given(given, version=version, limit=self._limit, num_token_ids=self._num_token_ids)
        if checkpoint_name is not None:
            self._parts.checkpoints.check_name(checkpoint_name)
        groups = groups_of(given, await self._logprobs(given), version)
        trained = with_signal(groups, self._advantage)
        try:
            report = await self._loop.update_between_steps(trained, max_tokens=self._max_tokens, serve=serve)
        except TrainingStopped as error:  # of a reward that the advantage cannot take
            raise InvalidRequest(str(error), "trajectories") from error
        folder = await self._saved(checkpoint_name, report.version) if checkpoint_name is not None else None
        served = self._parts.adapters.resolve(self._parts.policy)
        found = GivenUpdate(
            version=report.version,
            is_served=served is not None and served.version == report.version,
            num_trajectories=len(given),
            num_trained=sum(len(group.trajectories) for group in trained),
            num_recomputed=sum(one.logprobs is None for one in given),
            num_tokens=report.num_tokens,
            loss=report.loss,
            gradient_norm=report.gradient_norm,
            kl_to_behaviour=report.kl_to_behaviour,
            skipped=report.skipped,
            checkpoint=folder,
        )
        logger.info("an update between steps on given trajectories: %s", found)
        return found

    async def _saved(self, name: str, version: int) -> str:
        try:
            return str(await self._loop.save_as(name))
        except CheckpointError as error:
            raise CheckpointError(f"version {version} was made, and {error}") from error

    async def _logprobs(self, given: Sequence[GivenTrajectory]) -> list[tuple[float, ...]]:
        """As they were given; others are asked of the engine, which computes the very numbers of the learner."""
        unknown = [one for one in given if one.logprobs is None]
        rows = await self._parts.engine.generate_all([self._request(one) for one in unknown])
        known = {id(one): row[0].prompt_logprobs or () for one, row in zip(unknown, rows, strict=True)}
        found = []
        for one in given:
            told = known.get(id(one), ())[len(one.prompt_tokens) :]
            found.append(one.logprobs or tuple(0.0 if each is None else each.logprob for each in told))
        return found

    def _request(self, one: GivenTrajectory) -> GenerationRequest:
        return GenerationRequest(
            request_id=f"given-{self._parts.policy}-{next(self._count)}",
            prompt_tokens=(*one.prompt_tokens, *one.tokens),
            sampling=SamplingParams(max_tokens=0, temperature=one.temperature, prompt_logprobs=0),
            model=of_alias(LATEST, self._parts.policy),
            traffic="rollout",
            is_continued=False,
        )
