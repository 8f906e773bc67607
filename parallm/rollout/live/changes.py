"""What can happen to a buffer, each change as a line of its file."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, assert_never

from parallm.rollout.live.recorded import Recorded, from_values, to_values

TRAINED = "trained"
"""Why trajectories left that a checkpoint has learned from; all other reasons are drops."""


@dataclass(frozen=True, slots=True)
class Added:
    one: Recorded


@dataclass(frozen=True, slots=True)
class Rewarded:
    trajectory_id: str
    reward: float
    parts: Mapping[str, float]
    at: float


@dataclass(frozen=True, slots=True)
class Reserved:
    """A step learns from them; they are its own until a checkpoint holds it."""

    ids: tuple[str, ...]
    step: int


@dataclass(frozen=True, slots=True)
class GivenBack:
    """They wait again: nothing that is left has learned from them."""

    ids: tuple[str, ...]
    has_failed: bool
    """Whether their step changed nothing because of a fault."""


@dataclass(frozen=True, slots=True)
class Left:
    ids: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Branched:
    """The weights of `version` are those of `now` from here on; see `Recorded.relabelled`."""

    version: int
    now: int


@dataclass(frozen=True, slots=True)
class Counted:
    """Everything that the file said before it was written anew."""

    num_collected: int
    num_left: Mapping[str, int]
    departed: Mapping[str, tuple[str, float | None]]
    """Reason and reward of the newest ids that have left."""


Change: TypeAlias = Added | Rewarded | Reserved | GivenBack | Left | Branched | Counted


def to_line(change: Change) -> dict[str, Any]:
    match change:
        case Added(one):
            return {"added": to_values(one)}
        case Rewarded(trajectory_id, reward, parts, at):
            return {"rewarded": trajectory_id, "reward": reward, "parts": dict(parts), "at": at}
        case Reserved(ids, step):
            return {"reserved": ids, "step": step}
        case GivenBack(ids, has_failed):
            return {"given_back": ids, "failed": has_failed}
        case Left(ids, reason):
            return {"gone": ids, "reason": reason}
        case Branched(version, now):
            return {"branched": version, "now": now}
        case Counted(num_collected, num_left, departed):
            return {"collected": num_collected, "left": dict(num_left), "departed": dict(departed)}
        case _:
            assert_never(change)


def from_line(line: Mapping[str, Any]) -> Change | None:
    """Undo `to_line`; None for a line of no known kind. Raises KeyError, TypeError or ValueError for a broken one."""
    match line:
        case {"added": added}:
            return Added(from_values(added))
        case {"rewarded": str(trajectory_id), "reward": reward, "parts": parts, "at": at}:
            return Rewarded(trajectory_id, float(reward), dict(parts), float(at))
        case {"reserved": ids, "step": int(step)}:
            return Reserved(tuple(ids), step)
        case {"given_back": ids, "failed": bool(has_failed)}:
            return GivenBack(tuple(ids), has_failed)
        case {"gone": ids, "reason": str(reason)}:
            return Left(tuple(ids), reason)
        case {"branched": int(version), "now": int(now)}:
            return Branched(version, now)
        case {"collected": int(num_collected), "left": dict(num_left), "departed": dict(departed)}:
            return Counted(
                num_collected, num_left, {name: (reason, reward) for name, (reason, reward) in departed.items()}
            )
        case _:
            return None
