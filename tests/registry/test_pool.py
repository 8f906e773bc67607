"""The pool with models that load in no time: leases, clients that leave, and random sequences on an event loop."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from starlette.types import Receive, Scope, Send

from parallm.errors import EngineStopped, ModelError, ParallmError, Unavailable
from parallm.registry.catalogue import Catalogue
from parallm.registry.pool import OwnModel, Pool
from parallm.registry.records import Named
from parallm.registry.settings import RegistrySettings
from tests.registry.folders import on_loop, write_folder

NAMES = ("a", "b", "c", "d")
SIZES = {"a": 30, "b": 40, "c": 60, "d": 90}


class FakeModel:
    def __init__(self, loader: "FakeLoader", name: str) -> None:
        self.name = name
        self.num_bytes = SIZES[name]
        self.names: set[str] = set()
        self.num_leases = 0
        self.is_closed = False
        self._loader = loader

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    def call(self, name: str) -> None:
        self.names.add(name)

    async def close(self) -> None:
        assert self.num_leases == 0, "a model leaves when nobody uses it"
        for _ in range(self._loader.draws.randrange(4)):
            await asyncio.sleep(0)
        self._loader.present.remove(self)
        self.is_closed = True


class FakeLoader:
    """Loads take a few turns of the event loop, and fail as `draws` says."""

    def __init__(self, failing: float = 0.0, seed: int = 0) -> None:
        self.draws = random.Random(seed)
        self.failing = failing
        self.present: list[FakeModel] = []
        self.num_loads = 0
        self.gate = asyncio.Event()
        self.gate.set()

    def num_bytes(self, named: Named, loaded: int | None) -> int:
        return loaded or SIZES[Path(named.model.folder).name]

    async def open(self, named: Named) -> FakeModel:
        model = FakeModel(self, Path(named.model.folder).name)
        self.present.append(model)
        assert len({one.name for one in self.present}) == len(self.present), "one copy of each"
        assert sum(one.num_bytes for one in self.present) <= 100, "within the budget"
        self.num_loads += 1
        for _ in range(self.draws.randrange(6)):
            await asyncio.sleep(0)
        await self.gate.wait()
        if self.draws.random() < self.failing:
            self.present.remove(model)
            raise self.draws.choice((ModelError("broken"), MemoryError("full"), ValueError("odd")))
        return model


@asynccontextmanager
async def opened(
    folder: Path, loader: FakeLoader, settings: RegistrySettings | None = None, own: Path | None = None
) -> AsyncIterator[Pool]:
    if not (folder / "models").exists():
        for name in NAMES:
            write_folder(folder / "models" / name)
    catalogue = Catalogue(folder / "registry", (str(folder / "models"),))
    settings = settings or RegistrySettings(enabled=True, wait_seconds=5.0)
    folders = () if own is None else (own.resolve(),)
    owner = OwnModel(folders=folders, user="run r, which trains on it", call=lambda name: None)
    pool = Pool(catalogue, settings, loader, 100, owner)
    with patch("parallm.registry.discovery.HF_HUB_CACHE", str(folder / "hub")):
        await pool.scan()
    try:
        yield pool
    finally:
        await pool.close()


@on_loop
async def test_requests_that_come_together_share_a_load(tmp_path: Path) -> None:
    loader = FakeLoader()
    async with opened(tmp_path, loader) as pool:
        named = await pool.describe("a")
        leases = await asyncio.gather(*(pool.lease(named) for _ in range(20)))
        assert (loader.num_loads, {lease.app for lease in leases}) == (1, {loader.present[0].app})
        (loaded,) = pool.loaded()
        assert (loaded.name, loaded.names, loaded.num_leases, loaded.num_bytes) == ("a:latest", ("a:latest",), 20, 30)
        for lease in leases:
            lease.release()
        assert pool.loaded()[0].expires_at is not None


@on_loop
async def test_a_copy_and_an_overlay_share_the_weights(tmp_path: Path) -> None:
    loader = FakeLoader()
    async with opened(tmp_path, loader) as pool:
        await pool.copy("a", "chat")
        await pool.load("a")
        await pool.load("chat")
        assert (loader.num_loads, pool.loaded()[0].names) == (1, ("a:latest", "chat:latest"))
        await pool.delete("a")
        assert len(loader.present) == 1
        await pool.delete("chat")
        assert loader.present == []


@on_loop
async def test_a_client_that_leaves_while_it_loads_holds_nothing(tmp_path: Path) -> None:
    loader = FakeLoader()
    async with opened(tmp_path, loader, RegistrySettings(enabled=True, keep_alive=0.0)) as pool:
        named = await pool.describe("a")
        loader.gate.clear()
        tasks = [asyncio.create_task(pool.lease(named)) for _ in range(3)]
        await asyncio.sleep(0.01)
        tasks[0].cancel()
        await asyncio.sleep(0)
        loader.gate.set()
        await asyncio.wait(tasks[1:])
        assert pool.loaded()[0].num_leases == 2
        for task in tasks[1:]:
            task.result().release()
        await pool.unload("a")
        assert loader.present == []


@on_loop
async def test_the_models_that_do_not_fit_leave_and_pinned_ones_stay(tmp_path: Path) -> None:
    loader = FakeLoader()
    async with opened(tmp_path, loader) as pool:
        await pool.load("a", is_pinned=True)
        await pool.load("b")
        await pool.load("c")
        assert [model.name for model in loader.present] == ["a", "c"]
        with pytest.raises(Unavailable, match=r"takes 90 bytes.*leaves 70"):
            await pool.load("d")
        await pool.unload("a")
        assert not (await pool.describe("a")).is_pinned
        await pool.load("d")
        assert [model.name for model in loader.present] == ["d"]


@on_loop
async def test_a_folder_that_does_not_load_says_why_and_is_not_read_again_at_once(tmp_path: Path) -> None:
    loader = FakeLoader(failing=1.0)
    async with opened(tmp_path, loader) as pool:
        for _ in range(5):
            with pytest.raises(ModelError):
                await pool.load("a")
        assert loader.num_loads == 1


@on_loop
async def test_requests_load_only_what_is_allowed_and_operators_all(tmp_path: Path) -> None:
    settings = RegistrySettings(enabled=True, allowed=("b", "c*:latest"))
    async with opened(tmp_path, FakeLoader(), settings) as pool:
        a, b = await pool.describe("a"), await pool.describe("b")
        with pytest.raises(Unavailable, match="an operator loads it"):
            await pool.lease(a)
        (await pool.lease(b)).release()
        await pool.load("a")
        (await pool.lease(a)).release()


@on_loop
async def test_the_base_of_a_run_is_leased_without_a_copy_and_cannot_be_unloaded(tmp_path: Path) -> None:
    loader = FakeLoader()
    async with opened(tmp_path, loader, own=tmp_path / "models" / "a") as pool:
        assert (await pool.lease(await pool.describe("a"))).app is None
        with pytest.raises(Unavailable, match="run r, which trains on it"):
            await pool.unload("a")
        assert loader.num_loads == 0


@on_loop
async def test_whoever_waits_hears_that_the_server_ends(tmp_path: Path) -> None:
    loader = FakeLoader()
    async with opened(tmp_path, loader) as pool:
        loader.gate.clear()
        task = asyncio.create_task(pool.load("a"))
        await asyncio.sleep(0.01)
        await pool.close()
        with pytest.raises(EngineStopped):
            await task


async def ask(pool: Pool, loader: FakeLoader, named: Named, draws: random.Random) -> str:
    """One request of a random client. Every model that answers must be the one that was asked for, and in memory."""
    keep_alive = draws.choice((None, 0.0, -1.0, 60.0))
    turns, leaves = draws.randrange(8), draws.random() < 0.2
    task = asyncio.create_task(pool.lease(named, keep_alive))
    if leaves:
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
    try:
        lease = await task
    except asyncio.CancelledError:
        return "left"
    except ParallmError:
        return "refused"
    (model,) = [model for model in loader.present if model.app == lease.app]
    assert (model.name, model.is_closed) == (Path(named.model.folder).name, False)
    model.num_leases += 1
    for _ in range(turns):
        await asyncio.sleep(0)
        assert not model.is_closed, "never while it answers"
    model.num_leases -= 1
    lease.release()
    return "answered"


async def act(pool: Pool, loader: FakeLoader, draws: random.Random, all_named: tuple[Named, ...]) -> str:
    named = draws.choice(all_named)
    if draws.random() < 0.75:
        return await ask(pool, loader, named, draws)
    try:
        await (pool.unload(named.name) if draws.random() < 0.7 else pool.load(named.name, keep_alive=60.0))
    except ParallmError:
        return "refused"
    return "done"


async def play(folder: Path, seed: int) -> list[str]:
    draws, loader = random.Random(seed), FakeLoader(failing=0.15, seed=seed)
    async with opened(folder, loader) as pool:
        named = await pool.names()
        tasks = []
        for _ in range(12):
            tasks.append(asyncio.create_task(act(pool, loader, draws, named)))
            for _ in range(draws.randrange(3)):
                await asyncio.sleep(0)
        outcomes = await asyncio.gather(*tasks)
        assert all(model.num_leases == 0 for model in loader.present)
        assert all(model.num_leases == 0 for model in pool.loaded())
        for one in named:
            await pool.unload(one.name)
        assert (loader.present, pool.loaded()) == ([], ())
    return outcomes


@on_loop
async def test_random_requests_loads_unloads_and_failures_never_meet_a_wrong_model(tmp_path: Path) -> None:
    outcomes = [outcome for seed in range(200) for outcome in await play(tmp_path, seed)]
    assert outcomes.count("answered") > 500
    assert outcomes.count("refused") > 20
    assert outcomes.count("left") > 20


@on_loop
async def test_a_pool_that_hands_out_another_model_is_found(tmp_path: Path) -> None:
    loader = FakeLoader()
    async with opened(tmp_path, loader) as pool:
        a, b = await pool.describe("a"), await pool.describe("b")
        await pool.load("a")
        await pool.load("b")
        pool._open[a.key], pool._open[b.key] = pool._open[b.key], pool._open[a.key]
        with pytest.raises(AssertionError, match="assert "):
            await ask(pool, loader, a, random.Random(1))
