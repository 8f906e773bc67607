"""Environments begin when a trainer is registered, begin anew when it is registered anew, and end with the run."""

import asyncio
import dataclasses
import json
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from parallm.integrations.atropos.launcher import LaunchContext, Launcher
from parallm.integrations.atropos.source import AtroposFacts
from parallm.integrations.atropos.trainer_client import ApiFacts, Sizes, TrajectoryApi
from parallm.rollout.settings import AtroposSettings, EnvironmentProcess, RolloutSettings, StartSettings

# Says what a registered environment says, and its process id
SCRIPT = """
import logging, os, pathlib, time
with open("begun", "a") as file:
    file.write(f"{os.getpid()}\\n")
logging.getLogger("atroposlib.envs.base").info("Initialized env with id 7: curr_step: 0")
time.sleep(100)
"""
SIZES = Sizes(batch_size=8, max_token_len=512)


class World:
    """A launcher with one environment, and the trainer's side as the test says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disconnected: list[int] = []
        self.api = ApiFacts()
        self.waiting_since: float | None = None
        start = StartSettings(
            environments={"words": EnvironmentProcess(script="words.py", folder=str(folder))}, why_seconds=0.5
        )
        rollout = RolloutSettings(atropos=AtroposSettings(url="http://127.0.0.1:1", start=start))
        api = TrajectoryApi(AtroposSettings(), httpx.MockTransport(self._answer))
        context = LaunchContext(rollout=rollout, server="http://127.0.0.1:2", recipes="", tokenizer="", model="policy")
        self.launcher = Launcher(context, folder, api=api, facts=self.facts)

    def facts(self) -> AtroposFacts:
        return AtroposFacts(
            url="http://127.0.0.1:1",
            sizes=SIZES,
            api=dataclasses.replace(self.api),
            waiting_since=self.waiting_since,
        )

    def register(self, at: float) -> None:
        self.api = ApiFacts(state="waiting", registered_at=at)

    def begun(self) -> list[int]:
        file = self.folder / "begun"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    async def wait_for(self, number: int) -> list[int]:
        """Until so many environments have begun, in all."""
        for _ in range(1000):
            if len(self.begun()) == number and self.begun()[-1] > 0:
                return self.begun()
            await asyncio.sleep(0.02)
        raise AssertionError(f"{self.begun()} have begun, not {number}")

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/disconnect-env":
            self.disconnected.append(json.loads(request.content)["env_id"])
            return httpx.Response(200, json={"status": "success"})
        return httpx.Response(500)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    (tmp_path / "atroposlib.py").write_text("")  # what an interpreter is asked for
    (tmp_path / "words.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return World(tmp_path)


def play(world: World, test: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        task = asyncio.create_task(world.launcher.run())
        try:
            await test()
        finally:
            task.cancel()
            await world.launcher.close()

    asyncio.run(run())


async def explained(world: World, facts: AtroposFacts) -> str:
    async with asyncio.timeout(10):
        while (explanation := world.launcher.explain(facts)) is None:
            await asyncio.sleep(0.02)
    return explanation


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_environment_waits_for_the_trainer_and_ends_with_the_run(world: World) -> None:
    async def test() -> None:
        await asyncio.sleep(0.6)
        assert world.begun() == []
        world.register(1.0)
        await world.wait_for(1)

    play(world, test)
    assert not is_alive(world.begun()[0])


def test_a_new_registration_begins_the_environments_anew(world: World) -> None:
    async def test() -> None:
        world.register(1.0)
        first, *_ = await world.wait_for(1)
        world.register(2.0)
        _, second = await world.wait_for(2)
        assert not is_alive(first)
        assert is_alive(second)

    play(world, test)
    assert world.disconnected == []  # the new registration has never known the id


def test_an_api_that_is_gone_for_a_moment_ends_no_environment(world: World) -> None:
    async def test() -> None:
        world.register(1.0)
        (process,) = await world.wait_for(1)
        world.api.state = "unreachable"
        await asyncio.sleep(0.6)
        assert is_alive(process)

    play(world, test)


def test_an_environment_that_was_killed_is_disconnected_and_begins_again(world: World) -> None:
    async def test() -> None:
        world.register(1.0)
        (process,) = await world.wait_for(1)
        await asyncio.sleep(0.6)  # its log is read
        os.kill(process, 9)
        await world.wait_for(2)

    play(world, test)
    assert world.disconnected == [7]


def test_a_stall_is_explained_after_its_time_and_each_cause_logged_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        world.register(1.0)
        world.waiting_since = time.monotonic()
        assert world.launcher.explain(world.facts()) is None
        for _ in range(2):
            assert (await explained(world, world.facts())).startswith("no batch: ")
        refused = dataclasses.replace(world.facts(), refused={"ragged": 2})
        assert world.launcher.explain(refused) is not None
        more = dataclasses.replace(refused, refused={"ragged": 3, "unmatched": 1})
        assert "(ragged: 3, unmatched: 1)" in str(world.launcher.explain(more))
        world.waiting_since = None
        await asyncio.sleep(0.7)
        assert world.launcher.explain(world.facts()) is None  # a step trains, however long it takes

    play(world, test)
    causes = [line.partition(" s: ")[2] for line in caplog.messages if line.startswith("no batch for")]
    assert len(causes) == len(set(causes)) == 3
    assert causes[1].startswith("groups that came were not trained on (ragged: 2)")
