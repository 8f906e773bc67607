"""Wire types of the routes that steer the engine and the splits."""

from typing import Annotated, Literal

from pydantic import Field

from parallm.server.schemas import Wire

Name = Annotated[str, Field(min_length=1, max_length=512)]


class NoFields(Wire):
    """A body that may be empty."""


class PauseBody(Wire):
    """Of `/pause_generation`: SGLang's names of the modes beside ours."""

    mode: Literal["abort", "wait", "keep", "retract", "in_place"] = "abort"


class PauseAnswer(Wire):
    status: Literal["paused", "resumed"]
    is_paused: bool


class IsPaused(Wire):
    is_paused: bool


class AbortManyBody(Wire):
    request_ids: Annotated[list[Name], Field(max_length=4096, fail_fast=True)]


class AbortAnswer(Wire):
    status: Literal["aborted"]
    aborted: int


class AbortOneBody(Wire):
    """SGLang's."""

    rid: str = ""
    abort_all: bool = False


class QueueAnswer(Wire):
    num_running: int
    """Completions that decode now, rollouts of training included."""
    num_waiting: int
    """Requests that wait for rows."""
    num_in_flight: int
    """Requests of HTTP that the engine has."""
    num_held: int
    """Requests of HTTP that wait for `/resume`."""
    is_paused: bool


class CachesAnswer(Wire):
    success: Literal[True]


class SplitBody(Wire):
    weights: dict[str, Annotated[float, Field(ge=0)]]


class VersionAnswer(Wire):
    num_requests: int
    num_completions: int
    num_tokens: int
    num_rewards: int
    reward_mean: float | None


class SplitAnswer(Wire):
    name: str
    shares: dict[str, float]
    """Of a name without a split: empty."""
    versions: dict[str, VersionAnswer]


class SplitList(Wire):
    data: list[SplitAnswer]


LARGEST_REWARD = 1e9
"""The sum of any number of them is finite, so that no client makes a version's mean unknown for ever."""


class RewardBody(Wire):
    id: Name
    """Of an answer, or the `request_id` that it was asked with."""
    reward: Annotated[float, Field(ge=-LARGEST_REWARD, le=LARGEST_REWARD)]


class RewardAnswer(Wire):
    status: Literal["ok"]
