"""Wire types of the routes about trajectories."""

from typing import Annotated

from pydantic import Field

from parallm.server.schemas import Wire

MOST_PARTS = 64
Part = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
"""It is shown on terminals: no control characters."""


class TrajectoryRewardBody(Wire):
    reward: float | Annotated[dict[Part, float], Field(min_length=1, max_length=MOST_PARTS)]
    """One number, or parts by name."""


class TrajectoryRewardAnswer(Wire):
    id: str
    reward: float
    """The weighted sum of the parts."""


class TrajectoryStatistics(Wire):
    num_waiting: int
    num_rewarded: int
    num_reserved: int
    oldest_seconds: float
    num_collected: int
    num_trained: int
    dropped: dict[str, int]


class TrajectoryList(Wire):
    data: dict[str, TrajectoryStatistics]
    """By policy."""
