"""The wiring of `parallm.train`: training data, runtime, trainers, child processes and server of a run.

`run_training` is for a terminal; `parallm.library` opens a `TrainingRun` itself. A run's parts are made in the order of
`open_training` and closed in the reverse order.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from parallm.config.run_folder import link_latest
from parallm.config.schema import RunConfig, policy_configs, shipped
from parallm.device.blas import BlasReport
from parallm.distributed.parts import Single, parts_for
from parallm.distributed.team import Team
from parallm.environment.environment import AnyEnvironment, connect
from parallm.errors import CheckpointError, ConfigError
from parallm.integrations.atropos.intake import Rescorer
from parallm.integrations.atropos.launcher import LaunchContext, Launcher
from parallm.integrations.atropos.scored_group import Limits
from parallm.integrations.atropos.trainer_client import TrajectoryApi
from parallm.interrupts import stop_on_signals, until_signal
from parallm.metrics.display import Display
from parallm.metrics.eta import Schedule
from parallm.metrics.formatting import short_path
from parallm.metrics.live_display import make_display
from parallm.metrics.summary import RunSummary, flat_reward_advice
from parallm.model.adapters.names import of_alias
from parallm.model.load import find_folder
from parallm.rollout.judge import Judge
from parallm.run.build_trainer import build_policy_run, rescue_adapter, write_final_adapter
from parallm.run.models import check_registry, open_pool
from parallm.run.operator_state import check_given
from parallm.run.policy_runs import (
    PolicyRun,
    TrainingControl,
    begin_watching,
    combined_status,
    happenings_of,
    how_to_resume,
    make_policy_specs,
    note_act,
    raise_failures,
    train_all,
    watched,
)
from parallm.run.runtime import (
    Application,
    Runtime,
    RuntimeSettings,
    header_of,
    open_application,
    open_runtime,
    resolve_model,
)
from parallm.run.training_data import read_training_data
from parallm.run.workers import copy_operators_state, own_config, shown_url
from parallm.server.dashboard.routes_page import page_url
from parallm.server.operation.http_server import Listener, listening
from parallm.server.operation.notify import ServiceManager
from parallm.types import LATEST, POLICY


def run_training(config: RunConfig, folder: Path, blas: BlasReport, team: Team | None = None) -> int:
    """Train, and answer HTTP meanwhile. Returns the exit code; raises ParallmError.

    `team`: the workers of the run, if there are several.
    """
    own = config
    if team is not None:
        own = own_config(config, team.identity.rank)
        copy_operators_state(config.server, team.run_folder, folder, team.identity.rank)
    asyncio.run(_train(own, folder, blas, parts_for(config.distributed, team)))
    return 0


def checked(config: RunConfig) -> RunConfig:
    """Return `config` with the folder of its adapter. Raises ParallmError early for what would fail after loading."""
    check_registry(config)
    check_given(config.server.adapters, dict.fromkeys(policy_configs(config), "trained by this run"))
    return replace(config, model=resolve_model(config.model))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """A run that answers requests and is ready to train."""

    runtime: Runtime
    policies: tuple[PolicyRun, ...]
    control: TrainingControl
    display: Display
    processes: AsyncExitStack
    """Child processes, which end with training."""
    device_name: str
    """The BLAS, for the title of figures; empty for the reference BLAS."""
    application: Application
    writes: bool
    """Whether this process writes the run's adapter."""

    @property
    def was_stopped(self) -> bool:
        return any(policy.trainer.was_stopped for policy in self.policies)

    @property
    def serves_on(self) -> bool:
        """Whether a client has stopped training, and no signal the process."""
        stopped = [policy.trainer.pacing for policy in self.policies if policy.trainer.was_stopped]
        return bool(stopped) and all(pacing.serves_on for pacing in stopped)

    def describe(self) -> str:
        """Return what the run does, for a service manager."""
        status = combined_status({policy.name: policy.status for policy in self.policies})
        return f"{status.state}, training step {status.step} of {status.total_steps}"

    async def train(self) -> None:
        """Train all policies to their ends and write their adapters. Raises ParallmError."""
        try:
            failures = await train_all(self.policies)
        finally:
            for policy in self.policies:
                if policy.source is not None:
                    policy.source.end()
            specs = [policy.spec for policy in self.policies]
            summaries = [
                spec.recorder.finish(spec.figures, title=spec.title, device=self.device_name) for spec in specs
            ]
            await self.processes.aclose()
        for policy, summary in zip(self.policies, summaries, strict=True) if self.writes else ():
            await self._finish(policy, summary, failures.get(policy.name))
        raise_failures(failures, is_alone=len(self.policies) == 1)

    def stop(self) -> None:
        """Let every trainer finish its step, save and end."""
        for policy in self.policies:
            policy.trainer.stop()

    def drain_and_stop(self) -> None:
        """Let the trainers finish their steps; new requests are refused from now on."""
        self.stop()
        if self.application.server is not None:
            self.application.server.drain()

    async def _finish(self, policy: PolicyRun, summary: RunSummary, failure: BaseException | None) -> None:
        if failure is None:
            await write_final_adapter(policy, self.runtime)
            if (text := flat_reward_advice(summary.steps)) is not None:
                policy.spec.display.message(text)
            policy.spec.display.finish(summary.rows())
        elif isinstance(failure, CheckpointError):
            await rescue_adapter(policy, self.runtime)


@asynccontextmanager
async def open_training(
    config: RunConfig,
    folder: Path,
    blas: BlasReport,
    listener: Listener,
    environment: AnyEnvironment | None = None,
    parts: Single | None = None,
) -> AsyncIterator[TrainingRun]:
    """Open a run with a configuration that is `checked`. `environment` replaces the one that it names.

    `parts`: those of one of several workers; None: those of a process that trains alone. Raises ParallmError.
    """
    parts = parts or parts_for(config.distributed, None)
    configs = policy_configs(config)
    data = {name: read_training_data(policy, environment) for name, policy in configs.items()}
    schedules = {
        name: Schedule(
            total_steps=policy.trainer.steps,
            evaluate_every=policy.trainer.evaluate_every if data[name].has_held_out else None,
            waits_for_others=policy.rollout.source != "environment",
        )
        for name, policy in configs.items()
    }
    is_auto_lines = config.policies and config.metrics.display == "auto"  # a live table shows one policy
    display = make_display("lines" if is_auto_lines else config.metrics.display, sys.stdout, is_logged=True)
    async with AsyncExitStack() as stack:
        stack.callback(display.close)
        unwatched = make_policy_specs(config, folder, display, schedules, parts.recorder)
        specs, watching = watched(unwatched, schedules, folder)
        runtime = await stack.enter_async_context(open_runtime(_settings(config, folder), blas, display.message))
        header = header_of(config.name, config.model, blas, shown_url(listener.urls))
        schedule = None if config.policies else schedules[POLICY]
        page = page_url(config.server, listener.url)
        policies_shown = tuple(config.policies)
        display.start(replace(header, page=page, folder=short_path(folder), policies=policies_shown, schedule=schedule))
        judge = Judge(runtime.engine.generate, runtime.model.tokenizer)  # one for all: it numbers its requests
        policies: tuple[PolicyRun, ...] = ()
        for spec in specs:
            connect(data[spec.name].environment, judge)
            policy_runtime = runtime.for_policy(spec.name)
            policies += (await build_policy_run(spec, policy_runtime, data[spec.name], stack, parts),)
        happenings = happenings_of(policies, writes=parts.is_leader)
        await begin_watching(watching, policies, happenings)
        processes = await stack.enter_async_context(AsyncExitStack())
        for policy in policies:
            await _start_atropos(policy, runtime, listener.url, processes)
        versions = {policy.name: policy.resumed_version for policy in policies}
        for text in await runtime.restore(config.server.adapters, versions):
            display.message(text)
        if parts.is_leader:
            link_latest(folder)
        for policy in policies:
            policy.spec.recorder.start()
        control = TrainingControl(policies)
        user = f"run {config.name}, which trains on it"
        pool = await stack.enter_async_context(open_pool(config.registry, runtime, listener.keys, user))
        application = await stack.enter_async_context(
            open_application(
                runtime,
                listener,
                lambda: combined_status({policy.name: policy.status for policy in policies}),
                training=control,
                watching=watching,
                on_act=partial(note_act, happenings),
                trajectories={policy.name: policy.live for policy in policies if policy.live},
                sample_stores={
                    policy.name: policy.atropos.sample_store.record for policy in policies if policy.atropos
                },
                reward_models={policy.name: model for policy in policies if (model := policy.reward_model) is not None},
                pool=pool,
            )
        )
        yield TrainingRun(
            runtime=runtime,
            policies=policies,
            control=control,
            display=display,
            processes=processes,
            device_name="" if blas.name == "reference" else blas.name,
            application=application,
            writes=parts.is_leader,
        )


async def _train(config: RunConfig, folder: Path, blas: BlasReport, parts: Single) -> None:
    config = checked(config)
    manager = ServiceManager()
    with listening(config.server) as listener:
        async with AsyncExitStack() as stack:
            async with manager.starting(f"loading {config.model.path}"):
                run = await stack.enter_async_context(open_training(config, folder, blas, listener, parts=parts))
            await stack.enter_async_context(manager.running(run.runtime.engine.ping, run.describe))

            def stop() -> None:
                manager.stopping()
                run.drain_and_stop()

            stop_on_signals(stop, "finishing this step, then saving and leaving")
            await run.train()
            await parts.leave()
            if run.was_stopped:
                run.display.message(how_to_resume(config, folder, run.policies))
            is_to_serve = run.serves_on or (config.trainer.keep_serving and not run.was_stopped)
            if is_to_serve and (server := run.application.server) is not None:
                sys.stdout.write(f"training has ended; {shown_url(server.url)} answers until Ctrl-C\n")
                await until_signal()


def _settings(config: RunConfig, folder: Path) -> RuntimeSettings:
    configs = policy_configs(config)
    return RuntimeSettings(
        model=config.model,
        engine=config.engine,
        device=config.device,
        server=config.server,
        log_max_bytes=config.log_max_bytes,
        tasks=config.tasks,
        policies=tuple(configs),
        is_training=True,
        needs_text=any(policy.learner.trains == "policy" for policy in configs.values()),
        can_start_from_reward_model=all(policy.learner.trains != "policy" for policy in configs.values()),
        seed=config.seed,
        learner=config.learner,
        folder=folder,
        keeps_state=config.checkpoint.resume == "auto",
    )


async def _start_atropos(run: PolicyRun, runtime: Runtime, url: str | None, processes: AsyncExitStack) -> None:
    """Start and supervise the processes of a run on Atropos until `processes` is closed, and ask run-api for batches.

    `url` is the server's, if there is one. Does nothing for other runs. Raises ConfigError for a process that cannot be
    started.
    """
    if run.atropos is None:
        return
    config, settings, url = run.spec.config, run.spec.config.rollout.atropos, url or ""
    if settings.start.environments and not url.startswith("http"):
        raise ConfigError(
            "rollout.atropos.start.environments: they ask this process for completions over HTTP; set server.port "
            "and server.enabled=true"
        )
    context = LaunchContext(
        rollout=config.rollout,
        server=url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:"),
        recipes=str(shipped("recipes")),
        tokenizer=str(find_folder(config.model.path)),
        model=run.name,
    )
    api = TrajectoryApi(settings)
    processes.push_async_callback(api.close)
    launcher = Launcher(context, run.spec.folder.absolute(), api=api, facts=run.atropos.facts)
    processes.push_async_callback(launcher.close)
    run.atropos.explain = launcher.explain
    await launcher.start()
    processes.push_async_callback(_cancel, asyncio.create_task(launcher.run()))
    run.atropos.connect(
        Limits(max_tokens=settings.max_token_len, num_token_ids=runtime.model.vocabulary_size),
        Rescorer(runtime.engine.generate_all, of_alias(LATEST, run.name)),
        partial(runtime.model.tokenizer.decode, special=True),
        run.version,
    )


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
