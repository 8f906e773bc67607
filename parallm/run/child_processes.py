"""The child processes of runs on Atropos, run-api and environments, from before the first step to the last."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from parallm.config.schema import shipped
from parallm.errors import ConfigError
from parallm.integrations.atropos.launcher import LaunchContext, Launcher
from parallm.integrations.atropos.source import AtroposSource
from parallm.integrations.atropos.trainer_client import Sizes, TrajectoryApi
from parallm.model.load import find_folder
from parallm.run.policy_runs import PolicyRun


@asynccontextmanager
async def child_processes(runs: Sequence[PolicyRun], url: str | None) -> AsyncIterator[None]:
    """Start the processes of the runs, supervise them, and end them. `url` is the server's, if there is one.

    Raises ConfigError for a process that cannot be started.
    """
    async with AsyncExitStack() as stack:
        for run in runs:
            if run.atropos is not None:
                await stack.enter_async_context(_launched(run, run.atropos, url or ""))
        yield


@asynccontextmanager
async def _launched(run: PolicyRun, source: AtroposSource, url: str) -> AsyncIterator[None]:
    settings = run.spec.config.rollout.atropos
    api = TrajectoryApi(settings)
    context = _launch_context(run, url)
    launcher = Launcher(settings.start, context, run.spec.folder.absolute(), api=api, facts=source.facts)
    source.explain = launcher.explain
    supervision: asyncio.Task[None] | None = None
    try:
        await launcher.start()
        supervision = asyncio.create_task(launcher.run())
        yield
    finally:
        if supervision is not None:
            supervision.cancel()
            with suppress(asyncio.CancelledError):
                await supervision
        await launcher.close()
        await api.close()


def _launch_context(run: PolicyRun, url: str) -> LaunchContext:
    config, rollout = run.spec.config, run.spec.config.rollout
    if rollout.atropos.start.environments and not url.startswith("http"):
        raise ConfigError(
            "rollout.atropos.start.environments: they ask this process for completions over HTTP; leave server.uds "
            "unset and server.enabled=true"
        )
    return LaunchContext(
        api=rollout.atropos.url.rstrip("/"),
        server=url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:"),
        recipes=str(shipped("recipes")),
        tokenizer=str(find_folder(config.model.path)),
        model=run.name,
        sizes=Sizes(
            batch_size=rollout.problems_per_step * rollout.group_size, max_token_len=rollout.atropos.max_token_len
        ),
        group_size=rollout.group_size,
        max_tokens=rollout.max_tokens,
    )
