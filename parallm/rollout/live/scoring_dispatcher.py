"""Rewards by the scoring functions that clients have named, beside the event loop."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parallm.errors import InvalidRequest
from parallm.rollout.environment_calls import CallResult, EnvironmentFault
from parallm.rollout.live.records import RecordedTrajectory
from parallm.rollout.live.scoring_functions import (
    EnvironmentScoring,
    ScoringFunction,
    ScoringInput,
    load_scoring_functions,
    shipped_scoring_functions,
)
from parallm.rollout.live.scoring_worker import ScoringWorker
from parallm.rollout.scoring import read_parts

logger = logging.getLogger(__name__)

SCALAR_REWARD = "reward"
"""The name of a reward that is one number."""
OnParts = Callable[[RecordedTrajectory, Mapping[str, float]], EnvironmentFault | None]
"""Takes the parts of a reward; a fault where they cannot be one."""


class ScoringDispatcher:
    """Calls a trajectory's scoring function once, if it has one, and hands on what came of it. For the asyncio thread.

    `on_parts` gets the parts of a reward, `on_fault` a trajectory without one and the kind of fault.
    """

    def __init__(
        self,
        targets: Mapping[str, str],
        seconds: float,
        on_parts: OnParts,
        on_fault: Callable[[RecordedTrajectory, str], None],
    ) -> None:
        """`targets` name functions beside those of ParaLLM's own environments, and win over these. Raises ConfigError
        for a function that is not there."""
        self._seconds = seconds
        self._configured = load_scoring_functions(targets)
        self._functions: dict[str, ScoringFunction] = {**shipped_scoring_functions(), **self._configured}
        self._scorers: dict[str, ScoringWorker] = {}
        self._on_parts = on_parts
        self._on_fault = on_fault
        self._decode: Callable[[Sequence[int]], str] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_faults: Counter[tuple[str, str]] = Counter()  # by function and kind

    def check(self, name: str, metadata: Mapping[str, Any]) -> None:
        """Raise InvalidRequest for a function that is not there, or that could not use the metadata."""
        if name not in self._functions:
            known = ", ".join(sorted(self._functions))
            raise InvalidRequest(f"no scoring_function {name[:50]!r}; there are {known}", "scoring_function")
        function = self._functions[name]
        if isinstance(function, EnvironmentScoring):
            function.check(metadata)

    def connect(self, decode: Callable[[Sequence[int]], str], scores: Mapping[str, EnvironmentScoring]) -> None:
        """From now on functions are called; `decode` makes prompts of tokens.

        `scores` are those of the run's environment. Functions that the configuration names win.
        """
        self._functions |= {**scores, **self._configured}
        self._decode = decode

    def begin(self, one: RecordedTrajectory, *, is_patient: bool = False) -> None:
        """Call the function of a trajectory without a reward, unless calls are not possible yet.

        It is a fault where too many calls wait already, unless `is_patient`.
        """
        if one.reward_request.scoring_function is not None and one.rewarded is None and self._decode is not None:
            prompt = self._decode(one.trajectory.prompt_tokens)
            task = asyncio.create_task(
                self._score(one, one.reward_request.scoring_function, prompt, is_patient=is_patient)
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give up the calls under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for scorer in self._scorers.values():
            scorer.close()

    async def _score(self, one: RecordedTrajectory, name: str, prompt: str, *, is_patient: bool) -> None:
        parts: dict[str, float] = {}
        outcome = await self._outcome(one, name, prompt, is_patient=is_patient)
        if outcome.fault is None and outcome.value is None:
            return  # the function leaves the reward to the client
        fault = outcome.fault or read_parts(_by_name(outcome.value), parts) or self._on_parts(one, parts)
        if fault is not None:
            self._log(name, fault)
            self._on_fault(one, fault.kind)

    async def _outcome(self, one: RecordedTrajectory, name: str, prompt: str, *, is_patient: bool) -> CallResult:
        if name not in self._functions:  # of a file that another configuration has left
            return CallResult(fault=EnvironmentFault("missing", ""))
        answered = ScoringInput(
            prompt=prompt,
            text=one.trajectory.text,
            finish_reason=one.trajectory.finish_reason,
            metadata=one.reward_request.metadata,
        )
        if name not in self._scorers:
            self._scorers[name] = ScoringWorker(self._functions[name], self._seconds)
        return await self._scorers[name].call(answered, is_patient=is_patient)

    def _log(self, name: str, fault: EnvironmentFault) -> None:
        """The kind of an exception but not its text, which may quote metadata; ever more rarely."""
        what = fault.detail.partition("(")[0] if fault.kind == "raised" else ""
        self._num_faults[name, fault.kind] += 1
        count = self._num_faults[name, fault.kind]
        if count & (count - 1) == 0:
            logger.warning("scoring function %s: %s %s; it has cost %d trajectories", name, fault.kind, what, count)


def _by_name(value: object) -> object:
    return {SCALAR_REWARD: value} if isinstance(value, int | float) else value
