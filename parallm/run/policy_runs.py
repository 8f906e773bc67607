"""The policies of a training run, each with a trainer: folders, displays, common status, control over HTTP.

`run/train.py` makes a `PolicySpec` of each policy before the model is loaded, and a `PolicyRun` after.
"""

import asyncio
import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from parallm.checkpoint.manager import check_named, checkpoint_folders
from parallm.config.run_folder import RUNS_FOLDER, SWEEP_PREFIX, has_begun
from parallm.config.run_kinds import keys_of_what_is_off, keys_without_effect
from parallm.config.schema import RunConfig, policy_configs
from parallm.errors import ConfigError, InvalidRequest, ParallmError, TrainingStopped, Unavailable, UnknownModel
from parallm.integrations.atropos.launcher import with_free_port
from parallm.integrations.atropos.source import AtroposSource
from parallm.metrics.display import Display
from parallm.metrics.eta import Schedule
from parallm.metrics.formatting import short_path
from parallm.metrics.happenings import Happenings
from parallm.metrics.live_run import LiveRun, WatchedDisplay
from parallm.metrics.log_capture import PROGRESS
from parallm.metrics.record import RunRecorder
from parallm.metrics.rollout_folder import RolloutFolder
from parallm.metrics.run_folders import RunFolders
from parallm.metrics.settings import MetricsSettings
from parallm.metrics.step import FlatRow, evaluation_row
from parallm.metrics.watching import Watching
from parallm.model.adapters.table import AdapterTable
from parallm.reports import TrainingStatus
from parallm.rollout.live.source import LiveSource
from parallm.rollout.reward_model import RewardModel
from parallm.server.operation.acts import Act
from parallm.trainer.given_update import GivenUpdates
from parallm.trainer.loop import Loop
from parallm.types import GivenTrajectory, GivenUpdate

ENDED = ("finished", "failed")
_at_work: ContextVar[str] = ContextVar("policy", default="")
"""Name of the policy whose trainer runs in this task, if there are several."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """A policy to train, before its model is loaded."""

    name: str
    config: RunConfig
    folder: Path
    """The folder of the run, or one below it for each of several policies."""
    title: str
    """Name for people."""
    figures: str
    """Prefix of the names of its figures."""
    recorder: RunRecorder
    display: Display
    """The display of the run, or lines that begin with the policy's name if there are several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRun:
    """A policy with its trainer, ready for the first step."""

    spec: PolicySpec
    trainer: Loop
    adapters: AdapterTable
    """The versions that the trainer publishes."""
    resumed_version: int
    """The version of the checkpoint that the trainer continues from."""
    version: int
    """The learner's version before the first step: above all numbers that operators have used."""
    reward_model: RewardModel | None
    """The reward model of its rollouts, if it has one."""
    live: LiveSource | None
    """The trajectories of clients, for rollout=live."""
    atropos: AtroposSource | None
    """The trajectories of Atropos environments, for rollout=atropos."""
    given_updates: GivenUpdates | None
    """Updates on trajectories of clients; None for supervised training, reward models and several workers."""
    rollouts: RolloutFolder | None
    """The completions of its steps; None where none are kept."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def source(self) -> LiveSource | AtroposSource | None:
        return self.live or self.atropos

    @property
    def status(self) -> TrainingStatus:
        pacing = self.trainer.pacing
        status = dataclasses.replace(self.trainer.status, checkpoint_saves=self.trainer.num_saves)
        if pacing.is_pausing:
            return dataclasses.replace(status, state="pausing")
        if status.state in ("collecting", "paused"):  # the loop may not have run since the last call of pacing
            return dataclasses.replace(status, state="paused" if pacing.is_paused else "collecting")
        return status


MakeRecorder = Callable[[Path, MetricsSettings, Mapping[str, Any]], RunRecorder]


def make_policy_specs(
    config: RunConfig,
    folder: Path,
    display: Display,
    schedules: Mapping[str, Schedule],
    make_recorder: MakeRecorder,
) -> tuple[PolicySpec, ...]:
    """Return the policies of a run, `policy` alone if it names none. Makes their folders. Raises ConfigError."""
    configs = {name: _with_port(policy) for name, policy in policy_configs(config).items()}
    folders = {name: folder / name if config.policies else folder for name in configs}
    _check_resume(config, folder, set(folders.values()))
    for (first, first_config), (second, second_config) in combinations(configs.items(), 2):
        if first_config == second_config:
            logger.warning("policies %s and %s differ in nothing, so both learn the same", first, second)
    for line in keys_of_what_is_off(config.server, config.registry, config.metrics):
        logger.warning("%s", line)
    for name, policy in configs.items():
        for line in keys_without_effect(policy):
            logger.warning("%s%s", f"policies.{name}." if config.policies else "", line)
    figures = config.metrics.figures or config.name
    named_display = partial(Display, None if config.metrics.display == "off" else sys.stdout, is_logged=True)
    return tuple(
        PolicySpec(
            name=name,
            config=policy,
            folder=folders[name],
            title=f"{config.name}: {name}" if config.policies else config.name,
            figures=f"{figures}.{name}" if config.policies else figures,
            recorder=make_recorder(folders[name], policy.metrics, dataclasses.asdict(policy)),
            display=named_display(name=name, schedule=schedules[name]) if config.policies else display,
        )
        for name, policy in configs.items()
    )


def watched(
    specs: Sequence[PolicySpec], schedules: Mapping[str, Schedule], folder: Path
) -> tuple[tuple[PolicySpec, ...], Watching]:
    """Return the policies with recorders and displays that tell their news, and what tells them on."""
    own = folder.absolute()
    folders = RunFolders([RUNS_FOLDER], current=own)
    watching = Watching(run_id=f"{own.parent.name}~{own.name}", folders=folders)
    watching.runs = {spec.name: LiveRun(spec.name, watching.news, schedules[spec.name]) for spec in specs}
    for spec in specs:
        spec.recorder.live = watching.runs[spec.name]
    return tuple(
        dataclasses.replace(spec, display=WatchedDisplay(spec.display, watching.runs[spec.name])) for spec in specs
    ), watching


async def begin_watching(
    watching: Watching, policies: Sequence[PolicyRun], happenings: Mapping[str, Happenings]
) -> None:
    """Fill the histories with what resumed runs have written, and let statuses be those of the trainers."""
    for policy in policies:
        live = watching.runs[policy.name]
        await asyncio.to_thread(live.load, policy.spec.folder)
        live.status = partial(_status_of, policy)
        live.rollouts = policy.rollouts
        live.note_in(happenings[policy.name])


def _status_of(policy: PolicyRun) -> TrainingStatus:
    return policy.status


def happenings_of(policies: Sequence[PolicyRun], *, writes: bool) -> dict[str, Happenings]:
    """Return what happens to each policy, with what its run has noted before."""
    return {
        policy.name: Happenings(policy.spec.folder, policy.name, partial(_step_of, policy), writes=writes)
        for policy in policies
    }


def _step_of(policy: PolicyRun) -> int:
    return policy.trainer.status.step


def note_act(happenings: Mapping[str, Happenings], act: Act) -> None:
    """Note an act with the policy that it names, or with all of them; a refused one is no mark of its kind."""
    names = [str(act.values[field]).partition("@")[0] for field in ("policy", "name", "model") if field in act.values]
    named = [name for name in names if name in happenings]
    for name in named[:1] or happenings:
        kind, text = (act.kind, act.detail) if act.refused is None else ("refused", act.text)
        happenings[name].add(kind, what=act.what, by=act.by, text=text, values=act.values, refused=act.refused)


async def train_all(runs: Sequence[PolicyRun]) -> dict[str, BaseException]:
    """Run all trainers to their ends, even if one fails. Return the errors by policy."""
    with _named_log_records():
        ended = await asyncio.gather(*(_train(run, is_alone=len(runs) == 1) for run in runs), return_exceptions=True)
    return {run.name: error for run, error in zip(runs, ended, strict=True) if error is not None}


def raise_failures(failures: Mapping[str, BaseException], *, is_alone: bool) -> None:
    """Raise the error of the only policy, or one with a line for each that failed, if any."""
    for error in failures.values():
        if is_alone or not isinstance(error, ParallmError):
            raise error
    if failures:
        raise TrainingStopped("\n".join(f"{name}: {error}" for name, error in failures.items()))


def how_to_resume(config: RunConfig, folder: Path, runs: Sequence[PolicyRun]) -> str:
    """Return what continues a stopped run."""
    if not has_begun(folder):
        return "no step had finished, so the same command begins anew"
    if folder.parent.name.startswith(SWEEP_PREFIX):
        newest = [checkpoints[-1] for run in runs if (checkpoints := checkpoint_folders(run.spec.folder))]
        return "\n".join(f"to go on, set checkpoint.resume={short_path(path)}" for path in newest)
    resume = "" if config.checkpoint.resume == "auto" else " with checkpoint.resume=auto"
    return f"to go on, give the same command again{resume}"


def combined_status(statuses: Mapping[str, TrainingStatus]) -> TrainingStatus:
    """Return the status of the only policy; for several, that of the one with the most steps left, and each by name."""
    if len(statuses) == 1:
        return next(iter(statuses.values()))
    last = min(statuses.values(), key=lambda status: (status.state in ENDED, status.step - status.total_steps))
    message = "; ".join(f"{name}: {status.message}" for name, status in statuses.items() if status.message)
    return dataclasses.replace(last, metrics={}, message=message, policies=statuses)


async def _train(run: PolicyRun, *, is_alone: bool) -> None:
    _at_work.set("" if is_alone else run.name)
    try:
        await run.trainer.run()
    except Exception as error:
        if not is_alone:  # the other policies may train for hours
            logger.error("training has failed, the other policies go on: %s", error)
        raise


@contextmanager
def _named_log_records() -> Iterator[None]:
    """Prefix the log messages of each policy's trainer with its name."""
    usual = logging.getLogRecordFactory()

    def named(*arguments: Any, **options: Any) -> logging.LogRecord:
        record = usual(*arguments, **options)
        if (name := _at_work.get()) and record.name != PROGRESS:  # a display has named it already
            record.msg = f"{name}: {record.msg}"  # a policy's name holds no percent sign
        return record

    logging.setLogRecordFactory(named)
    try:
        yield
    finally:
        logging.setLogRecordFactory(usual)


def _with_port(config: RunConfig) -> RunConfig:
    """Return the configuration with a free port for a run-api that this run starts."""
    rollout = dataclasses.replace(config.rollout, atropos=with_free_port(config.rollout.atropos))
    return dataclasses.replace(config, rollout=rollout)


def _check_resume(config: RunConfig, folder: Path, folders: set[Path]) -> None:
    """Raise CheckpointError if a named folder is no checkpoint, and ConfigError if it omits a checkpointed policy."""
    if config.checkpoint.resume not in ("never", "auto"):
        check_named(Path(config.checkpoint.resume), folder)
    if config.checkpoint.resume != "auto":
        return
    checkpointed = {path for path in (folder, *folder.glob("*/")) if checkpoint_folders(path)}
    if omitted := checkpointed - folders:
        names = ", ".join(sorted(path.name if path != folder else "a run without policies" for path in omitted))
        raise ConfigError(
            f"checkpoint.resume=auto: {folder} holds checkpoints of {names}, which this run does not train; name the "
            "same policies, or begin anew with checkpoint.resume=never"
        )


class TrainingControl:
    """Clients' control of the trainers: one policy by name, or all of them. For the asyncio thread.

    All methods raise UnknownModel for an unknown policy, and Unavailable after training.
    """

    def __init__(self, runs: Sequence[PolicyRun]) -> None:
        self._runs = runs

    def pause(self, policy: str | None) -> None:
        """Begin no further step; the present one ends first."""
        for run in self._chosen(policy):
            run.trainer.pacing.pause()

    def resume(self, policy: str | None) -> None:
        for run in self._chosen(policy):
            run.trainer.pacing.resume()

    async def step(self, policy: str | None, checkpoint_name: str | None = None) -> Mapping[str, str]:
        """Wait for one more step: a new one if training is paused, which it stays, otherwise the running one.

        Then save under `checkpoint_name`, if given, and return the folders by policy.
        """
        runs = self._chosen(policy)
        if checkpoint_name is not None:
            for run in runs:
                run.trainer.check_name(checkpoint_name)
        await asyncio.gather(*(run.trainer.pacing.step() for run in runs))
        if checkpoint_name is None:
            return {}
        saves = (run.trainer.pacing.between_steps(partial(run.trainer.save_as, checkpoint_name)) for run in runs)
        return self._by_name(runs, await asyncio.gather(*saves))

    async def train_on(
        self, policy: str | None, given: Sequence[GivenTrajectory], *, serve: bool | None, checkpoint_name: str | None
    ) -> GivenUpdate:
        """Make one update after the present step, without counting a step; see `GivenUpdates.update`."""
        runs = self._chosen(policy)
        if len(runs) > 1:
            raise InvalidRequest(f"name the policy to train: {', '.join(run.name for run in runs)}", "policy")
        if runs[0].given_updates is None:
            raise Unavailable(
                "this run takes no completions with rewards: it learns from learner.data, or has several workers"
            )
        return await runs[0].given_updates.update(given, serve=serve, checkpoint_name=checkpoint_name)

    async def checkpoint(self, policy: str | None) -> Mapping[str, str]:
        """Save after the present step and return the folder of each policy's checkpoint. Raises CheckpointError."""
        runs = self._chosen(policy)
        return self._by_name(runs, await asyncio.gather(*(run.trainer.pacing.checkpoint() for run in runs)))

    async def evaluate(self, policy: str | None) -> Mapping[str, FlatRow]:
        """Evaluate the newest versions after the present step, unless they were. Returns the rows by policy."""
        runs = self._chosen(policy)
        reports = await asyncio.gather(*(run.trainer.pacing.evaluate() for run in runs))
        return {run.name: evaluation_row(report) for run, report in zip(runs, reports, strict=True)}

    async def stop(self, policy: str | None) -> None:
        """End training after the present step, save, and serve on. Returns when the policies have ended.

        Raises TrainingStopped for one that could not save, or ended by another error.
        """
        runs = self._chosen(policy)
        runs = [run for run in runs if not run.trainer.pacing.has_ended] or runs
        for run in runs:
            run.trainer.pacing.finish()
        await asyncio.gather(*(run.trainer.pacing.ended() for run in runs))
        if failures := [f"{run.name}: {run.status.message}" for run in runs if run.status.state == "failed"]:
            raise TrainingStopped("; ".join(failures))

    def _chosen(self, policy: str | None) -> list[PolicyRun]:
        names = [run.name for run in self._runs]
        if policy is not None and policy not in names:
            raise UnknownModel(f"no policy {policy!r} is trained here; there are {', '.join(names)}")
        return [run for run in self._runs if policy in (None, run.name)]

    @staticmethod
    def _by_name(runs: Sequence[PolicyRun], folders: Sequence[Path]) -> dict[str, str]:
        return {run.name: str(folder) for run, folder in zip(runs, folders, strict=True)}
