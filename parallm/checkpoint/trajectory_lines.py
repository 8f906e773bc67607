"""Groups of trajectories as lines of JSON, one group a line; floats come back bit for bit."""

import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

from parallm.conversation import ToolCall
from parallm.types import Message, Problem, Trajectory, TrajectoryGroup, WeightSpan


def groups_to_lines(groups: Iterable[TrajectoryGroup]) -> str:
    return "".join(json.dumps(_group_to_json(group)) + "\n" for group in groups)


def groups_from_lines(lines: str) -> tuple[TrajectoryGroup, ...]:
    """Undo `groups_to_lines`. Raises ValueError, KeyError or TypeError on anything else."""
    return tuple(_group_from_json(json.loads(line)) for line in lines.splitlines())


def _group_to_json(group: TrajectoryGroup) -> dict[str, Any]:
    return {"problem": asdict(group.problem), "trajectories": [trajectory_to_json(t) for t in group.trajectories]}


def trajectory_to_json(trajectory: Trajectory) -> dict[str, Any]:
    # not `asdict`, which copies every single token
    values = {field.name: getattr(trajectory, field.name) for field in fields(trajectory)}
    return values | {
        "weight_versions": [asdict(span) for span in trajectory.weight_versions],
        "reward_parts": dict(trajectory.reward_parts),
    }


def _group_from_json(values: dict[str, Any]) -> TrajectoryGroup:
    problem = values["problem"]
    messages = tuple(_message_from_json(message) for message in problem["messages"])
    return TrajectoryGroup(
        problem=Problem(**(problem | {"messages": messages})),
        trajectories=tuple(trajectory_from_json(trajectory) for trajectory in values["trajectories"]),
    )


def _message_from_json(values: dict[str, Any]) -> Message:
    return Message(**(values | {"calls": tuple(ToolCall(**call) for call in values.get("calls", ()))}))


def trajectory_from_json(values: dict[str, Any]) -> Trajectory:
    """Undo `trajectory_to_json`. Raises KeyError or TypeError on anything else."""
    tuples = {name: tuple(values[name]) for name in ("prompt_tokens", "tokens", "loss_mask", "logprobs")}
    if (own := values.get("token_advantages")) is not None:
        tuples["token_advantages"] = tuple(own)
    spans = tuple(WeightSpan(**span) for span in values["weight_versions"])
    return Trajectory(**(values | tuples | {"weight_versions": spans}))
