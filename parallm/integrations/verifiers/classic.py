"""Environments of verifiers 0.3 and before, which `load_environment` makes. Imported by `load_verifiers` alone.

Each episode is played by the environment's own `rollout`.
"""

import asyncio
import json
import logging
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import verifiers as vf
from parallm.errors import ConfigError
from parallm.integrations.verifiers.environment import MODEL, TOTAL, BackgroundLoop, EpisodeFailed
from parallm.integrations.verifiers.exchange import Drive, Exchange, ModelTurn, NoMoreTurns, UnsupportedEpisode
from parallm.types import Message, Split
from verifiers.errors import OverlongPromptError
from verifiers.types import Messages, Response, ResponseMessage, State, Tool, ToolCall
from verifiers.utils.message_utils import normalize_messages


class ClassicSource:
    """An environment that plays turn by turn. Rewards of groups see all episodes of a problem."""

    is_endless = False

    def __init__(self, environment_id: str, options: Mapping[str, Any], loop: BackgroundLoop) -> None:
        """Raises ConfigError. Must be called on the main thread, where the package sets its signal handlers."""
        logging.getLogger("verifiers").setLevel(logging.WARNING)  # it logs every step of loading
        self._env = make_env(environment_id, options)
        self.has_test_split = self._env.eval_dataset_source is not None or self._env.eval_dataset is not None

    def tasks(self, split: Split, start: int, count: int | None) -> Sequence[Mapping[str, Any]]:
        held_out = split == "test" and self.has_test_split
        rows = self._env.get_eval_dataset() if held_out else self._env.get_dataset()
        stop = len(rows) if count is None else min(start + count, len(rows))
        tasks: list[Mapping[str, Any]] = rows.select(range(min(start, stop), stop)).to_list()
        return tasks

    def opening(self, task: Mapping[str, Any]) -> tuple[Message, ...]:
        return to_messages(normalize_messages(task["prompt"], field_name="prompt"))

    def tools(self, task: Mapping[str, Any]) -> str:
        info = task.get("info")
        info = json.loads(info) if isinstance(info, str) else info
        own = (info or {}).get("tool_defs") or self._env.tool_defs or []
        return tools_json([Tool.model_validate(tool) for tool in own])

    def drives(self, task: Mapping[str, Any], count: int) -> Sequence[Drive]:
        group = ScoringGroup(self._env.rubric, count) if self._env.requires_group_rollouts and count > 1 else None
        return [partial(self._play, dict(task), group)] * count

    async def _play(
        self, task: dict[str, Any], group: "ScoringGroup | None", exchange: Exchange
    ) -> Mapping[str, float]:
        try:
            state = await self._env.rollout(task, ExchangeClient(exchange, self.tools(task)), MODEL, {})
            if state.get("error") is not None:
                raise EpisodeFailed(repr(state["error"])) from state["error"]
            exchange.end_questions()
        except BaseException:
            if group is not None:
                group.leave()
            raise
        if group is not None:
            await group.score(state)
        elif self._env.requires_group_rollouts:
            await self._env.rubric.score_group([state])
        else:
            await self._env.rubric.score_rollout(state)
        await self._env.rubric.cleanup(state)
        return {**(state["metrics"] or {}), TOTAL: state["reward"]}


class ScoringGroup:
    """Episodes of one problem that are scored together, when the last of them has ended."""

    def __init__(self, rubric: vf.Rubric, count: int) -> None:
        self._rubric = rubric
        self._num_missing = count
        self._states: list[State] = []
        self._is_whole = asyncio.Event()
        self._scoring: asyncio.Task[None] | None = None

    async def score(self, state: State) -> None:
        """Wait for the other episodes and score all of them. Raises what the rubric raises."""
        self._states.append(state)
        self.leave()
        await self._is_whole.wait()
        if self._scoring is None:
            self._scoring = asyncio.ensure_future(self._rubric.score_group(self._states))
        await asyncio.shield(self._scoring)

    def leave(self) -> None:
        self._num_missing -= 1
        if self._num_missing == 0:
            self._is_whole.set()


class ExchangeClient(vf.Client):
    """The model as an episode calls it, with the tools that its prompt has."""

    def __init__(self, exchange: Exchange, tools: str) -> None:
        super().__init__(exchange)
        self._tools = tools

    def setup_client(self, config: object) -> Exchange:
        raise ConfigError(f"made from an exchange, not from {config!r}")

    async def to_native_tool(self, tool: Tool) -> Tool:
        return tool

    async def to_native_prompt(self, messages: Messages) -> tuple[tuple[Message, ...], dict[str, Any]]:
        return to_messages(messages), {}

    async def get_native_response(
        self,
        prompt: tuple[Message, ...],
        model: str,
        sampling_args: object,
        tools: list[Tool] | None = None,
        **rest: Any,
    ) -> ModelTurn:
        """Raises OverlongPromptError where the episode has no turn left, which counts as cut off."""
        if tools_json(tools or []) != self._tools:
            raise UnsupportedEpisode("the environment has changed its tools, which stand in the prompt already")
        try:
            answer: ModelTurn = await self.client.ask(prompt)
        except NoMoreTurns as error:
            raise OverlongPromptError("the episode has no turns or tokens left") from error
        return answer

    async def raise_from_native_response(self, response: ModelTurn) -> None:
        """Accept every answer: an empty one is the model's own."""

    async def from_native_response(self, response: ModelTurn) -> Response:
        calls = [
            ToolCall(id=call.call_id or f"call_{index}", name=call.name, arguments=call.arguments)
            for index, call in enumerate(response.calls)
        ]
        message = ResponseMessage(
            content=response.text,
            tool_calls=calls or None,
            finish_reason="length" if response.is_cut_off else "tool_calls" if calls else "stop",
            is_truncated=response.is_cut_off,
        )
        return Response(id="", created=0, model=MODEL, message=message)

    async def close(self) -> None:
        """Do nothing: the session closes the exchange."""


def tools_json(tools: Sequence[Tool]) -> str:
    """Tools in the JSON of OpenAI's API; empty without tools."""
    functions = [tool.model_dump(include={"name", "description", "parameters"}) for tool in tools]
    return json.dumps([{"type": "function", "function": function} for function in functions]) if tools else ""


def to_messages(messages: Messages) -> tuple[Message, ...]:
    """Convert messages of the package. Raises UnsupportedEpisode for anything but text."""
    return tuple(Message(role=message.role, content=to_text(message.content)) for message in messages)


def to_text(content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [dict(part) for part in content] if isinstance(content, list) else []
    if not parts or any(part.get("type") != "text" for part in parts):
        raise UnsupportedEpisode(f"a message holds {content!r:.80}, and only text can be trained on")
    return "\n".join(str(part["text"]) for part in parts)


def make_env(environment_id: str, options: Mapping[str, Any]) -> vf.Environment:
    """Load an environment. Raises ConfigError for options and environments that do not fit."""
    where = f"environment.id={environment_id!r}"
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        env = vf.load_environment(environment_id, **options)
    except Exception as error:  # an environment may raise anything
        raise ConfigError(f"{where} cannot be made with environment.options={dict(options)}: {error!r}") from error
    finally:
        for number, handler in handlers.items():  # the package replaces them, and a run would not end as it should
            signal.signal(number, handler)
    if not isinstance(env, vf.MultiTurnEnv | vf.EnvGroup):
        raise ConfigError(f"{where} is a {type(env).__name__}; only those that play turn by turn can be trained on")
    if env.provides_advantages:
        raise ConfigError(f"{where} computes advantages of its own, which no learner here takes")
    return env
