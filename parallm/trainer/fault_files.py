"""The trajectories to blame for a fault, kept on disk: RUN_FOLDER/faults/step_N.jsonl, one a line."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallm.metrics.json_lines import to_json, write_whole
from parallm.reports import Culprit, UpdateReport
from parallm.types import Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)


def write_faults(folder: Path, step: int, groups: Sequence[TrajectoryGroup], update: UpdateReport) -> Path | None:
    """Write the culprits of `update`, which has seen `groups`. A disk that refuses costs the file and not the run."""
    rows = [_row(step, update, one, groups[one.group]) for one in update.culprits]
    if not rows:
        return None
    file = folder / "faults" / f"step_{step}.jsonl"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, "".join(to_json(row) + "\n" for row in rows))
    except OSError as error:
        logger.warning("cannot write %s: %s", file, error)
        return None
    return file


def _row(step: int, update: UpdateReport, culprit: Culprit, group: TrajectoryGroup) -> dict[str, Any]:
    """All that is needed to compute it again; what JSON cannot hold is null and stands in `reason`."""
    trajectory: Trajectory = group.trajectories[culprit.index]
    return {
        "step": step,
        "fault": update.fault,
        "reason": culprit.reason,
        "problem_id": culprit.problem_id,
        "index": culprit.index,
        "prompt": [{"role": message.role, "content": message.content} for message in group.problem.messages],
        "answer": group.problem.answer,
        "text": trajectory.text,
        "reward": trajectory.reward,
        "reward_parts": trajectory.reward_parts,
        "group_rewards": group.rewards,
        "finish_reason": trajectory.finish_reason,
        "temperature": trajectory.temperature,
        "weight_versions": [
            {"version": span.version, "start": span.start, "end": span.end} for span in trajectory.weight_versions
        ],
        "prompt_tokens": trajectory.prompt_tokens,
        "tokens": trajectory.tokens,
        "loss_mask": trajectory.loss_mask,
        "logprobs": trajectory.logprobs,
    }
