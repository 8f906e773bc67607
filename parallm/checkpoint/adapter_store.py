"""Adapters that operators load, update and unload while the process runs. The server's control routes call it."""

import asyncio
import io
import logging
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import mlx.core as mx

from parallm.checkpoint.adapter_paths import exists, find_adapter
from parallm.checkpoint.persistent_table import PersistentTable
from parallm.checkpoint.serving_state import split_models
from parallm.checkpoint.untrusted_files import check_folder, check_safetensors, resolve_inside, unpack
from parallm.device.thread import DeviceThread
from parallm.errors import AdapterError
from parallm.model.adapters.adapter import Adapter, with_arrays
from parallm.model.adapters.files import from_peft_names, read_adapter, write_exactly, write_peft
from parallm.model.shared_model import SharedModel
from parallm.types import BEST, AdapterCard

logger = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}")

Result = TypeVar("Result")


class AdapterStore:
    """Publishes each adapter as the next version of its name, served at once, and resolves names.

    Running sequences keep their versions. Used on the asyncio thread; the device thread reads arrays, one adapter at a
    time. All changes raise the errors of `PersistentTable`.
    """

    def __init__(
        self,
        device: DeviceThread,
        model: SharedModel,
        kept: PersistentTable,
        *,
        root: str | None,
        max_bytes: int,
        max_names: int,
        start: Adapter,
        owner: Callable[[str], str | None] | None = None,
    ) -> None:
        """`start` completes uploaded tensors of a name without versions: an adapter of `model.lora`'s form.

        `owner` returns the trainer elsewhere that sends the versions of a name, if there is one.
        """
        self._device = device
        self._model = model
        self._kept = kept
        self._table = kept.table
        self._root = None if root is None else Path(root).expanduser()
        self._max_bytes = max_bytes
        self._max_names = max_names
        self._trained = kept.trained
        self._start = start
        self._owner = owner
        self._lock = asyncio.Lock()  # a name's next version must not be given out twice

    async def load(self, name: str, path: str) -> AdapterCard:
        """Load the adapter, checkpoint or run in a folder below the root. Raises AdapterError, AdapterMissing."""
        self._check_name(name)
        if self._root is None:
            raise AdapterError(
                "no folder is set that adapters may be loaded from; start with server.adapters_root=FOLDER"
            )
        with _named(self._root, "server.adapters_root"):
            folder = await asyncio.to_thread(_safe_folder, self._root, path, self._max_bytes)
            async with self._lock:
                return await self._publish(await self._on_device(partial(self._read, name, folder)))

    async def upload(self, name: str, archive: bytes) -> AdapterCard:
        """Take an adapter from a zip archive of its two files. Raises AdapterError."""
        self._check_name(name)
        async with self._lock:
            with TemporaryDirectory(prefix="parallm-upload-") as temporary, _named(Path(temporary), "the upload"):
                folder = Path(temporary)
                await asyncio.to_thread(_unpack_safely, archive, folder, self._max_bytes)
                adapter = await self._on_device(partial(self._read, name, folder))
            return await self._publish(adapter)

    async def update(self, name: str, weights: bytes) -> AdapterCard:
        """Replace tensors of the served version of `name` and publish the result as its next version.

        A name without versions starts from an adapter in the form of `model.lora`. `weights` is a safetensors file with
        names of PEFT or of mlx-lm; missing tensors stay as they are. Raises AdapterError, UnknownModel.
        """
        self._check_name(name)
        await asyncio.to_thread(check_safetensors, io.BytesIO(weights), len(weights))
        async with self._lock:
            return await self._publish(await self._on_device(partial(self._changed, name, weights)))

    async def unload(self, name: str, version: int | None = None) -> None:
        """Forget one version, or all of `name`. Raises UnknownModel, AdapterError."""
        self._check_owner(name)
        newest = max((card.version for card in self._table.cards() if card.name == name), default=None)
        if name in self._trained and version in (None, newest):
            raise AdapterError(
                f"{name} is trained by this run, which goes on from its newest version; unload older ones"
            )
        async with self._lock:
            await self._kept.change(lambda table: table.unload(name, version), names=(name,))

    async def promote(self, name: str, version: int) -> None:
        """Serve this version under the bare name. A trained policy's newest version is replaced by its next."""
        self._check_owner(name)
        async with self._lock:
            await self._kept.change(lambda table: table.promote(version, name=name), names=(name,), promotes=name)

    async def roll_back(self, name: str) -> int:
        """Serve the version below the present one under the bare name. Returns that version."""
        self._check_owner(name)
        async with self._lock:
            return await self._kept.change(lambda table: table.roll_back(name=name), names=(name,), promotes=name)

    async def set_alias(self, alias: str, name: str, version: int) -> None:
        self._check_owner(name)
        if not NAME.fullmatch(alias):
            raise AdapterError(f"{alias[:100]!r} cannot be an alias: letters, digits and _ . : - make one")
        if alias == BEST and name in self._trained:
            raise AdapterError(f"{BEST} of {name} is set by its evaluations; choose another alias")
        async with self._lock:
            await self._kept.change(lambda table: table.set_alias(alias, version, name=name))

    async def remove_alias(self, alias: str, name: str) -> None:
        async with self._lock:
            await self._kept.change(lambda table: table.remove_alias(alias, name=name))

    async def archive(self, model: str) -> tuple[AdapterCard, bytes]:
        """Return a version with its files in a zip archive, which `upload` takes.

        `model` is a name, which means the served version, or a version or alias of it: `poet@3`. The files have PEFT's
        format, or mlx-lm's where PEFT's names of the layers are unknown or the adapter makes vectors. Raises
        UnknownModel, AdapterError.
        """
        adapter = self._table.resolve(model)
        if adapter is None:
            raise AdapterError(f"{model[:100]!r} is the base, which has no adapter; name a version, such as policy@1")
        with TemporaryDirectory(prefix="parallm-archive-") as temporary:
            folder = Path(temporary)
            await self._on_device(partial(self._write, adapter, folder))
            return self._card(adapter), await asyncio.to_thread(_packed, folder)

    async def set_splits(self, splits: Mapping[str, Mapping[str, float]]) -> None:
        """Keep the models of these splits in memory, and no longer those of earlier splits."""
        async with self._lock:
            await self._kept.change(lambda table: table.hold(split_models(splits)), splits=splits)

    async def give(self, name: str, where: str) -> AdapterCard:
        """Serve an adapter that the process starts with; `where` is a path for `find_adapter`. Raises AdapterError."""
        self._check_name(name)
        folder = await asyncio.to_thread(find_adapter, where)
        adapter = await self._on_device(partial(self._read, name, folder))
        self._table.publish(adapter)
        return self._card(adapter)

    @property
    def splits(self) -> Mapping[str, Mapping[str, float]]:
        """Traffic splits that operators have set."""
        return self._kept.state.splits

    def _read(self, name: str, folder: Path) -> Adapter:
        model, version = self._model, self._table.next_version(name)
        return read_adapter(folder, model.targets, model_type=model.model_type, name=name, version=version)

    def _write(self, adapter: Adapter, folder: Path) -> None:
        model = self._model
        if adapter.spec is None:
            try:
                write_peft(adapter, folder, model.name, model.sha256, model_type=model.model_type)
                return
            except AdapterError as error:
                logger.info("the archive of %s@%d is in mlx-lm's format: %s", adapter.name, adapter.version, error)
        write_exactly(adapter, folder, num_layers=model.num_layers, base_name=model.name, base_sha256=model.sha256)

    def _changed(self, name: str, weights: bytes) -> Adapter:
        served = self._table.resolve(name) or replace(self._start, name=name)
        return replace_tensors(served, weights, self._table.next_version(name), self._model.model_type)

    async def _publish(self, adapter: Adapter) -> AdapterCard:
        await self._kept.change(lambda table: table.publish(adapter), names=(adapter.name,))
        return self._card(adapter)

    def _card(self, adapter: Adapter) -> AdapterCard:
        key = (adapter.name, adapter.version)
        return next(card for card in self._table.cards() if (card.name, card.version) == key)

    def _check_name(self, name: str) -> None:
        self._check_owner(name)
        names = {card.name for card in self._table.cards()}
        if not NAME.fullmatch(name) or name == BEST:
            raise AdapterError(
                f"{name[:100]!r} cannot be a name: letters, digits and _ . : - make one, and {BEST} is an alias"
            )
        if name in self._trained:
            raise AdapterError(
                f"{name} is trained by this run, which makes its versions; give the adapter another name, or start a "
                "run that trains it further with model.adapter=FOLDER"
            )
        if name not in names and len(names) >= self._max_names:
            raise AdapterError(f"{len(names)} adapters are loaded, the limit; unload one or raise server.max_adapters")

    def _check_owner(self, name: str) -> None:
        if self._owner is not None and (owner := self._owner(name)):
            raise AdapterError(f"{name} is trained by {owner}, which sends its versions here; change it there")

    async def _on_device(self, function: Callable[[], Result]) -> Result:
        return await asyncio.wrap_future(self._device.call(function))


def _safe_folder(root: Path, path: str, max_bytes: int) -> Path:
    where, _, choice = ("", "", "") if exists(root / path) else path.rpartition("@")
    inside_root = resolve_inside(root, where or path)
    folder = find_adapter(f"{inside_root}@{choice}" if where else str(inside_root))
    check_folder(folder, root, max_bytes)
    return folder


def _packed(folder: Path) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:  # numbers of weights hardly shrink
        for path in sorted(folder.iterdir()):
            archive.write(path, path.name)
    return packed.getvalue()


def _unpack_safely(archive: bytes, folder: Path, max_bytes: int) -> None:
    unpack(archive, folder, max_bytes)
    check_folder(folder, folder, max_bytes)


@contextmanager
def _named(folder: Path, name: str) -> Iterator[None]:
    """Replace `folder` by `name` in adapter errors, so that clients do not learn the server's paths."""
    try:
        yield
    except AdapterError as error:
        message = str(error)
        for path in {folder.resolve(), folder.absolute()} - {Path(folder.absolute().anchor)}:
            message = message.replace(f"{path}/", "").replace(str(path), name)
        raise type(error)(message) from error


def replace_tensors(served: Adapter, weights: bytes, version: int, model_type: str) -> Adapter:
    loaded = mx.load(io.BytesIO(weights), format="safetensors")
    assert isinstance(loaded, dict), "safetensors are names and arrays"
    arrays = from_peft_names(loaded, model_type)
    for name, array in arrays.items():
        shape = served.arrays[name].shape if name in served.arrays else None
        if array.shape != shape:
            raise AdapterError(
                f"{name} has shape {array.shape}; in {served.name}@{served.version} it has {shape}; upload an adapter "
                "of another form as a zip archive with its adapter_config.json"
            )
    changed = {**served.arrays, **arrays}
    return with_arrays(served, changed, version=version, parent=served.version, step=served.step)
