"""Environments of verifiers 0.4: tasksets, played by the package's own episodes with our model in the agent's seat."""

import logging
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.configs.agent import agent_config_fields

from parallm.environment.settings import VerifiersSettings
from parallm.environment.verifiers import program
from parallm.environment.verifiers.background import BackgroundLoop
from parallm.environment.verifiers.exchange import Exchange, ExchangeSide
from parallm.environment.verifiers.parts import WEIGHTS, EpisodeFailed, with_total
from parallm.environment.verifiers.policy_client import MODEL, PolicyClient, to_message
from parallm.errors import ConfigError, ProblemError
from parallm.types import Message, Problem, Split

PROGRAM = "parallm_one_question"
sys.modules[PROGRAM] = program  # the package finds harnesses by the name of a top-level module
CLIENT = vf.EvalClientConfig(base_url="http://parallm.invalid/v1", api_key_var="PARALLM_NO_KEY")


class TasksetEnvironment:
    """Any taskset whose episodes have one agent, and no tools or programs of their own."""

    def __init__(self, settings: VerifiersSettings) -> None:
        """Raises ConfigError."""
        for name in ("verifiers", "aiohttp.access"):  # they log every episode and every call
            logging.getLogger(name).setLevel(logging.WARNING)
        self.weights = WEIGHTS
        self._settings = settings
        self._loop = BackgroundLoop("verifiers")
        self._venues: dict[str, Venue] = {}
        self._tasks: dict[str, tuple[Venue, vf.Task]] = {}
        self._openings: dict[str, tuple[Message, ...]] = {}

    def problems(self, split: Split) -> Sequence[Problem]:
        """Raises ConfigError where options do not fit, ProblemError where the data cannot be read."""
        settings = self._settings
        own_test = settings.test_options is not None
        skipped = settings.num_test if split == "train" and not own_test else 0
        count = settings.num_train if split == "train" else settings.num_test
        venue = self._venue(split)
        if count is None and not venue.env.taskset.bounded:
            raise ConfigError(f"environment.id={settings.id!r} has problems without end: set environment.num_train")
        try:
            tasks = list(islice(venue.env.taskset, skipped, None if count is None else skipped + count))
        except Exception as error:
            raise ProblemError(f"environment.id={settings.id!r} cannot load its problems: {error!r}") from error
        openings = self._loop.run(venue.openings(tasks))
        return [self._problem(venue, split, *pair) for pair in zip(tasks, openings, strict=True)]

    def open(self, problem: Problem, count: int) -> Sequence[ExchangeSide]:
        venue, task = self._tasks[problem.answer]
        opening = self._openings[problem.answer]
        return [ExchangeSide(venue.exchange(task, opening), self._loop) for _ in range(count)]

    def _problem(self, venue: "Venue", split: Split, task: vf.Task, opening: tuple[Message, ...]) -> Problem:
        key = f"{self._settings.id}/{split}/{task.data.idx}"
        self._tasks[key], self._openings[key] = (venue, task), opening
        return Problem(problem_id=key, messages=opening, answer=key)

    def _venue(self, split: Split) -> "Venue":
        differing = self._settings.test_options if split == "test" else None
        key = split if differing is not None else ""
        if key not in self._venues:
            options = {**self._settings.options, **(differing or {})}
            self._venues[key] = Venue(make_env(self._settings.id, options), self._settings.correct_at)
            self._loop.run(self._venues[key].start(self._loop))
        return self._venues[key]


class Venue:
    """One environment of the package with its servers. Methods run on the environment's event loop."""

    def __init__(self, env: vf.Env, correct_at: float) -> None:
        self.env = env
        self._correct_at = correct_at
        self._client = PolicyClient()

    async def start(self, loop: BackgroundLoop) -> None:
        await loop.stack.enter_async_context(self.env.serving())
        # no other door: the server makes its clients from their settings, and only knows two kinds of them
        self.env._interception.clients[CLIENT.model_dump_json()] = self._client

    def exchange(self, task: vf.Task, opening: tuple[Message, ...]) -> Exchange:
        return Exchange(lambda exchange: self._play(task, exchange), opening)

    async def openings(self, tasks: Sequence[vf.Task]) -> list[tuple[Message, ...]]:
        """What the model is asked first in each of `tasks`: their prompts, where a first episode really begins so."""
        written = [written_opening(task) for task in tasks]
        if not tasks or (written[0] and written[0] == await self._played_opening(tasks[0])):
            return written
        return [await self._played_opening(task) for task in tasks]

    async def _played_opening(self, task: vf.Task) -> tuple[Message, ...]:
        exchange = self.exchange(task, ())
        try:
            return await exchange.opening()
        except Exception as error:
            raise ProblemError(f"the episode of task {task.data.idx} cannot begin: {error!r}") from error
        finally:
            exchange.close()

    async def _play(self, task: vf.Task, exchange: Exchange) -> Mapping[str, float]:
        traces: list[vf.Trace] = []

        def begun(trace: vf.Trace) -> None:
            traces.append(trace)
            self._client.add(trace, exchange)

        try:
            episode = await self.env.run_episode(task, vf.ModelContext(model=MODEL, client=CLIENT), on_trace=begun)
        finally:
            for trace in traces:
                self._client.remove(trace)
        return parts_of(episode, self._correct_at)


def parts_of(episode: vf.Episode, correct_at: float) -> Mapping[str, float]:
    """Rewards and metrics by name, and the sum of the rewards by their weights. Raises EpisodeFailed."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise EpisodeFailed("; ".join(f"{error.type}: {error.message}" for error in errors) or "no reason given")
    (trace,) = episode.traces
    parts = {name: value for name, value in trace.metrics.items() if value is not None}
    parts |= {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    return with_total(parts, trace.reward, correct_at)


def written_opening(task: vf.Task) -> tuple[Message, ...]:
    """The task's own prompt; nothing where its user speaks first."""
    harness = program.OneQuestion(program.OneQuestionConfig(id=PROGRAM))
    return tuple(to_message(message) for message in program.opening(harness, task.data)) if task.data.prompt else ()


def make_env(environment_id: str, options: Mapping[str, Any]) -> vf.Env:
    """Raises ConfigError for options and environments that do not fit."""
    where = f"environment.id={environment_id!r}"
    taskset = {"id": environment_id, **options}
    try:
        seats = list(agent_config_fields(vf.resolve_env_config({"taskset": taskset})))
        if len(seats) != 1:
            raise ConfigError(f"{where} has the agents {', '.join(seats)}; environments of one agent can be played")
        seat = {"harness": {"id": PROGRAM}, "runtime": {"type": "subprocess"}}
        config = {"taskset": taskset, seats[0]: seat, "interception": {"type": "server"}}
        env = vf.load_environment(vf.resolve_env_config(config))
    except ValidationError as error:
        raise ConfigError(f"{where} does not take environment.options={dict(options)}: {error}") from error
    if wanting := what_we_lack(env, environment_id):
        raise ConfigError(f"{where} {wanting}; environments that are plain chats can be played")
    return env


def what_we_lack(env: vf.Env, environment_id: str) -> str:
    """What the environment's episodes would need; empty where there is nothing."""
    task_class = type(env.taskset).task_type()
    if vf.default_harness_id(environment_id) == environment_id:
        return "brings a program of its own that calls the model"
    if task_class.toolsets(env.taskset.config.task) or env.taskset.toolsets(env.taskset.config):
        return "has tools"
    return "has tasks that need a container" if task_class.NEEDS_CONTAINER else ""
