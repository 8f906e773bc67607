"""Acts on the guard's verdicts: logs, writes the faulty trajectories, rolls back. `Loop` calls it."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallm.learner.faults import named_culprits
from parallm.metrics.json_lines import to_json, write_whole
from parallm.metrics.step import StepMetrics
from parallm.reports import Culprit, FaultKind, UpdateReport
from parallm.rollout.scoring import error_location
from parallm.trainer.context import TrainerContext
from parallm.trainer.guard import Guard, Verdict
from parallm.trainer.publication import Publication
from parallm.types import FaultyEpisode, Problem, TrajectoryGroup

MAX_FAULTY = 16
"""Completions without a reward that a step keeps of each kind, because an environment may fail at all of them."""

logger = logging.getLogger(__name__)


class Recovery:
    """Runs on the asyncio thread, between a step's update and its end."""

    def __init__(self, context: TrainerContext, guard: Guard, publication: Publication) -> None:
        self._context = context
        self._guard = guard
        self._publication = publication

    async def handle(
        self, metrics: StepMetrics, *, trained: Sequence[TrajectoryGroup], sampled: Sequence[TrajectoryGroup] = ()
    ) -> Verdict:
        """Judge the step and act on the verdict; the caller stops the run.

        `trained`: the groups of the update. `sampled`: all groups that the policy sampled.
        """
        verdict, update = self._guard.judge(metrics, sampled), metrics.update
        for text in verdict.warnings:
            logger.warning("step %d: %s", metrics.step, text)
        if update is not None and update.left_out:
            logger.warning(
                "step %d: %d completions were left out of training, whose rewards float32 cannot hold (%s)",
                metrics.step,
                len(update.left_out),
                named_culprits(update.left_out),
            )
        if update is not None and update.fault is not None:
            logger.warning("step %d: %s", metrics.step, verdict.reason)
        folder = self._context.recorder.folder
        file = write_faults(folder, metrics.step, update=update, trained=trained, sampled=sampled)
        if file is not None:
            logger.warning("step %d: the trajectories to blame are in %s", metrics.step, file)
        if verdict.action == "roll_back":
            await self._roll_back(metrics.step)
        return verdict

    async def _roll_back(self, step: int) -> None:
        bad = self._context.learner.adapter
        good = await asyncio.wrap_future(self._context.device.call(self._context.learner.roll_back))
        if good is bad:
            logger.warning("step %d: there is no update to undo; training goes on with version %d", step, bad.version)
            return
        self._publication.roll_back(good)
        logger.warning(
            "step %d: rolled back from version %d to the weights of version %s, which are version %d now; requests "
            "that run finish on the version they began with",
            step,
            bad.version,
            good.parent,
            good.version,
        )


def write_faults(
    folder: Path,
    step: int,
    *,
    update: UpdateReport | None,
    trained: Sequence[TrajectoryGroup],
    sampled: Sequence[TrajectoryGroup],
) -> Path | None:
    """Write RUN_FOLDER/faults/step_N.jsonl: culprits and dropped completions of `update`, and completions of `sampled`
    without a reward.

    `trained` are the groups of the update. Returns the file, None if there is nothing to write. A disk error costs the
    file, not the run.
    """
    rows = []
    if update is not None:
        rows += [_culprit_row(step, "reward", culprit, trained[culprit.group]) for culprit in update.left_out]
        rows += [_culprit_row(step, update.fault, culprit, trained[culprit.group]) for culprit in update.culprits]
    locations: set[str] = set()
    rows += [_faulty_row(step, problem, episode, locations) for problem, episode in _first_of_each_kind(sampled)]
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


def _first_of_each_kind(groups: Sequence[TrajectoryGroup]) -> Iterator[tuple[Problem, FaultyEpisode]]:
    counts: Counter[str] = Counter()
    for group in groups:
        for episode in group.faulty:
            counts[episode.kind] += 1
            if counts[episode.kind] <= MAX_FAULTY:
                yield group.problem, episode


def _culprit_row(step: int, fault: FaultKind | None, culprit: Culprit, group: TrajectoryGroup) -> dict[str, Any]:
    """Everything needed to compute it again; values that JSON cannot hold are null and named in `reason`."""
    return {
        "step": step,
        "fault": fault,
        "reason": culprit.reason,
        **_problem_row(group.problem),
        "index": culprit.index,
        "group_rewards": group.rewards,
        **asdict(group.trajectories[culprit.index]),
    }


def _faulty_row(step: int, problem: Problem, episode: FaultyEpisode, seen: set[str]) -> dict[str, Any]:
    """Everything needed to score it again. Only the first completion that failed at a location has the traceback;
    `seen` holds the locations so far."""
    location = error_location(episode)
    is_new = bool(location) and location not in seen
    seen.add(location)
    return {
        "step": step,
        "fault": episode.kind,
        "reason": episode.detail,
        **({"traceback": episode.traceback} if is_new else {}),
        **_problem_row(problem),
        "text": episode.text,
        "tokens": episode.tokens,
    }


def _problem_row(problem: Problem) -> dict[str, Any]:
    return {
        "problem_id": problem.problem_id,
        "prompt": [{"role": message.role, "content": message.content} for message in problem.messages],
        "answer": problem.answer,
    }
