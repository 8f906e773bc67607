"""An operator who changes what a server serves, at random, and what must be there after each end of the server."""

import asyncio
import json
import random
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from bench.processes import Server, work

NAMES = ("poet", "coder")
ALIASES = ("good", "next")
SPLITS = ("ab", "cd")
NUM_WEIGHTS = 3
MAX_VERSIONS = 5
"""Versions of a name; the table itself forgets some of more than eight."""
MAX_SECONDS = 1.0
"""Seconds from the first answer of a process to its end."""
SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What clients can see of a server."""

    versions: Mapping[str, str]
    """`poet@3` -> digest of its weights."""
    served: Mapping[str, str]
    """Name -> `poet@3`."""
    aliases: Mapping[str, str]
    splits: Mapping[str, Mapping[str, float]]

    def of(self, name: str) -> list[str]:
        """Its versions, oldest first."""
        return sorted((model for model in self.versions if model.startswith(f"{name}@")), key=number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A request, and the state that it makes."""

    method: str
    path: str
    body: dict[str, Any] | None
    after: State


@dataclass(slots=True)
class Operated:
    num_kills: int = 0
    num_changes: int = 0
    wrong: list[str] = field(default_factory=list)
    """States after a start that are neither that before the change under way nor that after it."""


class Operator:
    """Draws changes that can be made."""

    def __init__(self, digests: list[str], seed: int) -> None:
        """`digests`: of the adapters `0`, `1` and so on."""
        self._digests = digests
        self._random = random.Random(seed)

    def seconds(self) -> float:
        return self._random.uniform(0, MAX_SECONDS)

    def change(self, state: State) -> Change:
        name = self._random.choice(NAMES)
        makers: list[Callable[[State, str], Change]] = [self._promote, self._alias, self._split]
        makers.append(self._load if len(state.of(name)) < MAX_VERSIONS else self._unload)
        if state.splits:
            makers.append(self._remove_split)
        return self._random.choice(makers)(state, name)

    def _load(self, state: State, name: str) -> Change:
        place = self._random.randrange(NUM_WEIGHTS)
        model = f"{name}@{number(state.of(name)[-1]) + 1}"
        versions, served = {**state.versions, model: self._digests[place]}, {**state.served, name: model}
        body = {"name": name, "path": str(place)}
        after = replace(state, versions=versions, served=served)
        return Change(method="POST", path="/v1/adapters/load", body=body, after=after)

    def _promote(self, state: State, name: str) -> Change:
        model = self._random.choice(state.of(name))
        body = {"name": name, "version": number(model)}
        after = replace(state, served={**state.served, name: model})
        return Change(method="POST", path="/v1/adapters/promote", body=body, after=after)

    def _alias(self, state: State, name: str) -> Change:
        alias, model = self._random.choice(ALIASES), self._random.choice(state.of(name))
        body = {"alias": alias, "name": name, "version": number(model)}
        after = replace(state, aliases={**state.aliases, f"{name}@{alias}": model})
        return Change(method="POST", path="/v1/adapters/aliases", body=body, after=after)

    def _unload(self, state: State, name: str) -> Change:
        """The oldest version that the name does not mean; the newest one stays, so that numbers go on from it."""
        model = next(model for model in state.of(name) if model != state.served[name])
        after = replace(
            state,
            versions={other: digest for other, digest in state.versions.items() if other != model},
            aliases={alias: other for alias, other in state.aliases.items() if other != model},
        )
        return Change(method="DELETE", path=f"/v1/adapters/{model}", body=None, after=after)

    def _split(self, state: State, name: str) -> Change:
        split, models = self._random.choice(SPLITS), [self._random.choice(state.of(name)), "base"]
        after = replace(state, splits={**state.splits, split: dict.fromkeys(models, 0.5)})
        weights = {"weights": dict.fromkeys(models, 3.0)}
        return Change(method="PUT", path=f"/v1/splits/{split}", body=weights, after=after)

    def _remove_split(self, state: State, _: str) -> Change:
        split = self._random.choice(sorted(state.splits))
        after = replace(state, splits={other: shares for other, shares in state.splits.items() if other != split})
        return Change(method="DELETE", path=f"/v1/splits/{split}", body=None, after=after)


async def serve_and_kill(folder: Path, kills: int, seed: int, *, forgets: bool = False) -> Operated:
    """Change what is served until it is killed, and compare after each start.

    `forgets`: what names mean is lost in between, which has to be found.
    """
    operated = Operated()
    write_adapters(folder / "adapters")
    overrides = ["name=kills", f"server.adapters_root={folder / 'adapters'}"]
    server = Server("parallm.serve", overrides, folder)
    await start(server)
    async with httpx.AsyncClient(base_url=server.url, timeout=SECONDS, trust_env=False) as client:
        operator = Operator(await first_digests(client), seed)
        for _ in range(kills):
            before, after = await change_until_killed(client, server, operator, operated)
            if forgets:
                forget(folder / "checkpoints" / "kills")
            await start(server)
            operated.num_kills += 1
            if (state := await state_of(client)) not in (before, after):
                operated.wrong.append(f"found {state}, before the last change {before}, after it {after}")
    await asyncio.to_thread(server.stop)
    return operated


async def start(server: Server) -> None:
    server.spawn()
    await asyncio.to_thread(server.wait)


def write_adapters(folder: Path) -> None:
    """The adapters `0`, `1` and so on below `folder`."""
    folder.mkdir()
    work("tests.robustness.random_adapters", model="nano", folder=str(folder), number=NUM_WEIGHTS)
    for place in range(NUM_WEIGHTS):
        with zipfile.ZipFile(folder / f"{place}.zip") as archive:
            archive.extractall(folder / str(place))


async def first_digests(client: httpx.AsyncClient) -> list[str]:
    """Load each for each name once. Raises httpx.HTTPError."""
    cards = [
        (await client.post("/v1/adapters/load", json={"name": name, "path": str(place)})).raise_for_status().json()
        for name in NAMES
        for place in range(NUM_WEIGHTS)
    ]
    return [card["digest"] for card in cards[:NUM_WEIGHTS]]


async def state_of(client: httpx.AsyncClient) -> State:
    """Raises httpx.HTTPError."""
    cards = (await client.get("/v1/adapters")).raise_for_status().json()["data"]
    splits = (await client.get("/v1/splits")).raise_for_status().json()["data"]
    return State(
        versions={card["id"]: card["digest"] for card in cards},
        served={card["name"]: card["id"] for card in cards if card["is_served"]},
        aliases={
            alias: card["id"] for card in cards for alias in card["aliases"] if alias.partition("@")[2] in ALIASES
        },
        splits={one["name"]: one["shares"] for one in splits if one["shares"]},
    )


async def change_until_killed(
    client: httpx.AsyncClient, server: Server, operator: Operator, operated: Operated
) -> tuple[State, State]:
    """The states before and after the change that was under way. Raises RuntimeError for one that is refused."""
    state = await state_of(client)
    killing = asyncio.create_task(kill_after(server, operator.seconds()))
    while True:
        change = operator.change(state)
        try:
            answer = await client.request(change.method, change.path, json=change.body)
        except httpx.TransportError:
            await killing
            return state, change.after
        if answer.is_error:
            raise RuntimeError(f"{change}: {answer.status_code} {answer.text[:300]}")
        operated.num_changes += 1
        state = change.after


async def kill_after(server: Server, seconds: float) -> None:
    await asyncio.sleep(seconds)
    server.kill()


def forget(folder: Path) -> None:
    """Drop what the first name means."""
    (file,) = folder.glob("serving-*/serving.json")
    state = json.loads(file.read_text())
    del state["served"][NAMES[0]]
    file.write_text(json.dumps(state))


def number(model: str) -> int:
    return int(model.rpartition("@")[2])
