"""Environments of verifiers 0.4: tasksets, played by the package's own episodes. Imported by `load_verifiers` alone.

The model sits in the agent's seat: the package's interception server asks `PolicyClient` for each turn.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import islice
from typing import Any

import aiohttp
from pydantic import ValidationError

import verifiers.v1 as vf
from parallm.errors import ConfigError
from parallm.integrations.verifiers.environment import MODEL, TOTAL, BackgroundLoop, EpisodeFailed
from parallm.integrations.verifiers.exchange import Drive, Exchange, NoMoreTurns, UnsupportedEpisode
from parallm.types import Message, Split
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects import Dialect
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.graph import PendingTurn
from verifiers.v1.types import content_text

__all__ = ["OneQuestion", "TasksetSource"]

HARNESS = "parallm_one_question"
sys.modules[HARNESS] = sys.modules[__name__]  # the package finds harnesses by the name of a top-level module
CLIENT = vf.EvalClientConfig(base_url="http://parallm.invalid/v1", api_key_var="PARALLM_NO_KEY")


class TasksetSource:
    """A taskset whose episodes have one agent, and no tools or programs of their own."""

    has_test_split = False

    def __init__(self, environment_id: str, options: Mapping[str, Any], loop: BackgroundLoop) -> None:
        """Raises ConfigError."""
        for name in ("verifiers", "aiohttp.access"):  # they log every episode and every call
            logging.getLogger(name).setLevel(logging.WARNING)
        # this one logs every call that is refused because an episode has no turns left
        logging.getLogger("verifiers.v1.interception.server").setLevel(logging.ERROR)
        self._env = make_env(environment_id, options)
        self._client = PolicyClient()
        loop.run(self._serve(loop.stack))

    @property
    def is_endless(self) -> bool:
        return not self._env.taskset.bounded

    def tasks(self, split: Split, start: int, count: int | None) -> Sequence[vf.Task]:
        return list(islice(self._env.taskset, start, None if count is None else start + count))

    def opening(self, task: vf.Task) -> tuple[Message, ...]:
        if task.data.prompt is None:
            return ()
        harness = OneQuestion(OneQuestionConfig(id=HARNESS))
        return tuple(to_message(message) for message in opening_of(harness, task.data))

    def tools(self, task: vf.Task) -> str:
        return ""  # environments with tools are refused

    def drives(self, task: vf.Task, count: int) -> Sequence[Drive]:
        return [partial(self._play, task)] * count

    async def _serve(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(self._env.serving())
        # there is no other way in: the server makes clients from settings, and knows only two kinds of them
        self._env._interception.clients[CLIENT.model_dump_json()] = self._client

    async def _play(self, task: vf.Task, exchange: Exchange) -> Mapping[str, float]:
        traces: list[vf.Trace] = []

        def begun(trace: vf.Trace) -> None:
            traces.append(trace)
            self._client.episodes[trace.id] = trace, exchange

        try:
            episode = await self._env.run_episode(task, vf.ModelContext(model=MODEL, client=CLIENT), on_trace=begun)
        finally:
            for trace in traces:
                self._client.episodes.pop(trace.id, None)
        return parts_of(episode)


def parts_of(episode: vf.Episode) -> Mapping[str, float]:
    """Return rewards and metrics by name, and the weighted sum of the rewards. Raises EpisodeFailed."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise EpisodeFailed("; ".join(f"{error.type}: {error.message}" for error in errors) or "no reason given")
    (trace,) = episode.traces
    parts = {name: value for name, value in trace.metrics.items() if value is not None}
    parts |= {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    return {**parts, TOTAL: trace.reward}


def make_env(environment_id: str, options: Mapping[str, Any]) -> vf.Env:
    """Load an environment. Raises ConfigError for options and environments that do not fit."""
    where = f"environment.id={environment_id!r}"
    taskset = {"id": environment_id, **options}
    try:
        seats = list(agent_config_fields(vf.resolve_env_config({"taskset": taskset})))
        if len(seats) != 1:
            raise ConfigError(f"{where} has the agents {', '.join(seats)}; environments of one agent can be played")
        seat = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}
        config = {"taskset": taskset, seats[0]: seat, "interception": {"type": "server"}}
        env = vf.load_environment(vf.resolve_env_config(config))
    except ValidationError as error:
        raise ConfigError(f"{where} does not take environment.options={dict(options)}: {error}") from error
    if obstacle := unsupported_feature(env, environment_id):
        raise ConfigError(f"{where} {obstacle}; environments that are plain chats can be played")
    return env


def unsupported_feature(env: vf.Env, environment_id: str) -> str:
    """Return what the environment has and cannot be played here; empty if it can be played."""
    task_class = type(env.taskset).task_type()
    if vf.default_harness_id(environment_id) == environment_id:
        return "brings a program of its own that calls the model"
    if task_class.toolsets(env.taskset.config.task) or env.taskset.toolsets(env.taskset.config):
        return "has tools"
    return "has tasks that need a container" if task_class.NEEDS_CONTAINER else ""


class PolicyClient(vf.Client):
    """The model, as the interception server calls it. Episodes under way are known by the ids of their traces."""

    def __init__(self) -> None:
        self.episodes: dict[str, tuple[vf.Trace, Exchange]] = {}

    async def get_response(
        self,
        dialect: Dialect[Any],
        body: dict[str, Any],
        sampling: vf.SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> vf.Response:
        """Put a call to its episode. Raises ProviderError where that has no turn left, which counts as cut off."""
        trace, exchange = self.episodes[session_id or ""]
        try:
            messages = turn.prompt if turn is not None else dialect.parse_request(body).messages
            answer = await exchange.ask([to_message(message) for message in messages])
        except NoMoreTurns as error:
            trace.stop("max_output_tokens")
            raise vf.ProviderError("the episode has no turns or tokens left", status_code=400) from error
        except UnsupportedEpisode as error:
            raise vf.ProviderError(str(error), status_code=400) from error
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": answer.text},
            "finish_reason": "length" if answer.is_cut_off else "stop",
        }
        raw = {"id": trace.id, "object": "chat.completion", "created": 0, "model": MODEL, "choices": [choice]}
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


def to_message(message: vf.Message) -> Message:
    """Convert a message of the package. Raises UnsupportedEpisode for anything but text."""
    content = message.content
    if isinstance(content, list) and any(part.type != "text" for part in content):
        raise UnsupportedEpisode("a message holds an image, and only text can be trained on")
    return Message(role=message.role, content=content_text(content))


class OneQuestionConfig(vf.HarnessConfig):
    pass


class OneQuestion(vf.Harness[OneQuestionConfig]):
    """The harness that plays a task without a process of its own: one question per segment.

    Its calls of the model go through the package's interception server, so stops, limits, rewrites and traces hold.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Ask once. A refusal, as by a stop or a limit, becomes an exit code that the package understands."""
        body = {"model": ctx.model, "messages": [message_to_wire(message) for message in opening_of(self, data)]}
        headers = {"Authorization": f"Bearer {secret}"}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.post(f"{endpoint}/chat/completions", json=body, headers=headers) as response,
        ):
            text = await response.text()
        return vf.ProgramResult(exit_code=int(response.status != 200), stdout="", stderr=text)


def opening_of(harness: vf.Harness[OneQuestionConfig], data: vf.TaskData) -> vf.Messages:
    """Return the conversation that a segment begins with."""
    system, prompt = harness.resolve_prompt(data)
    messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or [])
    return [*([vf.SystemMessage(content=system)] if system else []), *messages]
