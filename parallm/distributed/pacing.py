"""Agreement of all workers at step borders: their versions are equal, and what one is asked for all of them do.

No worker decides by its own clock or flag: a stop, a pause or a save that one is asked for is a command, all
commands are gathered before a step, and all workers carry out all of them.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from parallm.distributed.exchange import Gathering
from parallm.distributed.wire import pack, unpack
from parallm.errors import CheckpointError, EnvironmentFailed, Unavailable, WorkersDiffer
from parallm.metrics.log_capture import PROGRESS
from parallm.reports import EvaluationReport
from parallm.trainer.pacing import POLL_SECONDS, Evaluate, Pacing, Save, settle

Result = TypeVar("Result")

logger = logging.getLogger(PROGRESS)  # in the log, and not on the screen


class SharedPacing(Pacing):
    """`Pacing` whose commands hold for all workers, from the next border of steps on."""

    def __init__(
        self,
        save: Save,
        evaluate: Evaluate,
        *,
        exchange: Gathering,
        version: Callable[[], tuple[int, str]],
        on_difference: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`version`: number and digest of the learner's newest version. `on_difference` gets how versions differ."""
        super().__init__(save, evaluate)
        self._on_difference = on_difference
        self._exchange = exchange
        self._newest = version
        self._commands: list[str] = []
        self._asked_steps: list[asyncio.Future[None]] = []
        self._asked_saves: list[asyncio.Future[Path]] = []
        self._asked_evaluations: list[asyncio.Future[EvaluationReport]] = []
        self._numbers = itertools.count()
        self._logged: int | None = None  # version whose digest is in the log
        self._longest_pause = POLL_SECONDS

    @property
    def is_paused(self) -> bool:
        return self._allowed is not None or "pause" in self._commands

    def stop(self) -> None:
        self._ask("stop")

    def finish(self) -> None:
        self._check()
        self._ask("finish")

    def pause(self) -> None:
        self._check()
        self._ask("pause")

    def resume(self) -> None:
        self._check()
        self._ask("resume")

    async def step(self) -> None:
        self._check()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked_steps.append(future)
        self._ask("step")
        await future

    async def checkpoint(self) -> Path:
        self._check()
        future: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
        self._asked_saves.append(future)
        self._ask("save")
        return await future

    async def evaluate(self) -> EvaluationReport:
        self._check()
        future: asyncio.Future[EvaluationReport] = asyncio.get_running_loop().create_future()
        self._asked_evaluations.append(future)
        self._ask("evaluate")
        return await future

    async def between_steps(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Run `work` at rank 0, which alone writes checkpoints. Raises Unavailable elsewhere."""
        if self._exchange.rank != 0:
            raise Unavailable("this worker writes no checkpoints; ask that of rank 0")
        return await super().between_steps(work)

    async def after_last_step(self) -> None:
        await self._agree()

    def end(self) -> None:
        super().end()
        asked: list[asyncio.Future[Any]] = [*self._asked_steps, *self._asked_saves, *self._asked_evaluations]
        for future in asked:
            if not future.done():
                future.set_exception(Unavailable("training has ended; the versions that it made are served on"))

    async def _run_requests(self) -> None:
        await self._agree()
        await super()._run_requests()

    async def _agree(self) -> None:
        """Compare versions and carry out the commands of all workers. Raises WorkersDiffer, ExchangeFailed."""
        commands, self._commands = self._commands, []
        asked, self._asked_steps = self._asked_steps, []
        version, digest = self._newest()
        states = await self._gather("states", {"version": version, "digest": digest, "commands": commands})
        self._compare([(state["version"], state["digest"]) for state in states])
        if version != self._logged:
            self._logged = version
            logger.info("all workers hold version %d, digest %s", version, digest)
        given = [command for state in states for command in state["commands"]]
        if "stop" in given:
            super().stop()
        elif "finish" in given:
            super().finish()
        for command in given:
            if command == "pause":
                super().pause()
            elif command == "resume":
                super().resume()
            elif command == "step" and self._allowed is not None:
                self._allowed += 1
        number = self._num_begun + self._allowed if self._allowed else self._num_finished + 1
        self._steps += [(number, future) for future in asked]
        if "evaluate" in given:
            await self._evaluate_for_all()
        if "save" in given:
            await self._save_for_all()

    async def _evaluate_for_all(self) -> None:
        """Evaluate, each worker its share, and hand the report, or the error, to all who asked this one."""
        asked = tuple(self._asked_evaluations)
        report: EvaluationReport | None = None
        error: Exception | None = None
        try:
            report = await self._evaluate()
        except (EnvironmentFailed, Unavailable) as failure:
            error = failure
        for future in asked:
            self._asked_evaluations.remove(future)
            settle(future, report, error)

    async def _save_for_all(self) -> None:
        """Save at rank 0 and hand its folder, or its error, to all who asked."""
        asked, self._asked_saves = self._asked_saves, []
        outcome = {"folder": "", "error": ""}
        try:
            outcome["folder"] = str(await self._save())
        except (CheckpointError, Unavailable) as error:
            outcome["error"] = str(error)
        outcome = (await self._gather("saves", outcome))[0]
        for future in asked:
            if future.done():
                continue
            if outcome["error"]:
                future.set_exception(CheckpointError(outcome["error"]))
            else:
                future.set_result(Path(outcome["folder"]))

    async def _gather(self, what: str, value: dict[str, Any]) -> list[dict[str, Any]]:
        label = f"{what} at border {next(self._numbers)}"
        parts = await asyncio.wrap_future(self._exchange.gather(label, pack(value)))
        return [unpack(part)[0] for part in parts]

    def _compare(self, versions: list[tuple[int, str]]) -> None:
        if len(set(versions)) == 1:
            return
        listed = ", ".join(f"rank {rank}: {number} {digest[:12]}" for rank, (number, digest) in enumerate(versions))
        reason = f"the workers' versions differ ({listed}); nothing of the last step is saved"
        self._on_difference(reason)
        self._exchange.fail(reason)
        raise WorkersDiffer(reason)

    def _ask(self, command: str) -> None:
        self._commands.append(command)
        self.wake()
