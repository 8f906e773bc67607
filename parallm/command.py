"""What all commands share: compose, check, load the BLAS, run, and turn errors into one line and an exit code."""

import importlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeVar

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from parallm.checkpoint.folder_lock import folder_locked
from parallm.config import (
    RUNS_FOLDER,
    known_keys,
    recipe_files,
    register_defaults,
    register_recipes,
    run_folder,
    shipped,
    to_config,
)
from parallm.config_errors import explain_composition, repeated_keys
from parallm.device.blas import BlasReport, load_blas
from parallm.device.settings import DeviceSettings
from parallm.errors import ConfigError, FolderInUse, ParallmError


class CommandConfig(Protocol):
    """What every command's configuration has."""

    @property
    def device(self) -> DeviceSettings:
        """Must be followed before MLX is loaded."""


Config = TypeVar("Config", bound=CommandConfig)
Run = Callable[[Config, Path, BlasReport], int]
"""Runs to the end in the given folder and returns an exit code."""

ROOM_TO_START = 65_536
"""Bytes of the log and the configuration, with some to spare."""
SUCCESS, FAILED, WRONG_CONFIG, INTERRUPTED = 0, 1, 2, 130

logger = logging.getLogger(__name__)


def run_command(config_name: str, kind: type[Config], run: Run[Config]) -> int:
    """Compose conf/`config_name`.yaml with the command line; run it, or each job of a sweep. Returns the worst code."""
    codes = [SUCCESS]
    is_in_job = False

    def job(composed: DictConfig) -> None:
        nonlocal is_in_job
        is_in_job = True
        codes.append(_run_job(composed, kind, run))
        is_in_job = False

    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would else print and exit for
    try:
        if wrong := repeated_keys(sys.argv[1:]):
            raise ConfigError("\n".join(wrong))
        _register(kind)
        hydra.main(version_base="1.3", config_path=str(shipped("conf")), config_name=config_name)(job)()
    except ConfigError as error:
        return _complain(str(error), WRONG_CONFIG)
    except (HydraException, OmegaConfBaseException) as error:
        if wants_traceback:
            raise
        return _complain(explain_composition(error, sys.argv[1:], known_keys(kind)), WRONG_CONFIG)
    except OSError as error:
        if is_in_job:
            raise
        return _complain(_folder_trouble(Path(error.filename or RUNS_FOLDER), error), FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    return max(codes)


def _register(kind: type) -> None:
    OmegaConf.register_new_resolver("run_folder", run_folder, replace=True)
    OmegaConf.register_new_resolver("parallm_help", partial(help_text, known_keys(kind)), replace=True)
    register_defaults(kind)
    register_recipes(*_recipe_folders())


def _recipe_folders() -> tuple[Path, Path]:
    return shipped("recipes"), Path("recipes")  # the package's, then those of the current folder


def _run_job(composed: DictConfig, kind: type[Config], run: Run[Config]) -> int:
    folder = Path(HydraConfig.get().runtime.output_dir)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        sys.stderr.write(f"parallm: job {HydraConfig.get().job.num}: {HydraConfig.get().job.override_dirname}\n")
    try:
        config = to_config(composed, kind)
        try:
            _try_to_write(folder)
        except OSError as error:
            return _complain(_folder_trouble(folder, error), FAILED)
        with _alone_in(folder), _logging_to(folder / "run.log"):
            blas = load_blas(config.device)
            logger.info(blas.message)
            _require_mlx()
            (folder / "config.yaml").write_text(OmegaConf.to_yaml(composed, resolve=True))
            return run(config, folder, blas)
    except ConfigError as error:
        return _complain(str(error), WRONG_CONFIG)
    except ParallmError as error:
        return _complain(str(error), FAILED)
    finally:
        _remove_if_empty(folder)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Nothing of a run is written, nor a model loaded, while another process has its folder. Raises FolderInUse."""
    with ExitStack() as stack:
        try:
            stack.enter_context(folder_locked(folder))
        except FolderInUse as error:
            raise FolderInUse(
                f"the run folder {error}; wait until that has ended, or choose another folder with name=NAME or "
                "hydra.run.dir=FOLDER"
            ) from error
        yield


def _require_mlx() -> None:
    """Raises ConfigError where MLX is installed without a backend."""
    try:
        importlib.import_module("mlx.core")  # by name and not at the top: the BLAS had to come first
    except ImportError as error:
        raise ConfigError(
            f"MLX cannot start ({error}). On Linux an extra chooses its build: pip install 'parallm[cpu]', "
            "or 'parallm[cuda12]' or 'parallm[cuda13]' for an NVIDIA GPU"
        ) from error


def _complain(message: str, code: int) -> int:
    for line in message.splitlines():
        sys.stderr.write(f"parallm: {line}\n")
    return code


def _try_to_write(folder: Path) -> None:
    """Raises OSError if the folder does not take what every run writes: its log, its configuration."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(ROOM_TO_START))
        file.flush()


def _folder_trouble(folder: Path, error: OSError) -> str:
    nearest = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    reason = f"{nearest} is a file" if nearest.is_file() else error.strerror
    return (
        f"the run folder {folder} cannot be written: {reason}; make room for it, start in another folder, or name one "
        "with hydra.run.dir=FOLDER"
    )


def _remove_if_empty(folder: Path) -> None:
    """A run that ended before it wrote anything leaves no folder behind."""
    if RUNS_FOLDER.resolve() in folder.parents:
        with suppress(OSError):
            folder.rmdir()
            folder.parent.rmdir()


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Everything from INFO on goes to the file, warnings also to the terminal."""
    file = logging.FileHandler(path, delay=True)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    terminal = _Terminal(logging.WARNING)
    terminal.setFormatter(logging.Formatter("parallm: %(levelname)s: %(message)s"))
    package = logging.getLogger("parallm")
    package.setLevel(logging.INFO)
    package.addHandler(file)
    package.addHandler(terminal)
    try:
        yield
    finally:
        package.removeHandler(file)
        package.removeHandler(terminal)
        file.close()


class _Terminal(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is at the moment. A display that shows log records itself takes its place."""

    def __init__(self, level: int) -> None:
        logging.Handler.__init__(self, level)  # StreamHandler's own would set the stream

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # a property where the base has an attribute
        return sys.stderr


def help_text(known: Mapping[str, Any], program: str) -> str:
    """The answer to --help of a command with these keys; Hydra appends nothing to it."""
    groups = [
        f"  {folder.name}={'|'.join(sorted(path.stem for path in folder.glob('*.yaml')))}"
        for folder in sorted(path for path in shipped("conf").iterdir() if path.is_dir() and path.name in known)
    ]
    return "\n".join(
        [
            f"{program} {'[+recipe=NAME] ' if 'learner' in known else ''}[group=choice ...] [key=value ...]",
            *(_recipe_lines() if "learner" in known else []),
            "\nGroups (conf/):",
            *groups,
            "\nKeys of this run, each overridden as part.key=value:",
            "\n$CONFIG",
            "-m part.key=a,b runs every combination; --cfg job prints only the configuration.\n",
        ]
    )


def _recipe_lines() -> list[str]:
    recipes = [f"  +recipe={name:20} {_first_comment(path)}" for name, path in recipe_files(*_recipe_folders()).items()]
    return ["\nRecipes (yours in ./recipes too):", *recipes]


def _first_comment(path: Path) -> str:
    first = path.read_text().partition("\n")[0]
    return first.lstrip("# ") if first.startswith("#") else ""
