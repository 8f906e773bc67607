"""Starts run-api and environments where a run says so, watches them, and ends them with the run."""

import asyncio
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from parallm.errors import ConfigError
from parallm.rollout.atropos.api import ApiFailed, ApiUnreachable, TrajectoryApi
from parallm.rollout.atropos.facts import AtroposFacts
from parallm.rollout.atropos.start.environment_files import Surroundings, command_of
from parallm.rollout.atropos.start.log_reading import EnvironmentLog
from parallm.rollout.atropos.start.ports import LOOPBACK
from parallm.rollout.atropos.start.process import KeptProcess, last_words, variables_for
from parallm.rollout.atropos.start.settings import EnvironmentProcess, StartSettings
from parallm.rollout.atropos.start.supervised import Supervised
from parallm.rollout.atropos.start.watch import Watch
from parallm.rollout.atropos.start.why import EnvironmentFacts

SECONDS_BETWEEN_TURNS = 0.25
SECONDS_TO_ANSWER = 60.0
"""For run-api, which imports some packages first."""
SECONDS_BETWEEN_LOOKS = 2.0
"""At what run-api tells of its environments."""

logger = logging.getLogger(__name__)


class Launcher:
    """For the asyncio thread.

    Loop contract (`run`): consumes the facts of the trainer's side / waits for nothing / produces processes and, in
    `explain`, reasons / ends when it is cancelled; `close` ends what it has started.
    """

    def __init__(
        self,
        settings: StartSettings,
        told: Surroundings,
        folder: Path,
        *,
        api: TrajectoryApi,
        facts: Callable[[], AtroposFacts],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Logs and files go below `folder`. Raises ConfigError for what cannot be started."""
        self._settings = settings
        self._told = told
        self._folder = folder / "atropos"
        self._api, self._facts, self._clock = api, facts, clock
        self._registered_at: float | None = None
        self._looked = 0.0
        self._watch = Watch(api, settings.why_seconds)
        self._python = str(Path(settings.python).expanduser().absolute()) if settings.python else sys.executable
        if settings.api or settings.environments:
            self._folder.mkdir(parents=True, exist_ok=True)
            check_interpreter(self._python)
        self._run_api = self._supervised("run-api", self._start_api) if settings.api else None
        self._logs: dict[str, EnvironmentLog] = {}
        self._environments = tuple(
            self._supervised(name, self._environment(name, one)) for name, one in settings.environments.items()
        )

    async def start(self) -> None:
        """Start run-api, if it is this run's to start, and wait until it answers. Raises ConfigError if it does not."""
        if self._run_api is None:
            return
        self._run_api.keep(self._clock())
        deadline = self._clock() + SECONDS_TO_ANSWER
        while self._clock() < deadline and not self._run_api.keep(self._clock()):
            with suppress(ApiUnreachable, ApiFailed):
                await self._api.info()
                return
            await asyncio.sleep(SECONDS_BETWEEN_TURNS)
        log = self._folder / "run-api.log"
        raise ConfigError(f"rollout.atropos.start.api: run-api does not answer; {log} ends with: {last_words(log)}")

    async def run(self) -> None:
        while True:
            await self._turn()
            await asyncio.sleep(SECONDS_BETWEEN_TURNS)

    async def close(self) -> None:
        """End all processes: environments first, which would complain."""
        await self._end_environments()
        if self._run_api is not None:
            await self._run_api.end()
        await self._watch.close()

    def explain(self, facts: AtroposFacts) -> str | None:
        """Why no batch comes, if none has come for too long."""
        return self._watch.explain(facts, [self._facts_of(one) for one in self._environments], self._clock())

    async def _turn(self) -> None:
        now, facts = self._clock(), self._facts()
        if self._run_api is not None and self._run_api.keep(now):
            # before it comes back: what they would post to an API without a trainer keeps it from registering one
            await self._end_environments()
        if facts.api.registered_at != self._registered_at:
            await self._end_environments()  # a new registration knows none of them
            self._registered_at = facts.api.registered_at
        is_open = facts.api.state in ("waiting", "serving")
        for one in self._environments:
            self._logs[one.name].read()
            if is_open and one.keep(now):
                await self._disconnect(one)
        if await self._watch.has_begun_anew(facts):
            for log in self._logs.values():
                log.forget_counts()
        if now - self._looked >= SECONDS_BETWEEN_LOOKS:
            self._looked = now
            await self._watch.look(facts, now)

    async def _disconnect(self, one: Supervised) -> None:
        """Let run-api no longer wait for groups of an environment that has ended."""
        log = self._logs[one.name]
        log.read()
        env_id, log.env_id = log.env_id, None
        if env_id is None:
            return
        try:
            await self._api.disconnect(env_id)
            logger.info("%s, which had the id %d, is disconnected from run-api", one.name, env_id)
        except (ApiUnreachable, ApiFailed) as error:
            logger.warning("%s could not be disconnected: %s", one.name, error)

    async def _end_environments(self) -> None:
        await asyncio.gather(*(one.end() for one in self._environments))
        for log in self._logs.values():
            log.read()
            log.env_id = None

    def _supervised(self, name: str, start: Callable[[], KeptProcess]) -> Supervised:
        return Supervised(name, start, max_restarts=self._settings.max_restarts)

    def _start_api(self) -> KeptProcess:
        # as run-api does, without a line for each of the ten questions a second that every environment asks
        words = ["-m", "uvicorn", "atroposlib.api:app", "--no-access-log", "--host", LOOPBACK]
        command = [self._python, *words, "--port", str(urlsplit(self._told.api).port)]
        variables = variables_for(self._python, {})
        return KeptProcess(command, folder=self._folder, variables=variables, log=self._folder / "run-api.log")

    def _environment(self, name: str, process: EnvironmentProcess) -> Callable[[], KeptProcess]:
        log = self._folder / f"{name}.log"
        self._logs[name] = EnvironmentLog(log)
        command = command_of(name, process, self._told, python=self._python, folder=self._folder)
        variables = variables_for(self._python, process.variables)
        return partial(KeptProcess, command, folder=Path(process.folder).expanduser(), variables=variables, log=log)

    def _facts_of(self, one: Supervised) -> EnvironmentFacts:
        log = self._logs[one.name]
        return EnvironmentFacts(
            name=one.name,
            log=str(self._folder / f"{one.name}.log"),
            exit_code=one.exit_code,
            has_given_up=one.has_given_up,
            last_words="" if one.is_running else last_words(self._folder / f"{one.name}.log"),
            env_id=log.env_id,
            counts=dict(log.counts),
            examples=dict(log.examples),
        )


def check_interpreter(python: str) -> None:
    """Raise ConfigError for one without atroposlib."""
    question = "import importlib.util, sys; sys.exit(importlib.util.find_spec('atroposlib') is None)"
    try:
        done = subprocess.run([python, "-c", question], env=variables_for(python, {}), timeout=60, check=False)
        is_there = done.returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        is_there = False
    if not is_there:
        raise ConfigError(
            f"rollout.atropos.start.python={python} has no atroposlib; `pip install 'parallm[atropos]'`, or "
            "`pip install atroposlib==0.4.0` into an environment of its own and name its interpreter"
        )
