"""The life of every command: compose, check, load BLAS and MLX, run, turn errors into one line and an exit code."""

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

try:
    import hydra
except ModuleNotFoundError as error:
    sys.exit(f"parallm: {error}, for {sys.executable}; `source .venv/bin/activate` chooses the Python that has it")
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from parallm import interrupts
from parallm.config.command_line import asks_version, help_topics
from parallm.config.compose import TRAIN, register, with_asked_environment
from parallm.config.errors import explain_composition
from parallm.config.help import help_page
from parallm.config.process_log import LogForm, error_line, logging_to
from parallm.config.run_folder import (
    CONFIG,
    LOG,
    RUNS_FOLDER,
    check_writable,
    folder_error,
    locked_run_folder,
    remove_unused,
)
from parallm.config.schema import (
    COMMANDS,
    FrontConfig,
    LogConfig,
    LogFileConfig,
    RunConfig,
    ServeConfig,
    ServiceLogConfig,
    keys_elsewhere,
    known_keys,
    shipped,
    to_config,
)
from parallm.config.user_file import with_user_file
from parallm.device.blas import BlasReport, load_blas
from parallm.device.load_mlx import load_mlx
from parallm.device.settings import BlasSettings
from parallm.distributed.launcher import launch, launch_ranks, must_launch
from parallm.distributed.servers import must_start_servers, run_servers
from parallm.distributed.team import EXCHANGE_FAILED, join_team
from parallm.errors import ConfigError, ExchangeFailed, ParallmError
from parallm.metrics.machine import describe_versions
from parallm.metrics.sweep import Job, report_sweep
from parallm.run.workers import shared_facts

Run = Callable[[Any, Path, BlasReport], int]
"""Runs a configuration to its end in a folder and returns an exit code."""
WIRING: Mapping[str, str] = {
    "train": "parallm.run.train:run_training",
    "serve": "parallm.run.serve:run_serving",
    "evaluate": "parallm.run.evaluate:run_evaluation",
    "export": "parallm.run.export:run_export",
    "front": "parallm.run.front:run_front",
}
"""Module and `Run` of each command. All but the front import MLX, so the BLAS must be loaded first."""

SUCCESS, FAILED, WRONG_CONFIG, INTERRUPTED = 0, 1, os.EX_CONFIG, 130

logger = logging.getLogger(__name__)


class _NoFurtherJob(KeyboardInterrupt):
    """Ends a sweep after a signal has stopped one of its jobs. Hydra reports every other kind of exception."""


def run_command(name: str, run: Run | None = None) -> int:
    """Answer --help or --version; or compose conf/`name`.yaml with the command line and run each job.

    Returns the worst exit code. `run` replaces the command's own.
    """
    arguments = sys.argv[1:]
    if asks_version(arguments):
        sys.stdout.write(f"{describe_versions()}\n")
        return SUCCESS
    interrupts.outlive_hang_up()
    interrupts.obey_starter()
    try:
        topics = help_topics(arguments)
        if topics is not None:
            sys.stdout.write(help_page(name, topics))
            return SUCCESS
        sys.argv[1:] = arguments = with_user_file(name, arguments)
        register(name, COMMANDS[name], arguments)
        return _compose_and_run(name, run)
    except ConfigError as error:
        return _complain(str(error), WRONG_CONFIG)


def _compose_and_run(name: str, run: Run | None) -> int:
    kind = COMMANDS[name]
    jobs: list[Job] = []
    is_in_job = is_sweep = False

    def job(composed: DictConfig) -> None:
        nonlocal is_in_job, is_sweep
        is_in_job, is_sweep = True, HydraConfig.get().mode == RunMode.MULTIRUN
        folder, overrides = Path(HydraConfig.get().runtime.output_dir), tuple(HydraConfig.get().overrides.task)
        code = _run_job(composed, folder, name, run)
        jobs.append(Job(number=len(jobs), overrides=overrides, folder=folder, exit_code=code))
        is_in_job = False
        if interrupts.were_received():
            raise _NoFurtherJob

    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises errors instead of printing them and exiting
    try:
        hydra.main(version_base="1.3", config_path=str(shipped("conf")), config_name=name)(job)()
    except (HydraException, OmegaConfBaseException) as error:
        if wants_traceback:
            raise
        wrong = explain_composition(error, sys.argv[1:], known_keys(kind), keys_elsewhere(kind))
        return _complain(wrong, WRONG_CONFIG)
    except OSError as error:
        if is_in_job:
            raise
        return _complain(str(folder_error(Path(error.filename or RUNS_FOLDER), error)), FAILED)
    except _NoFurtherJob:
        pass
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        if is_sweep and jobs:
            sweep = jobs[0].folder.parent
            remove_unused(sweep)
            if sweep.is_dir():
                report_sweep(jobs, sweep, sys.stdout)
    return max((job.exit_code for job in jobs), default=SUCCESS)


def _run_job(composed: DictConfig, folder: Path, name: str, run: Run | None) -> int:
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        sys.stderr.write(f"parallm: job {HydraConfig.get().job.num}: {HydraConfig.get().job.override_dirname}\n")
    code = FAILED
    form: LogForm = "text"
    try:
        config = to_config(with_asked_environment(composed), COMMANDS[name])
        form = config.log_format
        if isinstance(config, RunConfig):
            code = _run_worker(config, composed, folder, run)
        elif isinstance(config, FrontConfig):
            with _logging(config):
                code = _wired(name)(config)
        elif isinstance(config, ServeConfig) and must_start_servers(config.distributed):
            code = run_servers(config.distributed, config.server, sys.argv[1:])
        elif isinstance(config, ServeConfig) and config.distributed.tensor_parallel > 1:
            code = _run_rank(config, run)
        else:
            with _logging(config):
                blas = _load(config.device)
                run = run or _wired(name)
                code = run(config, folder, blas)
    except ConfigError as error:
        code = _complain(str(error), WRONG_CONFIG, form)
    except ExchangeFailed as error:
        code = _complain(str(error), EXCHANGE_FAILED, form)
    except ParallmError as error:
        code = _complain(str(error), FAILED, form)
    finally:
        if code != SUCCESS or name != TRAIN:
            remove_unused(folder)
    return code


def _run_worker(config: RunConfig, composed: DictConfig, folder: Path, run: Run | None) -> int:
    """Train in `folder`: alone, as one of the workers that a launcher has started, or by launching them."""
    if config.distributed.engine != "off" and HydraConfig.get().mode == RunMode.MULTIRUN:
        raise ConfigError("distributed: a sweep runs its jobs in one process; start one run at a time, without -m")
    if must_launch(config.distributed):
        return launch(config.distributed, config.server, sys.argv[1:], folder, config.checkpoint.resume)
    with join_team(config.distributed, folder, shared_facts(config)) as team:
        if team.folder != folder:
            remove_unused(folder)
        check_writable(team.folder)
        with locked_run_folder(team.folder), _logging(config, team.folder / LOG):
            blas = _load(config.device)
            (team.folder / CONFIG).write_text(OmegaConf.to_yaml(composed, resolve=True))
            return team.bound(run or _wired(TRAIN))(config, team.folder, blas)


def _run_rank(config: ServeConfig, run: Run | None) -> int:
    """Serve a base that is divided: as one of the ranks that a launcher has started, or by launching them."""
    folder, workers = RUNS_FOLDER / config.name, config.distributed.ranks
    if must_launch(workers):
        return launch_ranks(workers, sys.argv[1:], folder)
    with (
        join_team(workers, folder, shared_facts(config)) as team,
        _logging(config),
    ):
        blas = _load(config.device)
        return team.bound(run or _wired("serve"))(config, team.folder, blas)


def _logging(config: LogConfig, run_log: Path | None = None) -> AbstractContextManager[None]:
    given = config.log_file if isinstance(config, ServiceLogConfig) else None
    path = run_log if given is None else Path(given).expanduser()
    max_bytes = config.log_max_bytes if isinstance(config, LogFileConfig) else None
    return logging_to(path, config.log_level, config.log_format, max_bytes)


def _load(device: BlasSettings) -> BlasReport:
    """Load the BLAS, then MLX."""
    blas = load_blas(device)
    logger.info(blas.message)
    with collections_paused():
        load_mlx(hides_torch=True)
    return blas


def _wired(name: str) -> Any:
    """Import what runs a command."""
    with collections_paused():
        return resolve_name(WIRING[name])


@contextmanager
def collections_paused() -> Iterator[None]:
    """Import without looking for garbage then or later: modules make little, and looking took an eighth of a start."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def _complain(message: str, code: int, form: LogForm = "text") -> int:
    for line in message.splitlines():
        sys.stderr.write(f"parallm: {line}\n" if form == "text" else f"{error_line(line)}\n")
    return code
