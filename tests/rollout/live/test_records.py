"""Trajectories as JSON come back as they were."""

import json

from parallm.rollout.live.records import read_trajectory, to_json
from parallm.types import Trajectory, WeightSpan


def test_a_trajectory_comes_back_bit_for_bit() -> None:
    trajectory = Trajectory(
        problem_id="p",
        prompt_tokens=(1, 2),
        tokens=(3, 4),
        loss_mask=(True, False),
        logprobs=(-0.1, -1e-300),
        temperature=0.7,
        weight_versions=(WeightSpan(version=3, start=0, end=2),),
        reward_parts={"right": 1.0},
        reward=1.0,
        text="\u00e9 #### 4\n\u2028",
        finish_reason="stop",
        token_advantages=(0.5, -0.25),
    )
    assert read_trajectory(json.loads(json.dumps(trajectory, default=to_json))) == trajectory
