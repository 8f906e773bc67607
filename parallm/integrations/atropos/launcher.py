"""Starts run-api and environments where a run says so, watches them, and ends them with the run.

Called by the wiring of a run. Environments begin when the trainer is registered, and end and begin anew with each new
registration: run-api knows only those that have come after it.
"""

import asyncio
import dataclasses
import json
import logging
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from parallm.errors import ConfigError
from parallm.integrations.atropos.diagnosis import causes_of
from parallm.integrations.atropos.source import AtroposFacts
from parallm.integrations.atropos.supervisor import SupervisedProcess, variables_for
from parallm.integrations.atropos.trainer_client import ApiFailed, ApiUnreachable, TrajectoryApi
from parallm.rollout.settings import AtroposSettings, EnvironmentProcess, RolloutSettings

ENVIRONMENT_HOST = Path(__file__).with_name("environment_host.py")
LOOPBACK = "127.0.0.1"
REGISTERED = re.compile(rb"Initialized env with id (\d+)")
"""Line of an environment's log with the id under which run-api knows it."""
SECONDS_BETWEEN_TURNS = 0.25
SECONDS_TO_ANSWER = 60.0
"""Longest start of run-api, which imports some packages first."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchContext:
    """Settings, addresses and names that all environments of a run have to know."""

    rollout: RolloutSettings
    server: str
    """URL of this process."""
    recipes: str
    """The folder of the recipes that come with ParaLLM."""
    tokenizer: str
    """A folder or hub id that transformers reads."""
    model: str
    """The name of the policy in requests."""

    @property
    def api(self) -> str:
        """URL of run-api."""
        return self.rollout.atropos.url.rstrip("/")


def own_config(context: LaunchContext, process: EnvironmentProcess) -> dict[str, Any]:
    """The configuration of an environment, as atroposlib's `serve --config` reads it.

    The one server has two entries: given a single one, environments whose own default is no list drop its URL and ask
    localhost:9004 to 9007.
    """
    env = {
        "group_size": context.rollout.group_size,
        "batch_size": context.rollout.problems_per_step * context.rollout.group_size,
        "max_token_length": context.rollout.max_tokens,
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
    """Return the command line of an environment, after its configuration is written into `folder`.

    Raises ConfigError for a script that is not there.
    """
    working_folder = Path(process.folder).expanduser().resolve()
    script = working_folder / Path(process.script.replace("{recipes}", context.recipes)).expanduser()
    if not script.is_file():
        raise ConfigError(
            f"rollout.atropos.start.environments.{name}: {script} is no file; the environments of Atropos are in its "
            "repository, not in the package atroposlib"
        )
    config = folder / f"{name}.json"
    config.write_text(json.dumps(own_config(context, process), indent=1))
    urls = {"{api}": context.api, "{server}": context.server}
    values = {"{config}": str(config), **urls, "{tokenizer}": context.tokenizer}
    arguments = []
    for argument in process.arguments:
        for placeholder, value in values.items():
            argument = argument.replace(placeholder, value)
        arguments.append(argument)
    return [python, str(ENVIRONMENT_HOST), str(script), *arguments]


class Launcher:
    """Owns the processes of one Atropos run. Used on the asyncio thread.

    Loop contract (`run`): consumes the facts of the trainer's side / waits for nothing / produces processes and, in
    `explain`, reasons / ends when it is cancelled; `close` ends what it has started.
    """

    def __init__(
        self,
        context: LaunchContext,
        folder: Path,
        *,
        api: TrajectoryApi,
        facts: Callable[[], AtroposFacts],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Logs and files go below `folder`. Raises ConfigError for what cannot be started."""
        self._settings = settings = context.rollout.atropos.start
        self._context = context
        self._folder = folder / "atropos"
        self._api, self._facts, self._clock = api, facts, clock
        self._registered_at: float | None = None
        self._waiting_since: float | None = None
        self._explained: dict[str, str] = {}  # texts of the causes that were logged in this wait, by name
        self._log_offsets: dict[str, int] = {}  # begin of what `_env_id` has not read
        self._python = str(Path(settings.python).expanduser().absolute()) if settings.python else sys.executable
        if settings.api or settings.environments:
            self._folder.mkdir(parents=True, exist_ok=True)
            check_interpreter(self._python)
        self._run_api = self._supervised_api() if settings.api else None
        self._environments = tuple(self._environment(*pair) for pair in settings.environments.items())

    async def start(self) -> None:
        """Start run-api, if the settings say so, and wait until it answers. Raises ConfigError if it does not."""
        if self._run_api is None:
            return
        self._run_api.supervise(self._clock())
        deadline = self._clock() + SECONDS_TO_ANSWER
        while self._clock() < deadline and not self._run_api.supervise(self._clock()):
            with suppress(ApiUnreachable, ApiFailed):
                await self._api.info()
                return
            await asyncio.sleep(SECONDS_BETWEEN_TURNS)
        raise ConfigError(
            f"rollout.atropos.start.api: run-api does not answer; {self._run_api.log} ends with: "
            f"{self._run_api.log_tail()}"
        )

    async def run(self) -> None:
        while True:
            await self._turn()
            await asyncio.sleep(SECONDS_BETWEEN_TURNS)

    async def close(self) -> None:
        """End all processes: environments first, which would fail without run-api."""
        await self._end_environments()
        if self._run_api is not None:
            await self._run_api.end()

    def explain(self, facts: AtroposFacts) -> str | None:
        """Return why no batch comes, once a step has waited for too long. Logs each cause once in a wait."""
        if facts.waiting_since is None:
            return None
        seconds = self._clock() - facts.waiting_since
        if seconds < self._settings.why_seconds:
            return None
        if facts.waiting_since != self._waiting_since:
            self._waiting_since = facts.waiting_since
            self._explained.clear()
        causes = causes_of(facts, self._environments)
        for name, text in causes.items():
            if name not in self._explained:
                logger.warning("no batch for %.0f s: %s", seconds, text)
                self._explained[name] = text
        return "no batch: " + "; ".join(self._explained[name] for name in causes)

    async def _turn(self) -> None:
        now, facts = self._clock(), self._facts()
        if self._run_api is not None and self._run_api.supervise(now):
            # before it starts again: a post to an API without a trainer keeps it from registering one
            await self._end_environments()
        if facts.api.registered_at != self._registered_at:
            await self._end_environments()  # the new registration knows none of them
            self._registered_at = facts.api.registered_at
        if facts.api.state in ("waiting", "serving"):
            for process in self._environments:
                if process.supervise(now):
                    await self._disconnect(process)

    async def _disconnect(self, process: SupervisedProcess) -> None:
        """Make run-api wait no longer for groups of an environment that has ended."""
        env_id = self._env_id(process)
        if env_id is None:
            return
        try:
            await self._api.disconnect(env_id)
            logger.info("%s, which had the id %d, is disconnected from run-api", process.name, env_id)
        except (ApiUnreachable, ApiFailed) as error:
            logger.warning("%s could not be disconnected: %s", process.name, error)

    async def _end_environments(self) -> None:
        await asyncio.gather(*(process.end() for process in self._environments))
        for process in self._environments:
            self._env_id(process)  # forgotten: run-api is to know it no more

    def _env_id(self, process: SupervisedProcess) -> int | None:
        """Return the newest id that an environment's log has named since the last call."""
        env_id = None
        with suppress(OSError), process.log.open("rb") as log:
            log.seek(self._log_offsets[process.name])
            for line in log:
                if match := REGISTERED.search(line):
                    env_id = int(match[1])
            self._log_offsets[process.name] = log.tell()
        return env_id

    def _supervised_api(self) -> SupervisedProcess:
        # what run-api does, without a log line for each of the ten questions a second of every environment
        port = str(urlsplit(self._context.api).port)
        command = ["-m", "uvicorn", "atroposlib.api:app", "--no-access-log", "--host", LOOPBACK, "--port", port]
        return self._supervised("run-api", [self._python, *command], self._folder, {})

    def _environment(self, name: str, process: EnvironmentProcess) -> SupervisedProcess:
        command = command_of(name, process, self._context, python=self._python, folder=self._folder)
        supervised = self._supervised(name, command, Path(process.folder).expanduser(), process.variables)
        # after what an earlier run has left
        self._log_offsets[name] = supervised.log.stat().st_size if supervised.log.exists() else 0
        return supervised

    def _supervised(
        self, name: str, command: Sequence[str], folder: Path, variables: Mapping[str, str]
    ) -> SupervisedProcess:
        return SupervisedProcess(
            name,
            command,
            folder=folder,
            variables=variables_for(self._python, variables),
            log=self._folder / f"{name}.log",
            max_restarts=self._settings.max_restarts,
        )


def with_free_port(settings: AtroposSettings) -> AtroposSettings:
    """Return the settings with a free port in place of port 0, for a run-api that this run starts.

    The API has no keys, so it listens on loopback alone. Raises ConfigError for a URL where this run cannot start it.
    """
    parts = urlsplit(settings.url)
    if not settings.start.api:
        return settings
    if parts.scheme != "http" or parts.hostname not in (LOOPBACK, "localhost") or parts.port is None or parts.path:
        raise ConfigError(
            f"rollout.atropos.url={settings.url}: with rollout.atropos.start.api it is started on this machine, which "
            f"no other machine may reach; name http://{LOOPBACK}:PORT, of which port 0 is any free one"
        )
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as uvicorn does
        try:
            listener.bind((LOOPBACK, parts.port))
        except OSError as error:
            raise ConfigError(
                f"rollout.atropos.url={settings.url}: the port is taken ({error.strerror}); join what runs there with "
                "rollout.atropos.start.api=false, or name another port"
            ) from error
        port = int(listener.getsockname()[1])
    return dataclasses.replace(settings, url=f"http://{LOOPBACK}:{port}")


def check_interpreter(python: str) -> None:
    """Raise ConfigError for an interpreter without atroposlib."""
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
