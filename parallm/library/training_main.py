"""RunConfig -> the session of a run, with the wiring of `parallm.train`. Imports MLX."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from omegaconf import OmegaConf

from parallm.config.compose import Composed
from parallm.config.process_log import logging_to
from parallm.config.run_folder import CONFIG, LOG, alone_in, check_writable, remove_unused
from parallm.config.schema import RunConfig
from parallm.device.blas import BlasReport
from parallm.device.memory import release_memory
from parallm.environment.environment import AnyEnvironment
from parallm.errors import Unavailable
from parallm.library.local import LocalClient
from parallm.library.loop_thread import Main
from parallm.library.training_result import TrainingResult, read_result
from parallm.library.training_session import TrainingSession
from parallm.run.policy_runs import PolicyRun, stop_all
from parallm.run.train import Begun, checked, train
from parallm.server.operation.http_server import Listener, listening, local_only
from parallm.server.settings import ServerSettings

__all__ = ["release_memory", "training_main"]


logger = logging.getLogger(__name__)


def training_main(
    composed: Composed[RunConfig], blas: BlasReport, environment: AnyEnvironment | None, *, is_paused: bool
) -> Main[TrainingSession]:
    """What a runtime runs to train in the folder of `composed`."""

    async def main(start: Callable[[TrainingSession], None], end: asyncio.Event) -> None:
        config = checked(composed.config)
        program = _Program(folder=composed.folder, server=config.server, start=start, end=end, is_paused=is_paused)
        with _run_folder(composed, blas) as folder, _bound(config) as listens:
            try:
                await train(config, folder, blas, listens, program, environment)
            except Exception as error:
                program.fail(error)
                raise
            finally:
                await program.close()

    return main


@contextmanager
def _run_folder(composed: Composed[RunConfig], blas: BlasReport) -> Iterator[Path]:
    """The folder as the command has it: ours alone, with a log and the configuration; gone after a start that fails."""
    folder, config = composed.folder, composed.config
    check_writable(folder)
    try:
        with alone_in(folder), logging_to(folder / LOG, config.log_level, config.log_format, on_terminal=False):
            logger.info(blas.message)
            (folder / CONFIG).write_text(OmegaConf.to_yaml(composed.values, resolve=True))
            yield folder
    except BaseException:
        remove_unused(folder)
        raise


@contextmanager
def _bound(config: RunConfig) -> Iterator[Listener | None]:
    """The environments of Atropos ask over HTTP from the first step on; others may call `serve`."""
    if config.rollout.source == "atropos":
        with listening(config.server) as listens:
            yield listens
    else:
        yield local_only(config.server)


@dataclass(slots=True, kw_only=True)
class _Program:
    """The caller of a run that a Python program has started."""

    folder: Path
    server: ServerSettings
    start: Callable[[TrainingSession], None]
    end: asyncio.Event
    is_paused: bool
    session: TrainingSession | None = None
    stopping: asyncio.Task[None] | None = None

    def begun(self, run: Begun) -> None:
        if self.is_paused:
            run.control.pause(None)
        assert run.runtime.app is not None, "it was built to answer"
        loop = asyncio.get_running_loop()
        self.session = TrainingSession(
            app=run.runtime.app,
            local=LocalClient(run.runtime.app),
            settings=self.server,
            give=run.runtime.store.give,
            server=run.server,
            folder=self.folder,
            stop=lambda: _soon(loop, partial(stop_all, run.runs)),
            result=Future(),
        )
        self.stopping = asyncio.create_task(self._stop_at_end(run))
        self.start(self.session)

    async def ended(self, run: Begun) -> None:
        assert self.session is not None, "it has begun"
        self.session.result.set_result(_result(self.folder, run.runs))
        await self.end.wait()
        await self.session.close()

    def fail(self, error: Exception) -> None:
        if self.session is not None and not self.session.result.done():
            self.session.result.set_exception(error)

    async def close(self) -> None:
        if self.stopping is not None:
            self.stopping.cancel()
        if self.session is not None:
            await self.session.close()
            self.fail(Unavailable("the run was ended before its training was"))

    async def _stop_at_end(self, run: Begun) -> None:
        await self.end.wait()
        stop_all(run.runs)


def _soon(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the loop has ended, and training with it
        loop.call_soon_threadsafe(function)


def _result(folder: Path, runs: Sequence[PolicyRun]) -> TrainingResult:
    results = {
        run.name: read_result(run.folder, version=run.status.version, was_stopped=run.was_stopped) for run in runs
    }
    first = next(iter(results.values()))
    return first if len(runs) == 1 else replace(first, folder=folder, policies=results)
