"""What one step gets of those who bring groups by themselves: clients, or the environments of an Atropos run."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from parallm.types import TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    groups: tuple[TrajectoryGroup, ...]
    with_signal: tuple[TrajectoryGroup, ...]
    """Those to train on."""
    num_stale: int
    """What has become too old for a step since the last one was taken: trajectories of clients, groups of Atropos."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """More for the step's row of metrics.jsonl, under their flat names."""
