"""RunConfig -> the session of a run, with the wiring of `parallm.train`. Imports MLX."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from parallm.build import Begun, train
from parallm.composition import Composed
from parallm.config import RunConfig
from parallm.device.blas import BlasReport
from parallm.device.memory import release_memory
from parallm.environment.environment import AnyEnvironment
from parallm.errors import Unavailable
from parallm.given_model import find_given
from parallm.house import Listening, listening
from parallm.library.local import LocalClient
from parallm.library.runtime import Main
from parallm.library.training_result import TrainingResult, read_result
from parallm.library.training_session import TrainingSession
from parallm.policy_runs import PolicyRun, stop_all
from parallm.run_folder import CONFIG, check_writable
from parallm.server.operation.keys import read_keys
from parallm.server.settings import ServerSettings

__all__ = ["release_memory", "training_main"]


def training_main(
    composed: Composed[RunConfig], blas: BlasReport, environment: AnyEnvironment | None, *, is_paused: bool
) -> Main[TrainingSession]:
    """What a runtime runs to train in the folder of `composed`."""

    async def main(start: Callable[[TrainingSession], None], end: asyncio.Event) -> None:
        config = replace(composed.config, model=find_given(composed.config.model))
        program = _Program(folder=composed.folder, server=config.server, start=start, end=end, is_paused=is_paused)
        with run_files(composed.folder, composed.values), _bound(config) as listens:
            try:
                await train(config, composed.folder, blas, listens, program, environment)
            except Exception as error:
                program.fail(error)
                raise
            finally:
                await program.close()

    return main


@contextmanager
def run_files(folder: Path, values: DictConfig) -> Iterator[None]:
    check_writable(folder)
    (folder / CONFIG).write_text(OmegaConf.to_yaml(values, resolve=True))
    yield


@contextmanager
def _bound(config: RunConfig) -> Iterator[Listening | None]:
    """The environments of Atropos ask over HTTP from the first step on; others may call `serve`."""
    if config.rollout.source == "atropos":
        with listening(config.server) as listens:
            yield listens
    else:
        yield Listening(bound=None, keys=read_keys(config.server))


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
        assert run.house.app is not None, "it was built to answer"
        loop = asyncio.get_running_loop()
        self.session = TrainingSession(
            app=run.house.app,
            local=LocalClient(run.house.app),
            settings=self.server,
            give=getattr(run.house, "store", None),
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
