"""The command line of an environment, and the file from which it learns what this run is like."""

import asyncio
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from parallm.errors import ConfigError
from parallm.integrations.atropos.api import ApiFailed, ApiUnreachable, Sizes, TrajectoryApi
from parallm.integrations.atropos.diagnosis import EnvironmentFacts
from parallm.integrations.atropos.log_reading import EnvironmentLog
from parallm.integrations.atropos.ports import LOOPBACK
from parallm.integrations.atropos.source import AtroposFacts
from parallm.integrations.atropos.supervisor import ChildProcess, SupervisedProcess, log_tail, variables_for
from parallm.integrations.atropos.watch import Watch
from parallm.rollout.atropos_settings import EnvironmentProcess, StartSettings

HOST = Path(__file__).with_name("hosted.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchContext:
    """What all environments of a run are told."""

    api: str
    """URL of run-api."""
    server: str
    """Ours."""
    recipes: str
    """The folder of the recipes that come with ParaLLM."""
    tokenizer: str
    """A folder or hub id that transformers reads."""
    model: str
    """The name of the policy in requests."""
    sizes: Sizes
    group_size: int
    max_tokens: int


def own_config(context: LaunchContext, process: EnvironmentProcess) -> dict[str, Any]:
    """As atroposlib's `serve --config` reads it.

    There are two entries for our one server: with a single one, environments whose own default is no list drop its
    URL and ask localhost:9004 to 9007.
    """
    env = {
        "group_size": context.group_size,
        "batch_size": context.sizes.batch_size,
        "max_token_length": context.max_tokens,
        "max_batches_offpolicy": 1,
        "steps_per_eval": 0,
        "total_steps": -1,  # what the trainer registers
        "tokenizer_name": context.tokenizer,
        "rollout_server_url": context.api,
        "use_wandb": False,
    }
    server = {
        "server_type": "vllm",
        "base_url": f"{context.server}/v1",
        "model_name": context.model,
        "tokenizer_name": context.tokenizer,
        "api_key": "x",
    }
    return {
        "env": env | process.env,
        "openai": [server | process.openai, server | process.openai],
        "slurm": False,
        "testing": False,
    }


def command_of(
    name: str, process: EnvironmentProcess, context: LaunchContext, *, python: str, folder: Path
) -> list[str]:
    """Writes the file into `folder`. Raises ConfigError for a script that is not there."""
    place = Path(process.folder).expanduser().resolve()
    script = place / Path(process.script.replace("{recipes}", context.recipes)).expanduser()
    if not script.is_file():
        raise ConfigError(
            f"rollout.atropos.start.environments.{name}: {script} is no file; the environments of Atropos are in its "
            "repository, not in the package atroposlib"
        )
    config = folder / f"{name}.json"
    config.write_text(json.dumps(own_config(context, process), indent=1))
    words = {
        "{config}": str(config),
        "{api}": context.api,
        "{server}": context.server,
        "{tokenizer}": context.tokenizer,
    }
    return [python, str(HOST), str(script), *(_filled(one, words) for one in process.arguments)]


def _filled(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(word, value)
    return text


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
        context: LaunchContext,
        folder: Path,
        *,
        api: TrajectoryApi,
        facts: Callable[[], AtroposFacts],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Logs and files go below `folder`. Raises ConfigError for what cannot be started."""
        self._settings = settings
        self._context = context
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
        self._run_api.supervise(self._clock())
        deadline = self._clock() + SECONDS_TO_ANSWER
        while self._clock() < deadline and not self._run_api.supervise(self._clock()):
            with suppress(ApiUnreachable, ApiFailed):
                await self._api.info()
                return
            await asyncio.sleep(SECONDS_BETWEEN_TURNS)
        log = self._folder / "run-api.log"
        raise ConfigError(f"rollout.atropos.start.api: run-api does not answer; {log} ends with: {log_tail(log)}")

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
        if self._run_api is not None and self._run_api.supervise(now):
            # before it comes back: what they would post to an API without a trainer keeps it from registering one
            await self._end_environments()
        if facts.api.registered_at != self._registered_at:
            await self._end_environments()  # a new registration knows none of them
            self._registered_at = facts.api.registered_at
        is_open = facts.api.state in ("waiting", "serving")
        for one in self._environments:
            self._logs[one.name].read()
            if is_open and one.supervise(now):
                await self._disconnect(one)
        if await self._watch.has_begun_anew(facts):
            for log in self._logs.values():
                log.forget_counts()
        if now - self._looked >= SECONDS_BETWEEN_LOOKS:
            self._looked = now
            await self._watch.look(facts, now)

    async def _disconnect(self, one: SupervisedProcess) -> None:
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

    def _supervised(self, name: str, start: Callable[[], ChildProcess]) -> SupervisedProcess:
        return SupervisedProcess(name, start, max_restarts=self._settings.max_restarts)

    def _start_api(self) -> ChildProcess:
        # as run-api does, without a line for each of the ten questions a second that every environment asks
        words = ["-m", "uvicorn", "atroposlib.api:app", "--no-access-log", "--host", LOOPBACK]
        command = [self._python, *words, "--port", str(urlsplit(self._context.api).port)]
        variables = variables_for(self._python, {})
        return ChildProcess(command, folder=self._folder, variables=variables, log=self._folder / "run-api.log")

    def _environment(self, name: str, process: EnvironmentProcess) -> Callable[[], ChildProcess]:
        log = self._folder / f"{name}.log"
        self._logs[name] = EnvironmentLog(log)
        command = command_of(name, process, self._context, python=self._python, folder=self._folder)
        variables = variables_for(self._python, process.variables)
        return partial(ChildProcess, command, folder=Path(process.folder).expanduser(), variables=variables, log=log)

    def _facts_of(self, one: SupervisedProcess) -> EnvironmentFacts:
        log = self._logs[one.name]
        return EnvironmentFacts(
            name=one.name,
            log=str(self._folder / f"{one.name}.log"),
            exit_code=one.exit_code,
            has_given_up=one.has_given_up,
            log_tail="" if one.is_running else log_tail(self._folder / f"{one.name}.log"),
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
