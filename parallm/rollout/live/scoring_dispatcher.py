"""Rewards by the scoring functions that clients have named, computed off the event loop. Used by `LiveSource`."""

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
from parallm.rollout.scoring import SCALAR_REWARD, read_parts

logger = logging.getLogger(__name__)

OnParts = Callable[[RecordedTrajectory, Mapping[str, float]], EnvironmentFault | None]
"""Takes the parts of a reward; returns a fault if they cannot be one."""


class ScoringDispatcher:
    """Calls a trajectory's scoring function once, if it has one, and reports the result. Used on the asyncio thread.

    `on_parts` gets the parts of a reward, `on_fault` a trajectory without one and the kind of fault.
    """

    def __init__(
        self,
        targets: Mapping[str, str],
        seconds: float,
        on_parts: OnParts,
        on_fault: Callable[[RecordedTrajectory, str], None],
    ) -> None:
        """`targets` name functions beside those of ParaLLM's environments, and win over these.

        Raises ConfigError for a function that is not there.
        """
        self._seconds = seconds
        self._configured = load_scoring_functions(targets)
        self._functions: dict[str, ScoringFunction] = {**shipped_scoring_functions(), **self._configured}
        self._workers: dict[str, ScoringWorker] = {}
        self._on_parts = on_parts
        self._on_fault = on_fault
        self._decode: Callable[[Sequence[int]], str] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_faults: Counter[tuple[str, str]] = Counter()  # by function and kind

    def check(self, name: str, metadata: Mapping[str, Any]) -> None:
        """Raise InvalidRequest for a function that is not there, or that could not use the metadata."""
        if name not in self._functions:
            names = ", ".join(sorted(self._functions))
            raise InvalidRequest(f"no scoring_function {name[:50]!r}; there are {names}", "scoring_function")
        function = self._functions[name]
        if isinstance(function, EnvironmentScoring):
            function.check(metadata)

    def connect(self, decode: Callable[[Sequence[int]], str], scores: Mapping[str, EnvironmentScoring]) -> None:
        """Begin to call functions; `decode` makes prompts of tokens.

        `scores` are those of the run's environment. Functions that the configuration names win.
        """
        self._functions |= {**scores, **self._configured}
        self._decode = decode

    def begin(self, record: RecordedTrajectory, *, is_patient: bool = False) -> None:
        """Call the function of a trajectory without a reward, once `connect` was called.

        It is a fault if too many calls wait already, unless `is_patient`.
        """
        name = record.scoring_function
        if name is not None and record.rewarded is None and self._decode is not None:
            prompt = self._decode(record.trajectory.prompt_tokens)
            task = asyncio.create_task(self._score(record, name, prompt, is_patient=is_patient))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel the calls under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self._workers.values():
            worker.close()

    async def _score(self, record: RecordedTrajectory, name: str, prompt: str, *, is_patient: bool) -> None:
        parts: dict[str, float] = {}
        result = await self._call(record, name, prompt, is_patient=is_patient)
        if result.fault is None and result.value is None:
            return  # the function leaves the reward to the client
        fault = result.fault or read_parts(_by_name(result.value), parts) or self._on_parts(record, parts)
        if fault is not None:
            self._log(name, fault)
            self._on_fault(record, fault.kind)

    async def _call(self, record: RecordedTrajectory, name: str, prompt: str, *, is_patient: bool) -> CallResult:
        if name not in self._functions:  # in a file that another configuration has left
            return CallResult(fault=EnvironmentFault("missing", ""))
        scoring_input = ScoringInput(
            prompt=prompt,
            text=record.trajectory.text,
            finish_reason=record.trajectory.finish_reason,
            metadata=record.metadata,
        )
        if name not in self._workers:
            self._workers[name] = ScoringWorker(self._functions[name], self._seconds)
        return await self._workers[name].call(scoring_input, is_patient=is_patient)

    def _log(self, name: str, fault: EnvironmentFault) -> None:
        """Log a fault the 1st, 2nd, 4th, 8th time and so on, without an exception's text, which may quote metadata."""
        exception = fault.detail.partition("(")[0] if fault.kind == "raised" else ""
        self._num_faults[name, fault.kind] += 1
        count = self._num_faults[name, fault.kind]
        if count & (count - 1) == 0:
            logger.warning(
                "scoring function %s: %s %s; it has cost %d trajectories", name, fault.kind, exception, count
            )


def _by_name(value: object) -> object:
    return {SCALAR_REWARD: value} if isinstance(value, int | float) else value
