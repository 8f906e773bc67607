"""Completions with `collect_trajectory`, on their way to the policy that learns from them.

`generation.respond` makes one recorder for each such answer. Nothing is recorded that a client has not asked for.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from parallm.errors import InvalidRequest, NotStored, Unavailable
from parallm.server.catalog import resolved
from parallm.server.control.traffic_splits import VersionStatistics
from parallm.server.engine_gateway import answer_id
from parallm.server.interfaces import Trajectories
from parallm.server.openai.completion_schemas import GenerationBody
from parallm.server.service import Service
from parallm.types import Completion, GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRecorder:
    """Records the completions of one answer."""

    requests: Sequence[GenerationRequest]
    """One for each prompt."""
    stores: Sequence[Trajectories | None]
    """One for each request; None where a split has chosen a model that does not learn."""
    scoring_function: str | None
    metadata: Mapping[str, Any] = field(repr=False)
    statistics: VersionStatistics

    def record(self, answer: str, prompt: int, index: int, completion: Completion) -> str | None:
        """Return the id of the new trajectory, that of choice `index` of `answer`, if there is one."""
        store = self.stores[prompt]
        if store is None:
            return None
        name, request = trajectory_id(answer, index), self.requests[prompt]
        if not store.record(name, request, completion, self.scoring_function, self.metadata):
            return None
        self.statistics.note_trajectory(name, request, completion)
        return name

    async def written(self) -> None:
        """Wait until the end of the process would lose no recorded completion.

        If the disk is full, the log says so and rewards for them will be refused.
        """
        for store in dict.fromkeys(store for store in self.stores if store is not None):
            with suppress(NotStored):
                await store.written()


def recorder_for(body: GenerationBody, service: Service, requests: Sequence[GenerationRequest]) -> TrajectoryRecorder:
    """Return the recorder of a body with `collect_trajectory`.

    Raises InvalidRequest for what could not be trained on, and Unavailable where nothing learns from clients.
    """
    metadata = {} if body.metadata is None else body.metadata
    if not isinstance(metadata, dict):
        raise InvalidRequest("metadata should be an object", "metadata")
    stores = [_store(service, request) for request in requests]
    # the requests of one body differ in their prompts alone, and to check large metadata takes a while
    first = {id(store): (store, request) for store, request in zip(stores, requests, strict=True)}
    for store, request in first.values():
        if store is not None:
            store.check(request, body.scoring_function, metadata)
    _check_ids(service, requests)
    return TrajectoryRecorder(
        requests=requests,
        stores=stores,
        scoring_function=body.scoring_function,
        metadata=metadata,
        statistics=service.statistics,
    )


def _check_ids(service: Service, requests: Sequence[GenerationRequest]) -> None:
    """Raise InvalidRequest where a client's `request_id` would give a trajectory the id of another one."""
    answer = answer_id(requests[0].request_id)
    ids = [trajectory_id(answer, index) for index in range(sum(request.n for request in requests))]
    if any(store.knows(name) for name in ids for store in service.trajectories.values()):
        raise InvalidRequest(
            "request_id names a request whose trajectories are known already; send another one or leave it out",
            "request_id",
        )


def trajectory_id(answer: str, index: int) -> str:
    """Return the id of choice `index` of an answer."""
    return f"{answer}-{index}"


def _store(service: Service, request: GenerationRequest) -> Trajectories | None:
    if not service.trajectories:
        raise Unavailable(
            "nothing here learns from what clients ask for; train with rollout=live, or leave out collect_trajectory"
        )
    policy = resolved(request.model, service.catalog(), service.policies).partition("@")[0]
    store = service.trajectories.get(policy)
    if store is None and request.split is None:
        names = ", ".join(service.trajectories)
        raise InvalidRequest(f"{request.model[:100]!r} does not learn from what clients ask for; ask {names}", "model")
    return store
