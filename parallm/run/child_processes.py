"""The processes that belong to runs on Atropos: run-api and environments, from before the first step to the last."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from parallm.config.schema import shipped
from parallm.errors import ConfigError
from parallm.integrations.atropos.api import Sizes, TrajectoryApi
from parallm.integrations.atropos.launcher import LaunchContext, Launcher
from parallm.integrations.atropos.source import AtroposSource
from parallm.model.load import find_folder
from parallm.run.policy_runs import PolicyRun
from parallm.server.operation.http_server import HttpServer


@asynccontextmanager
async def child_processes(runs: Sequence[PolicyRun], server: HttpServer | None) -> AsyncIterator[None]:
    """Start what the runs name, watch it meanwhile, and end it. Raises ConfigError for what cannot be started."""
    async with AsyncExitStack() as stack:
        for run in runs:
            if run.atropos is not None:
                await stack.enter_async_context(_launched(run, run.atropos, server))
        yield


@asynccontextmanager
async def _launched(run: PolicyRun, source: AtroposSource, server: HttpServer | None) -> AsyncIterator[None]:
    settings = run.config.rollout.atropos
    api = TrajectoryApi(settings)
    told = _surroundings(run, server)
    launcher = Launcher(settings.start, told, run.folder.absolute(), api=api, facts=source.facts)
    source.explain = launcher.explain
    watching: asyncio.Task[None] | None = None
    try:
        await launcher.start()
        watching = asyncio.create_task(launcher.run())
        yield
    finally:
        if watching is not None:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
        await launcher.close()
        await api.close()


def _surroundings(run: PolicyRun, server: HttpServer | None) -> LaunchContext:
    rollout = run.config.rollout
    url = "" if server is None else server.url
    if rollout.atropos.start.environments and not url.startswith("http"):
        raise ConfigError(
            "rollout.atropos.start.environments: they ask this process for completions over HTTP; leave server.uds "
            "unset and server.enabled=true"
        )
    return LaunchContext(
        api=rollout.atropos.url.rstrip("/"),
        server=url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:"),
        recipes=str(shipped("recipes")),
        tokenizer=str(find_folder(run.config.model.path)),
        model=run.name,
        sizes=Sizes(
            batch_size=rollout.problems_per_step * rollout.group_size, max_token_len=rollout.atropos.max_token_len
        ),
        group_size=rollout.group_size,
        max_tokens=rollout.max_tokens,
    )
