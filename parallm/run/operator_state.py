"""What operators have set in earlier processes, and the adapters that this one is started with: opened and restored."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from parallm.checkpoint.adapter_store import AdapterStore
from parallm.checkpoint.manager import set_aside
from parallm.checkpoint.persistent_table import PersistentTable
from parallm.checkpoint.serving_state import ServingFolder, ServingState
from parallm.config.run_folder import SERVING
from parallm.device.thread import DeviceThread
from parallm.errors import AdapterError, ConfigError, FolderInUse
from parallm.model.adapters.table import AdapterTable
from parallm.model.shared_model import SharedModel
from parallm.server.settings import ServerSettings
from parallm.types import BASE, BEST, LATEST

OFF, AUTO = "off", "auto"

logger = logging.getLogger(__name__)


def check_given(adapters: Mapping[str, str], taken: Mapping[str, str]) -> None:
    """Raise ConfigError with a line for each name in `server.adapters` that means something else.

    `taken` are names with what they mean.
    """
    meanings = {BASE: "the model without an adapter", LATEST: "the newest version", BEST: "the best version", **taken}
    wrong = [
        f"server.adapters.{name}: {name} is {meanings[name]}; choose another name"
        for name in adapters
        if name in meanings
    ]
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
    goes_on: bool,
) -> PersistentTable:
    """`table`, with what operators have left in a folder below `folder`, as `server.state` says.

    The state of another process that is still there is not gone on with. Where not `goes_on` a state in `folder` is set
    aside. Raises CheckpointError for a state that cannot be read.
    """
    if settings.state == OFF or folder is None:
        return PersistentTable(device, table, trained=trained)
    place = Path(settings.state).expanduser()
    if settings.state == AUTO:
        place = folder / f"{SERVING}{model.sha256[:12]}"  # another base under the same name has a state of its own
        if not goes_on and place.exists():
            set_aside(place, "this run begins anew (checkpoint.resume)")
    kept, state = ServingFolder(place, model), ServingState()
    try:
        state = kept.read()
    except FolderInUse as error:
        logger.warning("what operators have set is not restored: %s", error)
    return PersistentTable(device, table, trained=trained, folder=kept, state=state)


async def restore(
    kept: PersistentTable, store: AdapterStore, given: Mapping[str, str], versions: Mapping[str, int]
) -> list[str]:
    """Go on with what operators have left, and serve the adapters `given`; what was done, a line each.

    `versions` as in `PersistentTable.restore`. Raises CheckpointError, AdapterError.
    """
    await kept.restore(versions)
    texts = [f"restored {summary} from {kept.folder}"] if (summary := kept.state.summary()) else []
    for name, where in given.items():
        if name in kept.state.highest:
            texts.append(f"{name} is as operators have left it, not as server.adapters.{name}={where}")
            continue
        try:
            card = await store.give(name, where)
        except AdapterError as error:
            raise AdapterError(f"server.adapters.{name}={where}: {error}") from error
        texts.append(f"{name}@{card.version} is {where}")
    return texts
