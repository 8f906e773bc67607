"""Adapter folders by their names: FOLDER of an adapter, a checkpoint or a run, or FOLDER@VERSION. Only reads."""

from collections.abc import Sequence
from pathlib import Path

from parallm.checkpoint.format import ADAPTER, MANIFEST, read_version
from parallm.checkpoint.manager import best_checkpoint, checkpoint_folders
from parallm.errors import AdapterError
from parallm.model.adapters.configs import CONFIG

NEWEST = "newest"
ALL = "all"


def find_adapters(where: str) -> tuple[Path, ...]:
    """The folders that `where` names: one, or every checkpoint of a run for FOLDER@all.

    A run's folder means its best checkpoint by evaluation, or the newest if none was evaluated. Raises AdapterError
    with the choices.
    """
    path, choice = _split(where)
    if (path / CONFIG).is_file():
        return (_without_choice(path, choice, where),)
    if (path / MANIFEST).is_file():
        return (_without_choice(path / ADAPTER, choice, where),)
    checkpoints = checkpoint_folders(path)
    if checkpoints:
        return tuple(folder / ADAPTER for folder in _chosen(checkpoints, choice, where))
    if (path / ADAPTER / CONFIG).is_file():
        return (_without_choice(path / ADAPTER, choice, where),)
    if several := [folder for folder in sorted(path.glob("*/")) if checkpoint_folders(folder)]:
        links = [folder for folder in several if folder.is_symlink()]  # `latest`, of what may be a long list
        raise AdapterError(f"{where} holds several policies or runs; name one: {', '.join(map(str, links or several))}")
    raise AdapterError(f"{where} is neither an adapter, a checkpoint nor a run: {_contents(path)}")


def find_adapter(where: str) -> Path:
    """The one folder that `where` names. Raises AdapterError."""
    folders = find_adapters(where)
    if len(folders) > 1:
        versions = [read_version(folder.parent) for folder in folders]
        raise AdapterError(f"{where} names {len(folders)} adapters; choose one of the versions {versions}")
    return folders[0]


def exists(path: Path) -> bool:
    """`Path.exists`, also for names that are too long for the disk."""
    try:
        return path.exists()
    except OSError:
        return False


def _split(where: str) -> tuple[Path, str]:
    """The folder, and the text after its last @ unless a folder has that whole name."""
    path, at, choice = where.rpartition("@")
    whole = Path(where).expanduser()
    folder, choice = (Path(path).expanduser(), choice) if at and not exists(whole) else (whole, "")
    # a link such as `latest` may point to another run later; a recorded path must not change
    return (folder.parent / folder.readlink() if folder.is_symlink() else folder), choice


def _without_choice(folder: Path, choice: str, where: str) -> Path:
    if choice and choice not in (NEWEST, ALL):
        raise AdapterError(
            f"{where}: {folder} holds a single adapter; leave out @{choice}, or name the folder of a run"
        )
    return folder


def _chosen(checkpoints: Sequence[Path], choice: str, where: str) -> Sequence[Path]:
    if choice == ALL:
        return checkpoints
    if choice == NEWEST:
        return checkpoints[-1:]
    if not choice:
        return (best_checkpoint(checkpoints) or checkpoints[-1],)
    versions = {read_version(folder): folder for folder in checkpoints}
    if choice.isdecimal() and int(choice) in versions:
        return (versions[int(choice)],)
    choices = ", ".join(str(version) for version in versions if version is not None)
    raise AdapterError(
        f"{where}: there is no version {choice!r}; checkpoints are kept of the versions {choices}; @{NEWEST} and "
        f"@{ALL} name the newest and all of them"
    )


def _contents(path: Path) -> str:
    if not path.is_dir():
        return "there is no such folder"
    names = sorted(child.name for child in path.iterdir())
    return f"it holds {', '.join(names[:8]) or 'nothing'}{' and more' if len(names) > 8 else ''}"
