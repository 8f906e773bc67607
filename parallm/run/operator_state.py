"""The state that operators have set in earlier processes, and the adapters of `server.adapters`.

`run/runtime.py` opens the table, and the commands restore it before the server answers.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from parallm.checkpoint.adapter_store import AdapterStore
from parallm.checkpoint.manager import set_aside
from parallm.checkpoint.persistent_table import PersistentTable
from parallm.checkpoint.serving_state import ServingFolder, ServingState
from parallm.config.run_folder import NETS, SERVING
from parallm.device.thread import DeviceThread
from parallm.errors import AdapterError, ConfigError, FolderInUse
from parallm.model.adapters.table import AdapterTable
from parallm.model.shared_model import SharedModel
from parallm.server.settings import AUTO, OFF, ServerSettings
from parallm.tasks.net_folder import NetFolder
from parallm.types import BASE, BEST, LATEST

logger = logging.getLogger(__name__)


def check_given(adapters: Mapping[str, str], taken: Mapping[str, str]) -> None:
    """Raise ConfigError with a line for each name in `server.adapters` that is taken.

    `taken` has further names with their meanings.
    """
    meanings = {BASE: "the model without an adapter", LATEST: "the newest version", BEST: "the best version", **taken}
    taken_names = [name for name in adapters if name in meanings]
    wrong = [f"server.adapters.{name}: {name} is {meanings[name]}; choose another name" for name in taken_names]
    if wrong:
        raise ConfigError("\n".join(wrong))


def open_table(
    settings: ServerSettings,
    folder: Path | None,
    device: DeviceThread,
    model: SharedModel,
    table: AdapterTable,
    *,
    trained: Iterable[str],
    continues: bool,
) -> PersistentTable:
    """Return `table` with the state of operators, which `server.state` finds below `folder`.

    The state of another running process is not used. Unless the run `continues`, a state in `folder` is set aside.
    Raises CheckpointError for a state that cannot be read.
    """
    if settings.state == OFF or folder is None:
        return PersistentTable(device, table, trained=trained)
    path = Path(settings.state).expanduser()
    if settings.state == AUTO:
        path = folder / f"{SERVING}{model.sha256[:12]}"  # another base under the same name has its own state
        if not continues and path.exists():
            set_aside(path, "this run begins anew (checkpoint.resume)")
    kept, state = ServingFolder(path, model), ServingState()
    try:
        state = kept.read()
    except FolderInUse as error:
        logger.warning("what operators have set is not restored: %s", error)
    return PersistentTable(device, table, trained=trained, folder=kept, state=state)


def open_nets(settings: ServerSettings, folder: Path | None, *, continues: bool) -> NetFolder | None:
    """Return the place of policy nets that clients publish, below `folder` or that of `server.state`; None without
    one. Unless the run `continues`, nets in `folder` are set aside."""
    if settings.state == OFF or folder is None:
        return None
    if settings.state != AUTO:
        return NetFolder(Path(settings.state).expanduser() / "nets")
    path = folder / NETS
    if not continues and path.exists():
        set_aside(path, "this run begins anew (checkpoint.resume)")
    return NetFolder(path)


async def restore(
    kept: PersistentTable, store: AdapterStore, given: Mapping[str, str], versions: Mapping[str, int]
) -> list[str]:
    """Restore the state of operators and serve the adapters `given`. Return a line about each.

    `versions` are those of `PersistentTable.restore`. Raises CheckpointError, AdapterError.
    """
    await kept.restore(versions)
    texts = [f"restored {summary} from {kept.folder}"] if (summary := kept.state.summary()) else []
    for name, path in given.items():
        if name in kept.state.highest:
            texts.append(f"{name} is as operators have left it, not as server.adapters.{name}={path}")
            continue
        try:
            card = await store.give(name, path)
        except AdapterError as error:
            raise AdapterError(f"server.adapters.{name}={path}: {error}") from error
        texts.append(f"{name}@{card.version} is {path}")
    return texts
