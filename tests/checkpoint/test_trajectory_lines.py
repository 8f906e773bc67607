"""Groups as lines of JSON come back as they were."""

from parallm.checkpoint.trajectory_lines import groups_from_lines, groups_to_lines
from parallm.conversation import ToolCall
from parallm.types import Message, Problem, Trajectory, TrajectoryGroup, WeightSpan


def test_groups_come_back_bit_for_bit() -> None:
    one = Trajectory(
        problem_id="p",
        prompt_tokens=(1, 2),
        tokens=(3, 4),
        loss_mask=(True, False),
        logprobs=(-0.1, -1e-300),
        temperature=0.7,
        weight_versions=(WeightSpan(version=3, start=0, end=2),),
        reward_parts={"right": 1.0},
        reward=1.0,
        text="ab",
        finish_reason="stop",
        token_advantages=(0.5, -0.25),
    )
    called = Message(role="assistant", content="", calls=(ToolCall(name="add", arguments='{"a": 1}'),))
    problem = Problem(problem_id="p", messages=(Message(role="user", content="?"), called), answer="")
    groups = (TrajectoryGroup(problem=problem, trajectories=(one,)),)
    assert groups_from_lines(groups_to_lines(groups)) == groups
