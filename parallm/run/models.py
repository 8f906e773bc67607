"""The wiring of `registry.*`: models of the catalogue beside the one of a runtime, on its device thread."""

import asyncio
import dataclasses
import gc
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import mlx.core as mx
from starlette.types import ASGIApp

from parallm.config.schema import RunConfig, ServeConfig
from parallm.device.memory import free_memory, is_out_of_memory, release_memory
from parallm.engine.async_engine import AsyncEngine
from parallm.engine.engine import Engine
from parallm.engine.prefill import chunk_tokens
from parallm.errors import ConfigError
from parallm.model.adapters.initial import starting_adapter
from parallm.model.adapters.table import AdapterTable
from parallm.model.kernels.cuda import on_cuda
from parallm.model.load import find_folder, load_units, read_tokenizer
from parallm.model.settings import LoraSettings, ModelSettings
from parallm.model.shared_model import SharedModel
from parallm.registry.catalogue import Catalogue
from parallm.registry.pool import OwnModel, Pool
from parallm.registry.records import Model, Named
from parallm.registry.settings import RegistrySettings
from parallm.reports import TrainingStatus
from parallm.run.runtime import Runtime, on_device, with_max_tokens
from parallm.run.sampling_defaults import sampling_defaults
from parallm.server.app import create_model_app, forget_applications
from parallm.server.operation.auth import StoredKey
from parallm.server.service import Service
from parallm.tasks.encoder import Encoder
from parallm.tasks.predictor import Predictor
from parallm.types import BASE, POLICY
from parallm.user_folders import data_folder

BUDGET_SHARE = 0.5
"""Share of the free memory for models of the catalogue, where `registry.memory_bytes` is not set."""
KV_SHARE = 1 / 8
"""Share of the budget for the keys and values of each of them, where `engine.kv_cache_bytes` is not set."""
UNPACKED_BYTES = 4
"""Bytes of a weight of a quantized base on a CPU."""

logger = logging.getLogger(__name__)


def check_registry(config: RunConfig | ServeConfig) -> None:
    """Raise ConfigError for a catalogue in a process that is one of several, or that answers no requests."""
    several = config.distributed != type(config.distributed)()
    if config.registry.enabled and (several or not config.server.enabled):
        raise ConfigError(
            "registry.enabled=true: models of a catalogue belong to one process that serves a whole model; leave "
            "distributed.* out, and set server.enabled=true"
        )


@asynccontextmanager
async def open_pool(
    settings: RegistrySettings, runtime: Runtime, keys: tuple[StoredKey, ...], user: str
) -> AsyncIterator[Pool | None]:
    """Open the catalogue and serve its models; None if the registry is off. `user` keeps the runtime's own model.

    Raises ConfigError.
    """
    if not settings.enabled:
        yield None
        return
    folder = data_folder() / "registry" if settings.folder is None else Path(settings.folder).expanduser()
    catalogue = await asyncio.to_thread(Catalogue, folder, settings.folders)
    limit = runtime.engine.stats().kv_bytes_limit
    budget = settings.memory_bytes or int(BUDGET_SHARE * max(0, free_memory() - limit))
    path = runtime.settings.model.path
    own = tuple(folder.resolve() for folder in (runtime.base_folder, Path(path).expanduser()))  # a GGUF file has both
    call = partial(runtime.adapters.call, meaning=BASE)
    loader = ModelLoader(runtime, keys, int(KV_SHARE * budget))
    pool = Pool(catalogue, settings, loader, budget, OwnModel(folders=own, user=user, call=call))
    try:
        for name in await pool.scan():
            logger.info("registered %s", name)
        yield pool
    finally:
        await pool.close()


class ModelLoader:
    """Makes and closes models on the device thread of a runtime; interface of `registry.pool.Loader`."""

    def __init__(self, runtime: Runtime, keys: tuple[StoredKey, ...], kv_bytes: int) -> None:
        self._runtime = runtime
        self._keys = keys
        self._kv_bytes = runtime.settings.engine.kv_cache_bytes or kv_bytes

    def num_bytes(self, named: Named, loaded: int | None) -> int:
        """Bytes of weights, as they were at the last load or as the files say, and of keys and values."""
        return loaded if loaded is not None else weight_bytes(named.model) + self._kv_bytes

    async def open(self, named: Named) -> "LoadedModel":
        """Load unit by unit, while others are served. Raises ParallmError, MemoryError."""
        adapter = None if named.overlay is None else named.overlay.adapter
        own = self._runtime.settings.model
        settings = ModelSettings(
            path=named.model.folder, adapter=adapter, dtype=own.dtype, quantized=own.quantized, lora=LoraSettings()
        )
        device = self._runtime.device
        try:
            tokenizer = await asyncio.to_thread(read_tokenizer, settings)
            model = await asyncio.wrap_future(device.load(load_units(settings, tokenizer=tokenizer)))
            assert model is not None, "a load ends with the model"
            return await self._serve(named, settings, model)
        except Exception as error:
            del error.__traceback__  # its frames hold the model
            await on_device(device, _release)
            if is_out_of_memory(error):
                raise MemoryError(f"memory ran out while {named.name} was loaded") from error
            raise

    async def _serve(self, named: Named, settings: ModelSettings, model: SharedModel) -> "LoadedModel":
        runtime, folder = self._runtime, await asyncio.to_thread(find_folder, settings.path)
        adapters = AdapterTable(policies=())
        if settings.adapter is not None:
            adapter = await on_device(
                runtime.device, partial(starting_adapter, settings, model, seed=0, name=POLICY, is_trained=False)
            )
            adapters.publish(adapter)
        own = runtime.settings.engine
        context = None if own.max_context is None else min(own.max_context, model.max_context)
        engine_settings = dataclasses.replace(own, kv_cache_bytes=self._kv_bytes, max_context=context, warmup=False)
        engine = AsyncEngine(runtime.device, asyncio.get_running_loop())
        build = partial(Engine, model, adapters, runtime.streams, engine_settings, async_scheduling=on_cuda())
        attached = await on_device(runtime.device, partial(build, emit=engine.emit, report=engine.report))
        encoder = Encoder(
            runtime.device,
            runtime.streams,
            model,
            adapters,
            runtime.settings.tasks,
            folder,
            unit_tokens=chunk_tokens(engine_settings),
            max_waiting=engine_settings.max_waiting,
        )
        predictor = Predictor(
            runtime.device,
            runtime.streams,
            model,
            adapters,
            encoder,
            max_context=attached.max_context,
            max_waiting=engine_settings.max_waiting,
        )
        server, defaults = with_max_tokens(runtime.settings.server, sampling_defaults(runtime.settings.server, folder))
        service = Service(
            engine=engine,
            tokenizer=model.tokenizer,
            catalog=adapters.cards,
            status=lambda: TrainingStatus(state="serving"),
            settings=server,
            sampling_defaults=defaults,
            base_name=named.model.source,
            policies=(),
            keys=self._keys,
            traces=runtime.traces,
            encoder=encoder,
            predictor=predictor,
        )
        app = await asyncio.to_thread(create_model_app, service)  # routes take 0.1 s to make
        await on_device(runtime.device, partial(engine.attach, attached))
        num_bytes = model.base_bytes + self._kv_bytes
        return LoadedModel(
            self._runtime, app, engine, adapters, num_bytes, BASE if settings.adapter is None else POLICY
        )


class LoadedModel:
    """A model of the catalogue in memory; interface of `registry.pool.OpenModel`."""

    def __init__(
        self, runtime: Runtime, app: ASGIApp, engine: AsyncEngine, adapters: AdapterTable, num_bytes: int, meaning: str
    ) -> None:
        self.app = app
        self.num_bytes = num_bytes
        self._runtime = runtime
        self._engine = engine
        self._adapters = adapters
        self._meaning = meaning

    def call(self, name: str) -> None:
        self._adapters.call(name, self._meaning)

    async def close(self) -> None:
        """Give back weights, keys and values, and what was compiled for them."""
        await on_device(self._runtime.device, self._engine.detach)
        del self.app, self._engine, self._adapters
        forget_applications()
        await on_device(self._runtime.device, _release)


def weight_bytes(model: Model) -> int:
    """Bytes that the weights of a model will take: those of its files, or more where a CPU unpacks them."""
    is_unpacked = model.quantization is not None and mx.default_device() == mx.Device(mx.cpu)
    return max(model.num_bytes, UNPACKED_BYTES * (model.parameters or 0) if is_unpacked else 0)


def _release() -> None:
    """Drop what only cycles keep, and return freed memory to the system. On the device thread."""
    gc.collect()
    release_memory()
