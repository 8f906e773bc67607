"""Completions that clients want a policy to learn from, on their way to it. Nothing is taken that was not asked for."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from parallm.errors import InvalidRequest, NotStored, Unavailable
from parallm.server.catalog import resolved
from parallm.server.engine_gateway import answer_id
from parallm.server.schemas import GenerationBody
from parallm.server.service import Service, Trajectories
from parallm.types import Completion, GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRecorder:
    """Hands the completions of one answer over."""

    requests: Sequence[GenerationRequest]
    """One for each prompt."""
    takers: Sequence[Trajectories | None]
    """For each request; None where a split has chosen a model that does not learn."""
    scoring_function: str | None
    metadata: Mapping[str, Any] = field(repr=False)
    note: Callable[[str, GenerationRequest, Completion], None]
    """Told of those that are kept."""

    def record(self, answer: str, prompt: int, place: int, completion: Completion) -> str | None:
        """The id of the new trajectory, that of choice `place` of `answer`, if there is one."""
        taker = self.takers[prompt]
        if taker is None:
            return None
        name, request = trajectory_id(answer, place), self.requests[prompt]
        if not taker.record(name, request, completion, self.scoring_function, self.metadata):
            return None
        self.note(name, request, completion)
        return name

    async def written(self) -> None:
        """Wait until the end of the process would lose none of those that were recorded.

        Where the disk does not take them, the log says so and rewards for them will be refused.
        """
        for taker in dict.fromkeys(taker for taker in self.takers if taker is not None):
            with suppress(NotStored):
                await taker.written()


def recorder_for(
    body: GenerationBody, service: Service, requests: Sequence[GenerationRequest]
) -> TrajectoryRecorder | None:
    """None unless the client has asked for it.

    Raises InvalidRequest for what could not be trained on, and Unavailable where nothing learns from clients.
    """
    if not body.collect_trajectory:
        _refuse_rest(body)
        return None
    metadata = {} if body.metadata is None else body.metadata
    if not isinstance(metadata, dict):
        raise InvalidRequest("metadata should be an object", "metadata")
    takers = [_taker(service, request) for request in requests]
    # the requests of one body differ in their prompts alone, and to check large metadata takes a while
    first = {id(taker): (taker, request) for taker, request in zip(takers, requests, strict=True)}
    for taker, request in first.values():
        if taker is not None:
            taker.check(request, body.scoring_function, metadata)
    _check_ids(service, requests)
    return TrajectoryRecorder(
        requests=requests,
        takers=takers,
        scoring_function=body.scoring_function,
        metadata=metadata,
        note=service.note_trajectory,
    )


def _check_ids(service: Service, requests: Sequence[GenerationRequest]) -> None:
    """Raise InvalidRequest where a client's `request_id` would give a trajectory the id of another one."""
    answer = answer_id(requests[0].request_id)
    places = range(sum(request.n for request in requests))
    ids = [trajectory_id(answer, place) for place in places]
    if any(taker.knows(name) for name in ids for taker in service.trajectories.values()):
        raise InvalidRequest(
            "request_id names a request whose trajectories are known already; send another one or leave it out",
            "request_id",
        )


def trajectory_id(answer: str, place: int) -> str:
    """Of choice `place` of an answer."""
    return f"{answer}-{place}"


def _refuse_rest(body: GenerationBody) -> None:
    if body.scoring_function is not None:
        raise InvalidRequest("scoring_function needs collect_trajectory: true", "scoring_function")
    if body.metadata not in (None, {}):
        raise InvalidRequest("metadata is kept only with collect_trajectory: true; leave it out", "metadata")


def _taker(service: Service, request: GenerationRequest) -> Trajectories | None:
    if not service.trajectories:
        raise Unavailable(
            "nothing here learns from what clients ask for; train with rollout=live, or leave out collect_trajectory"
        )
    policy = resolved(request.model, service.catalog(), service.policies).partition("@")[0]
    taker = service.trajectories.get(policy)
    if taker is None and request.split is None:
        names = ", ".join(service.trajectories)
        raise InvalidRequest(f"{request.model[:100]!r} does not learn from what clients ask for; ask {names}", "model")
    return taker
