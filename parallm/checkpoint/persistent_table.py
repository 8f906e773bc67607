"""An adapter table whose changes by operators outlive the process. `AdapterStore` calls it."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from parallm.checkpoint.serving_state import (
    Promotion,
    ServingFolder,
    ServingState,
    served_version,
    snapshot,
    split_models,
    split_versions,
)
from parallm.device.thread import DeviceThread
from parallm.errors import NotStored, ParallmError
from parallm.model.adapters.names import versioned
from parallm.model.adapters.table import AdapterTable

Result = TypeVar("Result")
SplitShares = Mapping[str, Mapping[str, float]]
EMPTY_STATE = ServingState()


class PersistentTable:
    """Stores each change in a folder before it takes effect. Used on the asyncio thread; one change at a time.

    Changes raise NotStored if the disk refuses them, FolderInUse if another process has the folder; nothing changes
    then. Without a folder nothing is stored.
    """

    def __init__(
        self,
        device: DeviceThread,
        table: AdapterTable,
        *,
        trained: Iterable[str],
        folder: ServingFolder | None = None,
        state: ServingState = EMPTY_STATE,
    ) -> None:
        """`trained`: policies whose versions a trainer makes. `state`: the content of `folder`."""
        self._device = device
        self.table = table
        self.trained = frozenset(trained)
        self._folder = folder
        self.state = state

    @property
    def folder(self) -> Path | None:
        """The folder that stores changes."""
        return None if self._folder is None else self._folder.folder

    async def restore(self, versions: Mapping[str, int]) -> None:
        """Restore the state before anything is served. `versions`: the version each trained policy resumes from.

        Raises CheckpointError for weights that differ from what was stored.
        """
        if self._folder is None:
            return
        read, state = self._folder.read_adapter, self.state
        promoted = {
            name: promotion for name, promotion in state.promoted.items() if promotion.holds_at(versions.get(name, 0))
        }
        self.state = state = replace(state, promoted=promoted)
        self.table.restore(
            [await self._on_device(partial(read, key)) for key in state.digests],
            served=state.served,
            aliases=state.aliases,
            held=split_versions(state.splits),
            highest=state.highest,
        )
        for name, promotion in promoted.items():
            self.table.promote(promotion.version, name=name)
        self.table.hold(split_models(state.splits))

    async def change(
        self,
        act: Callable[[AdapterTable], Result],
        *,
        names: tuple[str, ...] = (),
        promotes: str | None = None,
        splits: SplitShares | None = None,
    ) -> Result:
        """Apply `act` to the table, after a trial on a copy, so that an error changes nothing.

        `names`: the names whose versions change. `promotes`: the name that another version is promoted for. `splits`:
        the new traffic splits.
        """
        if self._folder is None:
            return act(self.table)
        trial = self.table.copy()
        act(trial)
        before = self.state
        after = self._after(trial, names, promotes, splits)
        await self._store(self._folder, after, trial)
        try:
            result = act(self.table)
        except ParallmError:  # a trainer has published meanwhile
            await self._store(self._folder, before, self.table)
            raise
        self.state = after
        return result

    def close(self) -> None:
        """Release the folder."""
        if self._folder is not None:
            self._folder.close()

    def _after(
        self, table: AdapterTable, names: tuple[str, ...], promotes: str | None, splits: SplitShares | None
    ) -> ServingState:
        state = self.state if splits is None else replace(self.state, splits=splits)
        if promotes in self.trained:
            promotion = Promotion(version=served_version(table, promotes), newest=table.next_version(promotes) - 1)
            state = replace(state, promoted={**state.promoted, promotes: promotion})
        return snapshot(state, table, changed=names, trained=self.trained)

    async def _store(self, folder: ServingFolder, state: ServingState, table: AdapterTable) -> None:
        try:
            for name, version in folder.missing(state):
                adapter = table.resolve(versioned(name, version))
                assert adapter is not None, "the base has no version in a state"
                await self._on_device(partial(folder.stage, adapter))
            await asyncio.to_thread(folder.commit, state)
        except OSError as error:
            await asyncio.to_thread(folder.discard)  # staged files may have filled the disk
            raise NotStored(
                f"nothing was changed: {folder.folder} does not take what operators set ({error.strerror or error}); "
                "make room for it, or start with server.state=FOLDER or server.state=off"
            ) from error

    async def _on_device(self, function: Callable[[], Result]) -> Result:
        return await asyncio.wrap_future(self._device.call(function))
