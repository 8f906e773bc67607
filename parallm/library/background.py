"""The coroutines of a model's thread: serve, or serve and train, until the program closes the model. Imports MLX."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf

from parallm.config.compose import Composed
from parallm.config.process_log import logging_to
from parallm.config.run_folder import CONFIG, LOG, RUNS_FOLDER, check_writable, locked_run_folder, remove_unused
from parallm.config.schema import RunConfig, ServeConfig
from parallm.device.blas import BlasReport
from parallm.device.memory import release_memory
from parallm.environment.environment import AnyEnvironment
from parallm.errors import Unavailable
from parallm.library.loop_thread import Main
from parallm.library.session import LocalClient, Session, TrainingResult, TrainingSession, read_result
from parallm.run import serve, train
from parallm.server.operation.http_server import listening, local_only
from parallm.server.settings import AUTO

__all__ = ["release_memory", "serving", "training"]

logger = logging.getLogger(__name__)


def serving(config: ServeConfig, blas: BlasReport) -> Main[Session]:
    """Return the coroutine function that serves a model."""

    async def main(start: Callable[[Session], None], end: asyncio.Event) -> None:
        # a program's model keeps the state of operators only in a folder that it names
        folder = None if config.server.state == AUTO else RUNS_FOLDER / config.name
        own, listener = serve.checked(config), local_only(config.server)
        with logging_to(None, config.log_level, config.log_format, on_terminal=False):
            async with serve.open_serving(own, blas, listener, folder=folder) as serving:
                app = serving.application.app
                session = Session(
                    app=app, client=LocalClient(app), settings=config.server, give=serving.runtime.store.give
                )
                try:
                    start(session)
                    await end.wait()
                finally:
                    await session.close()

    return main


def training(
    composed: Composed[RunConfig], blas: BlasReport, environment: AnyEnvironment | None, *, is_paused: bool
) -> Main[TrainingSession]:
    """Return the coroutine function that trains in the folder of `composed`."""

    async def main(start: Callable[[TrainingSession], None], end: asyncio.Event) -> None:
        config = train.checked(composed.config)
        # environments of Atropos need HTTP from the first step on; other programs call `serve`
        needs_http = config.rollout.source == "atropos"
        own = listening(config.server) if needs_http else nullcontext(local_only(config.server))
        with _run_folder(composed, blas) as folder, own as listener:
            async with train.open_training(config, folder, blas, listener, environment) as run:
                if is_paused:
                    run.control.pause(None)
                loop, app = asyncio.get_running_loop(), run.application.app
                session = TrainingSession(
                    app=app,
                    client=LocalClient(app),
                    settings=config.server,
                    give=run.runtime.store.give,
                    server=run.application.server,
                    folder=folder,
                    stop=lambda: _soon(loop, run.stop),
                    result=Future(),
                )
                start(session)
                await _train(run, session, end)

    return main


async def _train(run: train.TrainingRun, session: TrainingSession, end: asyncio.Event) -> None:
    """Train, and stay until `end`, which stops training too."""

    async def stop_at_end() -> None:
        await end.wait()
        run.stop()

    stopping = asyncio.create_task(stop_at_end())
    try:
        await run.train()
        session.result.set_result(_result(session.folder, run))
        await end.wait()
    except Exception as error:
        if not session.result.done():
            session.result.set_exception(error)
        raise
    finally:
        stopping.cancel()
        await session.close()
        if not session.result.done():
            session.result.set_exception(Unavailable("the run was ended before its training was"))


@contextmanager
def _run_folder(composed: Composed[RunConfig], blas: BlasReport) -> Iterator[Path]:
    """Lock the run folder and begin its log and config.yaml, as the command does; remove it after a failed start."""
    folder, config = composed.folder, composed.config
    check_writable(folder)
    try:
        log = logging_to(folder / LOG, config.log_level, config.log_format, config.log_max_bytes, on_terminal=False)
        with locked_run_folder(folder), log:
            logger.info(blas.message)
            (folder / CONFIG).write_text(OmegaConf.to_yaml(composed.values, resolve=True))
            yield folder
    except BaseException:
        remove_unused(folder)
        raise


def _soon(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the loop has ended, and training with it
        loop.call_soon_threadsafe(function)


def _result(folder: Path, run: train.TrainingRun) -> TrainingResult:
    results = {
        policy.name: read_result(
            policy.spec.folder, version=policy.status.version, was_stopped=policy.trainer.was_stopped
        )
        for policy in run.policies
    }
    first = next(iter(results.values()))
    return first if len(results) == 1 else replace(first, folder=folder, policies=results)
