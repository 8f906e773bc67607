"""Problems -> scored episodes: generation, the environment's replies between turns, and its scores at the end.

Used by `Collector` and `Evaluator`. A later turn's prompt is the very token ids of the earlier ones.
"""

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial

from parallm.conversation import ToolCall
from parallm.environment.environment import (
    AnyEnvironment,
    EnvironmentSession,
    environment_of,
    is_multi_turn,
    is_stateful,
    open_sessions,
)
from parallm.errors import ContextTooLong
from parallm.model.chat.tokenizer import ASSISTANT, ChatTokenizer, reply_tokens
from parallm.rollout.environment_calls import CallResult, EnvironmentCalls, EnvironmentFault, attempt
from parallm.rollout.episode import Episode
from parallm.rollout.reward_model import RewardModel
from parallm.rollout.scoring import ScoredEpisode, score_call, to_score
from parallm.rollout.settings import EpisodeSettings
from parallm.seeds import mix
from parallm.types import Completion, GenerationRequest, Message, Problem

logger = logging.getLogger(__name__)

Generate = Callable[[Sequence[GenerationRequest]], AsyncGenerator[tuple[int, Completion], None]]
"""The face of `AsyncEngine.completions`."""
OpenedGroup = tuple[Sequence[EnvironmentSession | None], EnvironmentFault | None]
"""The sessions of a group's episodes by index, or why they could not be opened."""
NUM_MARK_TOKENS = 8
"""Tokens at the end of a prompt that may hold the mark with which reasoning begins."""


class RolloutRunner:
    """Runs and scores the episodes of problems, each at its own pace: no episode waits for another one's reply.

    The engine gets the first turns of all at one moment; a later turn begins as soon as the reply is there, and an
    episode is scored as soon as it ends. Used on the asyncio thread.
    """

    def __init__(
        self,
        generate: Generate,
        tokenizer: ChatTokenizer,
        environment: AnyEnvironment,
        settings: EpisodeSettings,
        reward_model: RewardModel | None = None,
    ) -> None:
        self._generate = generate
        self._tokenizer = tokenizer
        self._environment = environment
        self._max_turns = settings.max_turns
        self._calls = EnvironmentCalls(settings.score_seconds)
        self._reward_model = reward_model

    async def run_episodes(
        self,
        problems: Sequence[Problem],
        requests: Sequence[GenerationRequest],
        progress: Callable[[int], None] = lambda num_scored: None,
    ) -> list[list[ScoredEpisode]]:
        """Return the episodes of each problem's request, by index; `progress` gets their number after each score.

        Raises what generating raises, after the other episodes are cancelled. Sessions of episodes that were not scored
        are closed, however it ends.
        """
        first = [self._for_turn(*pair, turn=0) for pair in zip(problems, requests, strict=True)]
        opened: dict[int, OpenedGroup] = {}
        unscored: dict[tuple[int, int], EnvironmentSession] = {}  # by the indices of request and completion
        groups: list[list[ScoredEpisode]] = [[] for _ in requests]
        counts = itertools.count(1)

        async def finish(index: int, completion: Completion) -> None:
            episode = self._begin(problems[index], requests[index], completion, opened[index])
            await self._run_later_turns(episode)
            scored = await self._score(episode)
            session = unscored.pop((index, completion.index), None)
            if session is not None and scored.score.fault is not None:
                close_session(problems[index], session)
            groups[index].append(scored)
            progress(next(counts))

        try:
            async with task_group() as tasks, aclosing(self._completions(problems, first)) as completions:
                async for index, completion in completions:
                    if index not in opened:
                        opened[index] = self._open(problems[index], requests[index].n)
                        sessions = enumerate(opened[index][0])
                        unscored |= {(index, place): session for place, session in sessions if session is not None}
                    tasks.create_task(finish(index, completion))
        finally:
            for (index, _), session in unscored.items():
                close_session(problems[index], session)
        scored = [sorted(group, key=lambda one: one.episode.index) for group in groups]
        return scored if self._reward_model is None else await self._reward_model.rated(scored)

    def _open(self, problem: Problem, count: int) -> OpenedGroup:
        """Open the sessions of a group."""
        opened = attempt(partial(open_sessions, self._environment, problem, count))
        fault = opened.fault or fault_of_open(opened.value, count)
        return ([None] * count if fault is not None else opened.value), fault

    def _begin(
        self, problem: Problem, request: GenerationRequest, completion: Completion, opened: OpenedGroup
    ) -> Episode:
        sessions, fault = opened
        session = sessions[completion.index]
        episode = Episode(problem=problem, request=request, index=completion.index, session=session)
        self._append(episode, completion)
        if fault is not None:
            episode.fault, episode.is_over = fault, True
        return episode

    async def _run_later_turns(self, episode: Episode) -> None:
        for turn in range(1, self._max_turns):
            if not episode.is_over:
                await self._reply(episode)
            if episode.is_over:
                return
            async for _, completion in self._completions([episode.problem], [self._next_request(episode, turn)]):
                self._append(episode, completion)

    async def _score(self, episode: Episode) -> ScoredEpisode:
        call = score_call(self._environment, episode) if episode.fault is None else None
        return to_score(self._environment, episode, await self._calls.call(call) if call else CallResult())

    def _append(self, episode: Episode, completion: Completion) -> None:
        if not self._has_turns(episode.problem):
            episode.append_completion(completion, completion.text)
            episode.is_over = True
        else:
            # a completion's own text ends before a stop string, which the environment must see
            text = self._tokenizer.decode(completion.tokens)
            prompt = (*episode.request.prompt_tokens, *episode.tokens)
            episode.append_completion(completion, text, parse_response(self._tokenizer, episode.problem, prompt, text))
            episode.text = self._tokenizer.decode(episode.tokens)

    async def _reply(self, episode: Episode) -> None:
        """Append the environment's reply, or end the episode."""
        result = await self._calls.call(self._reply_call(episode))
        fault = result.fault or fault_of_reply(result.value)
        if fault is not None or result.value is None:
            episode.fault, episode.is_over = fault, True
        else:
            self._append_reply(episode, result.value)

    def _reply_call(self, episode: Episode) -> Callable[[], object]:
        if episode.session is not None:
            return partial(episode.session.reply, tuple(episode.turns))
        environment = environment_of(self._environment, episode.problem)
        assert is_multi_turn(environment), "other episodes are over after their first turn"
        return partial(environment.reply, episode.problem, tuple(episode.turns))

    def _append_reply(self, episode: Episode, reply: Sequence[Message]) -> None:
        newest = episode.tokens[len(episode.tokens) - episode.num_newest :]
        messages = (*episode.problem.messages, *episode.turns)
        episode.append_reply(reply, reply_tokens(self._tokenizer, messages, newest, reply))
        episode.text = self._tokenizer.decode(episode.tokens)

    def _next_request(self, episode: Episode, turn: int) -> GenerationRequest:
        first = episode.request
        seed = first.sampling.seed
        sampling = replace(
            first.sampling,
            max_tokens=episode.num_left,
            seed=None if seed is None else mix(mix(seed, episode.index), turn),
        )
        request = replace(
            first,
            request_id=f"{first.request_id}-{episode.index}-{turn}",
            prompt_tokens=(*first.prompt_tokens, *episode.tokens),
            sampling=sampling,
            n=1,
        )
        return self._for_turn(episode.problem, request, turn)

    def _for_turn(self, problem: Problem, request: GenerationRequest, turn: int) -> GenerationRequest:
        """Return `request` with the environment's stop strings and with whether another turn may follow.

        The last turn gets no reply, so nothing stops it and nothing continues it.
        """
        if not self._has_turns(problem) or turn == self._max_turns - 1:
            return replace(request, is_continued=False)
        environment = environment_of(self._environment, problem)
        stop = tuple(getattr(environment, "stop", ()))
        sampling = replace(request.sampling, stop=stop) if stop else request.sampling
        return replace(request, sampling=sampling, is_continued=True)

    async def _completions(
        self, problems: Sequence[Problem], requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[tuple[int, Completion], None]:
        """Generate one request per problem. Raises ContextTooLong that names the problem with the longest prompt."""
        try:
            async with aclosing(self._generate(requests)) as completions:
                async for index, completion in completions:
                    yield index, completion
        except ContextTooLong as error:
            problem, request = max(zip(problems, requests, strict=True), key=lambda pair: len(pair[1].prompt_tokens))
            raise named(error, problem, request) from error

    def _has_turns(self, problem: Problem) -> bool:
        environment = environment_of(self._environment, problem)
        return is_multi_turn(environment) or is_stateful(environment)


@asynccontextmanager
async def task_group() -> AsyncGenerator[asyncio.TaskGroup, None]:
    """An `asyncio.TaskGroup` that raises its first error as it is."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except ExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__


def close_session(problem: Problem, session: EnvironmentSession) -> None:
    if (fault := attempt(session.close).fault) is not None:
        logger.warning("problem %s: closing an episode has failed: %s", problem.problem_id, fault.detail)


def fault_of_open(value: object, count: int) -> EnvironmentFault | None:
    """Return the fault `malformed` for anything but a session for each of `count` episodes."""
    if isinstance(value, Sequence) and len(value) == count:
        return None
    return EnvironmentFault("malformed", f"open returned {value!r:.80}, not {count} sessions")


def fault_of_reply(value: object) -> EnvironmentFault | None:
    """Return the fault `malformed` for anything but None, one assistant message, or messages of other roles."""
    messages = list(value) if isinstance(value, Sequence) else []
    fits = messages and all(isinstance(message, Message) for message in messages)
    if value is None or (fits and (len(messages) == 1 or all(message.role != ASSISTANT for message in messages))):
        return None
    return EnvironmentFault(
        "malformed", f"reply returned {value!r:.80}, not None, one assistant message, or messages of other roles"
    )


def named(error: ContextTooLong, problem: Problem, request: GenerationRequest) -> ContextTooLong:
    """Return `error` with the problem's name and a way out."""
    if error.limit is None:
        return ContextTooLong(f"problem {problem.problem_id}: {error}", error.parameter)
    return ContextTooLong(
        f"problem {problem.problem_id}: its prompt has {len(request.prompt_tokens)} tokens, and with "
        f"rollout.max_tokens={request.sampling.max_tokens} it does not fit the context of {error.limit} tokens; "
        "lower rollout.max_tokens, leave the problem out, or raise engine.max_context if the model knows more",
        error.parameter,
        limit=error.limit,
    )


def encode_problem(tokenizer: ChatTokenizer, problem: Problem) -> tuple[int, ...]:
    """Return the prompt's tokens. Raises InvalidRequest if the chat template refuses the messages or has no tools."""
    if not problem.tools:
        return tokenizer.encode_chat(problem.messages)
    turns = [{"role": message.role, "content": message.content} for message in problem.messages]
    return tokenizer.encode_prompt(turns, tools=json.loads(problem.tools)).tokens


def parse_response(tokenizer: ChatTokenizer, problem: Problem, prompt: Sequence[int], text: str) -> Message | None:
    """Return the turn that `text` after `prompt` means; None if the problem has no functions.

    Reasoning is left out. Text between the marks of a call that is no call stays in the content.
    """
    if not problem.tools:
        return None
    output, tools = tokenizer.output, json.loads(problem.tools)
    in_reasoning = output.ends_with_reasoning_mark(tokenizer.decode(prompt[-NUM_MARK_TOKENS:], special=True))
    reader = output.reader(begins_in_reasoning=in_reasoning, has_tools=True)
    content, call = "", ""
    calls: list[ToolCall] = []
    for section, piece in [*reader.read(text), *reader.finish(), ("text", "")]:
        if section == "tool":
            call += piece
            continue
        if call:
            parsed = output.parse_calls(call, tools)
            content += "" if parsed else call.join(output.tool_marks or ("", ""))
            calls, call = [*calls, *parsed], ""
        content += piece if section == "text" else ""
    return Message(role="assistant", content=content.strip(), calls=tuple(calls))
