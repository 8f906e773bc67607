"""A run on Atropos: its child processes, run-api and environments, from before the first step to the last."""

import asyncio
from contextlib import AsyncExitStack, suppress
from functools import partial

from parallm.config.schema import shipped
from parallm.errors import ConfigError
from parallm.integrations.atropos.intake import Rescorer
from parallm.integrations.atropos.launcher import LaunchContext, Launcher
from parallm.integrations.atropos.scored_group import Limits
from parallm.integrations.atropos.trainer_client import TrajectoryApi
from parallm.model.adapters.names import of_alias
from parallm.model.load import find_folder
from parallm.run.policy_runs import PolicyRun
from parallm.run.runtime import Runtime
from parallm.types import LATEST


async def start_atropos(run: PolicyRun, runtime: Runtime, url: str | None, processes: AsyncExitStack) -> None:
    """Start and supervise the processes of a run on Atropos until `processes` is closed, and ask run-api for batches.

    `url` is the server's, if there is one. Does nothing for other runs. Raises ConfigError for a process that cannot be
    started.
    """
    if run.atropos is None:
        return
    settings = run.spec.config.rollout.atropos
    context = _launch_context(run, url or "")
    api = TrajectoryApi(settings)
    processes.push_async_callback(api.close)
    launcher = Launcher(context, run.spec.folder.absolute(), api=api, facts=run.atropos.facts)
    processes.push_async_callback(launcher.close)
    run.atropos.explain = launcher.explain
    await launcher.start()
    processes.push_async_callback(_cancelled, asyncio.create_task(launcher.run()))
    run.atropos.connect(
        Limits(max_tokens=settings.max_token_len, num_token_ids=runtime.model.vocabulary_size),
        Rescorer(runtime.engine.generate_all, of_alias(LATEST, run.name)),
        partial(runtime.model.tokenizer.decode, special=True),
        run.version,
    )


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def _launch_context(run: PolicyRun, url: str) -> LaunchContext:
    config, rollout = run.spec.config, run.spec.config.rollout
    if rollout.atropos.start.environments and not url.startswith("http"):
        raise ConfigError(
            "rollout.atropos.start.environments: they ask this process for completions over HTTP; leave server.uds "
            "unset and server.enabled=true"
        )
    return LaunchContext(
        rollout=rollout,
        server=url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:"),
        recipes=str(shipped("recipes")),
        tokenizer=str(find_folder(config.model.path)),
        model=run.name,
    )
