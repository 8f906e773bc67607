"""The trainers of a run, one for each of its policies: their folders, lines on the screen, ends and common status."""

import asyncio
import dataclasses
import io
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from parallm.checkpoint.manager import check_named, checkpoint_folders
from parallm.config.run_folder import SWEEP_PREFIX, TRAJECTORIES, has_serving_state, has_trajectories
from parallm.config.run_kinds import keys_without_effect
from parallm.config.schema import RunConfig, policy_configs
from parallm.errors import ConfigError, InvalidRequest, ParallmError, TrainingStopped, Unavailable, UnknownModel
from parallm.integrations.atropos.api import Registration
from parallm.integrations.atropos.launcher import with_free_port
from parallm.integrations.atropos.source import AtroposSource
from parallm.learner.loss.presets import resolve_objective
from parallm.metrics.display import Display, LoggedDisplay, NoDisplay
from parallm.metrics.eta import Schedule
from parallm.metrics.formatting import short_path
from parallm.metrics.line_display import LinesDisplay
from parallm.metrics.record import RunRecorder
from parallm.model.adapters.table import AdapterTable
from parallm.reports import TrainingStatus
from parallm.rollout.live.source import LiveSource
from parallm.rollout.reward_model import RewardModel
from parallm.rollout.scoring import MAX_REWARD
from parallm.trainer.given_update import GivenUpdates
from parallm.trainer.loop import Loop
from parallm.trainer.pacing import Pacing
from parallm.types import GivenTrajectory, GivenUpdate

ENDED = ("finished", "failed")
_at_work: ContextVar[str] = ContextVar("policy", default="")
"""Name of the policy whose trainer runs in this task, where there are several."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class PolicyRun:
    """One adapter in training."""

    name: str
    config: RunConfig
    folder: Path
    """The folder of the run, or one below it where there are several policies."""
    title: str
    """Its name for people."""
    figures: str
    """What the names of its figures begin with."""
    recorder: RunRecorder
    display: Display
    """That of the run, or lines that begin with the policy's name where there are several."""
    traffic: LiveSource | None
    """Where it learns from what clients ask for."""
    atropos: AtroposSource | None = None
    """Where it learns from what the environments of an Atropos run post."""
    trainer: Loop | None = None  # set by build.py as soon as there is a model
    adapters: AdapterTable | None = None  # the trainer's versions; set with it
    resumed_version: int = 0  # whose weights the trainer goes on with; set with it
    reward_model: RewardModel | None = None  # of its rollouts; set with the trainer
    given_updates: GivenUpdates | None = None  # None where it trains on no completions; set with the trainer

    @property
    def status(self) -> TrainingStatus:
        if self.trainer is None:
            return TrainingStatus(state="starting", total_steps=self.config.trainer.steps)
        pacing = self.trainer.pacing
        status = dataclasses.replace(self.trainer.status, checkpoint_saves=self.trainer.num_saves)
        if pacing.is_pausing:
            return dataclasses.replace(status, state="pausing")
        if status.state in ("collecting", "paused"):  # of a loop that may not have looked since the last call
            return dataclasses.replace(status, state="paused" if pacing.is_paused else "collecting")
        return status

    @property
    def was_stopped(self) -> bool:
        return self.trainer is not None and self.trainer.was_stopped


def make_policy_runs(
    config: RunConfig, folder: Path, display: Display, schedules: Mapping[str, Schedule]
) -> tuple[PolicyRun, ...]:
    """The policies of a run: those that it names, else `policy` alone. Makes their folders. Raises ConfigError."""
    configs = {name: _with_port(own) for name, own in policy_configs(config).items()}
    folders = {name: folder / name if config.policies else folder for name in configs}
    _check_resume(config, folder, set(folders.values()))
    _warn_of_twins(configs)
    _warn_of_unused(configs, named=bool(config.policies))
    figures = config.metrics.figures or config.name
    runs = tuple(
        PolicyRun(
            name=name,
            config=own,
            folder=folders[name],
            title=f"{config.name}: {name}" if config.policies else config.name,
            figures=f"{figures}.{name}" if config.policies else figures,
            recorder=RunRecorder(folders[name], own.metrics, dataclasses.asdict(own)),
            traffic=_traffic(own, folders[name]),
            display=_named_display(name, own, schedules[name]) if config.policies else display,
        )
        for name, own in configs.items()
    )
    for run in runs:
        if run.config.rollout.source == "atropos":
            run.atropos = AtroposSource(run.config.rollout, run.folder, partial(_registration, run))
    return runs


async def train_all(runs: Sequence[PolicyRun]) -> dict[str, BaseException]:
    """Run all trainers to their ends, even if one fails; return what those that failed have raised, by policy."""
    with _named_log_records():
        ended = await asyncio.gather(*(_train(run, is_alone=len(runs) == 1) for run in runs), return_exceptions=True)
    return {run.name: error for run, error in zip(runs, ended, strict=True) if error is not None}


def raise_failures(failures: Mapping[str, BaseException], *, is_alone: bool) -> None:
    """Raise the error of the only policy, or one with a line for each that failed; return if there is none."""
    for error in failures.values():
        if is_alone or not isinstance(error, ParallmError):
            raise error
    if failures:
        raise TrainingStopped("\n".join(f"{name}: {error}" for name, error in failures.items()))


def stop_all(runs: Sequence[PolicyRun]) -> None:
    """Let every trainer finish its step, save and leave."""
    for run in runs:
        if run.trainer is not None:
            run.trainer.stop()


def how_to_go_on(config: RunConfig, folder: Path, runs: Sequence[PolicyRun]) -> str:
    """What continues a run that was stopped."""
    newest = [checkpoint_folders(run.folder)[-1] for run in runs if checkpoint_folders(run.folder)]
    if not (newest or has_trajectories(folder) or has_serving_state(folder)):
        return "no step had finished, so the same command begins anew"
    if folder.parent.name.startswith(SWEEP_PREFIX):
        return "\n".join(f"to go on, set checkpoint.resume={short_path(path)}" for path in newest)
    resume = "" if config.checkpoint.resume == "auto" else " with checkpoint.resume=auto"
    return f"to go on, give the same command again{resume}"


def combined_status(statuses: Mapping[str, TrainingStatus]) -> TrainingStatus:
    """That of the only policy; of several, the progress of the one with the most to do, and each by its name."""
    if len(statuses) == 1:
        return next(iter(statuses.values()))
    last = min(statuses.values(), key=lambda one: (one.state in ENDED, one.step - one.total_steps))
    message = "; ".join(f"{name}: {one.message}" for name, one in statuses.items() if one.message)
    return dataclasses.replace(last, metrics={}, message=message, policies=statuses)


class NamedLines(io.StringIO):
    """Standard output with a name at the beginning of each line that is not empty."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def write(self, text: str) -> int:
        lines = text.splitlines(keepends=True)
        return sys.stdout.write("".join(f"{self._name}: {line}" if line.strip() else line for line in lines))

    def flush(self) -> None:
        sys.stdout.flush()


async def _train(run: PolicyRun, *, is_alone: bool) -> None:
    assert run.trainer is not None, "build.py makes the trainers first"
    _at_work.set("" if is_alone else run.name)
    try:
        await run.trainer.run()
    except Exception as error:
        if not is_alone:  # the others may go on for hours
            logger.error("training has failed, the other policies go on: %s", error)
        raise


@contextmanager
def _named_log_records() -> Iterator[None]:
    """Let log messages of a policy's trainer begin with its name."""
    usual = logging.getLogRecordFactory()

    def named(*arguments: Any, **options: Any) -> logging.LogRecord:
        record = usual(*arguments, **options)
        if name := _at_work.get():
            record.msg = f"{name}: {record.msg}"  # a policy's name holds no percent sign
        return record

    logging.setLogRecordFactory(named)
    try:
        yield
    finally:
        logging.setLogRecordFactory(usual)


def _named_display(name: str, config: RunConfig, schedule: Schedule) -> Display:
    is_off = config.metrics.display == "off"
    shown = NoDisplay() if is_off else LinesDisplay(NamedLines(name), schedule)
    return LoggedDisplay(shown, schedule, name)


def _traffic(config: RunConfig, folder: Path) -> LiveSource | None:
    if config.rollout.source != "live":
        return None
    min_reward = 0.0 if resolve_objective(config.learner).advantage == "max_rl" else -MAX_REWARD
    return LiveSource(config.rollout, folder / TRAJECTORIES, min_reward=min_reward)


def _with_port(config: RunConfig) -> RunConfig:
    """With the port of a run-api that this run starts."""
    rollout = config.rollout
    atropos = with_free_port(rollout.atropos)
    return dataclasses.replace(config, rollout=dataclasses.replace(rollout, atropos=atropos))


def _registration(run: PolicyRun) -> Registration:
    """What the API of an Atropos run is told of this one now."""
    rollout = run.config.rollout
    return Registration(
        batch_size=rollout.problems_per_step * rollout.group_size,
        max_token_len=rollout.atropos.max_token_len,
        checkpoint_dir=str(run.folder.absolute()),
        save_checkpoint_interval=run.config.checkpoint.every,
        starting_step=run.status.step,
        num_steps=run.config.trainer.steps,
    )


def _check_resume(config: RunConfig, folder: Path, folders: set[Path]) -> None:
    """Raise CheckpointError for a named folder that is no checkpoint, and ConfigError where resuming would leave
    checkpoints of another policy behind."""
    if config.checkpoint.resume not in ("never", "auto"):
        check_named(Path(config.checkpoint.resume), folder)
    if config.checkpoint.resume != "auto":
        return
    found = {path for path in (folder, *folder.glob("*/")) if checkpoint_folders(path)}
    if lost := found - folders:
        names = ", ".join(sorted(path.name if path != folder else "a run without policies" for path in lost))
        raise ConfigError(
            f"checkpoint.resume=auto: {folder} holds checkpoints of {names}, which this run does not train; name the "
            "same policies, or begin anew with checkpoint.resume=never"
        )


def _warn_of_unused(configs: Mapping[str, RunConfig], *, named: bool) -> None:
    for name, config in configs.items():
        for line in keys_without_effect(config):
            logger.warning("%s%s", f"policies.{name}." if named else "", line)


def _warn_of_twins(configs: Mapping[str, RunConfig]) -> None:
    for (one, config), (other, other_config) in combinations(configs.items(), 2):
        if config == other_config:
            logger.warning("policies %s and %s differ in nothing, so both learn the same", one, other)


class TrainingControl:
    """About one policy by name, or all of them. For the asyncio thread.

    Everything raises UnknownModel for a policy that is not trained, and Unavailable before training begins and after.
    """

    def __init__(self, runs: Sequence[PolicyRun]) -> None:
        self._runs = runs

    def pause(self, policy: str | None) -> None:
        """Begin no further step; the present one ends first."""
        for pacing in self._chosen(policy).values():
            pacing.pause()

    def resume(self, policy: str | None) -> None:
        for pacing in self._chosen(policy).values():
            pacing.resume()

    async def step(self, policy: str | None, checkpoint_name: str | None = None) -> Mapping[str, str]:
        """Wait for one more step: a new one where paused, which stays so, else the one at work.

        Then save under a name, if one is given, in folders that stay; they are returned by policy.
        """
        chosen = self._chosen(policy)
        trainers = [run.trainer for run in self._runs if run.name in chosen and run.trainer is not None]
        if checkpoint_name is not None:
            for trainer in trainers:
                trainer.check_name(checkpoint_name)
        await asyncio.gather(*(pacing.step() for pacing in chosen.values()))
        if checkpoint_name is None:
            return {}
        saves = [trainer.pacing.between_steps(partial(trainer.save_as, checkpoint_name)) for trainer in trainers]
        return {name: str(folder) for name, folder in zip(chosen, await asyncio.gather(*saves), strict=True)}

    async def train_on(
        self, policy: str | None, given: Sequence[GivenTrajectory], *, serve: bool | None, checkpoint_name: str | None
    ) -> GivenUpdate:
        """One update on these after the present step, which is none itself; see `GivenUpdates.update`."""
        self._chosen(policy)
        runs = [run for run in self._runs if policy in (None, run.name)]
        if len(runs) > 1:
            raise InvalidRequest(f"name the policy to train: {', '.join(run.name for run in runs)}", "policy")
        if runs[0].given_updates is None:
            raise Unavailable("this run learns from learner.data and not from completions with rewards")
        return await runs[0].given_updates.update(given, serve=serve, checkpoint_name=checkpoint_name)

    async def checkpoint(self, policy: str | None) -> Mapping[str, str]:
        """Save after the present step; the folder of each policy's checkpoint. Raises CheckpointError."""
        chosen = self._chosen(policy)
        folders = await asyncio.gather(*(pacing.checkpoint() for pacing in chosen.values()))
        return {name: str(folder) for name, folder in zip(chosen, folders, strict=True)}

    def _chosen(self, policy: str | None) -> dict[str, Pacing]:
        names = [run.name for run in self._runs]
        if policy is not None and policy not in names:
            raise UnknownModel(f"no policy {policy!r} is trained here; there are {', '.join(names)}")
        trainers = {run.name: run.trainer for run in self._runs if policy in (None, run.name)}
        begun = {name: trainer.pacing for name, trainer in trainers.items() if trainer is not None}
        if len(begun) < len(trainers):
            raise Unavailable("training has not begun yet; try again when its status is not `starting`")
        return begun
