"""Builds the trainer of one policy: wires its parts, then restores its newest checkpoint.

`run/train.py` calls it for each policy as soon as the model is loaded.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

from parallm.checkpoint.state import RunFacts, TrainingState
from parallm.config.run_folder import TRAJECTORIES
from parallm.config.run_kinds import CHOICES, kind_of, recorded_keys, writes_text
from parallm.config.schema import RunConfig
from parallm.distributed.parts import Single
from parallm.errors import CheckpointError, ConfigError
from parallm.integrations.atropos.source import AtroposSource
from parallm.integrations.atropos.trainer_client import Registration
from parallm.learner.datasets import Dataset
from parallm.learner.learner import Learner
from parallm.learner.loss.objective import resolve_objective
from parallm.metrics.json_lines import read_rows
from parallm.metrics.token_texts import TokenTexts
from parallm.model.adapters.adapter import Adapter
from parallm.rollout.evaluation import Evaluator
from parallm.rollout.live.scoring_functions import environment_scoring_functions
from parallm.rollout.live.source import LiveSource
from parallm.rollout.problems import ProblemStream, Stream, make_stream
from parallm.rollout.reward_model import RewardModel
from parallm.rollout.scoring import MAX_REWARD
from parallm.run.policy_runs import PolicyRun, PolicySpec
from parallm.run.runtime import Runtime, on_device
from parallm.run.training_data import TrainingData
from parallm.trainer.context import TrainerContext
from parallm.trainer.encoder_training import encoder_context
from parallm.trainer.evaluations import final_adapter
from parallm.trainer.evaluators import evaluation_samples
from parallm.trainer.given_update import GivenUpdates
from parallm.trainer.live_trainer import ClientTrainer, LiveTrainer
from parallm.trainer.loop import Loop
from parallm.trainer.reward_training import open_reward_model, reward_model_context
from parallm.trainer.rollout_record import RolloutRecord
from parallm.trainer.saving import fingerprint_of, restore, write_adapter
from parallm.trainer.supervised_trainer import SupervisedTrainer, add_held_out_loss, tokenize
from parallm.trainer.trainer import Trainer
from parallm.types import TrajectoryGroup

SAMPLING = ("rollouts", "live", "atropos")
"""Kinds of runs whose steps have completions."""

logger = logging.getLogger(__name__)


async def build_policy_run(
    spec: PolicySpec, runtime: Runtime, data: TrainingData, sources: AsyncExitStack, parts: Single
) -> PolicyRun:
    """Build a trainer that continues after its newest checkpoint. `sources` closes where its trajectories come from.

    `parts` makes what differs with several workers. Raises ConfigError, CheckpointError.
    """
    config, rollout, settings = spec.config, spec.config.rollout, spec.config.trainer
    reward_model = await open_reward_model(
        rollout.reward_model, config.learner, runtime.device, runtime.model, runtime.streams
    )
    context = await _trainer_context(spec, runtime, data, reward_model, parts, sources)
    live: LiveSource | None = None
    atropos: AtroposSource | None = None
    trainer: Loop
    if data.given is not None:
        context, trainer = await _supervised(context, config, runtime, data.given)
    elif rollout.source == "live":
        min_reward = 0.0 if resolve_objective(config.learner).advantage == "max_rl" else -MAX_REWARD
        live = LiveSource(rollout, spec.folder / TRAJECTORIES, min_reward=min_reward)
        sources.push_async_callback(live.close)
        trainer = ClientTrainer(context, live, settings, rollout)
    elif rollout.source == "atropos":
        _check_atropos_context(config, runtime)
        atropos = AtroposSource(rollout, spec.folder, lambda: _registration(spec, trainer))
        sources.push_async_callback(atropos.close)
        trainer = LiveTrainer(context, atropos, settings, rollout)
    else:
        context = _drawing_from(context, context.collector.stream)
        trainer = Trainer(context, settings, rollout)
    base = {"the base": context.fingerprint.model_sha256, "problems": context.facts.problems}
    await parts.check_same({**base, "the adapter": context.learner.adapter.digest}, context.learner)
    state, resumed_version = await _restore(spec, runtime, context, trainer, parts)
    newest = {"the step": trainer.status.step, "the version": context.learner.adapter.version}
    await parts.check_same(newest, context.learner)
    _report_resumption(context, state, live, resumed_version)
    if live is not None:
        scores = environment_scoring_functions(config.environment.name, data.environment)
        live.connect(partial(runtime.model.tokenizer.decode, special=True), scores)
    given_updates = None
    if data.given is None and parts.takes_updates:
        given_updates = GivenUpdates(
            trainer,
            context,
            advantage=resolve_objective(config.learner).advantage,
            max_off_policy_steps=settings.max_off_policy_steps,
            max_tokens=rollout.max_tokens,
            num_token_ids=runtime.model.vocabulary_size,
        )
    return PolicyRun(
        spec=spec,
        trainer=trainer,
        adapters=context.adapters,
        resumed_version=resumed_version,
        version=context.learner.adapter.version,
        reward_model=reward_model,
        live=live,
        atropos=atropos,
        given_updates=given_updates,
        rollouts=None if context.rollouts is None else context.rollouts.reading,
    )


async def write_final_adapter(run: PolicyRun, runtime: Runtime) -> None:
    """Write the adapter that the run leaves into its folder, or say that there is none. Raises CheckpointError."""
    try:
        adapter = await _write_adapter(run, runtime)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; the same adapter is in the last checkpoint") from error
    if adapter is None:
        run.spec.display.message("no update has moved the adapter, so the run leaves none")


async def rescue_adapter(run: PolicyRun, runtime: Runtime) -> None:
    """Try to write the adapter alone, after the last checkpoint did not fit on the disk."""
    try:
        adapter = await _write_adapter(run, runtime)
    except CheckpointError as error:
        logger.warning("%s", error)
        return
    if adapter is not None:
        path = run.spec.folder / "adapter"
        logger.warning("version %d is in %s; the state of its training is lost", adapter.version, path)


async def _write_adapter(run: PolicyRun, runtime: Runtime) -> Adapter | None:
    adapter = final_adapter(run.adapters, run.name, run.spec.config.trainer.keep_best)
    if adapter is not None:
        await on_device(runtime.device, partial(write_adapter, adapter, run.spec.folder, runtime.model))
    return adapter


async def _trainer_context(
    spec: PolicySpec,
    runtime: Runtime,
    data: TrainingData,
    reward_model: RewardModel | None,
    parts: Single,
    sources: AsyncExitStack,
) -> TrainerContext:
    config, kind = spec.config, kind_of(spec.config)
    if kind == "rollouts" or (writes_text(kind) and data.splits.test):
        _check_context(config, runtime)
    steps, rollout, seed = config.trainer.steps, config.rollout, config.seed
    make_learner = partial(
        parts.learner,
        runtime.model,
        runtime.streams,
        config.learner,
        start=runtime.start,
        is_waited_for=lambda: runtime.device.is_serving,
    )
    learner = await on_device(runtime.device, partial(make_learner, total_steps=steps, seed=seed))
    fingerprint = await on_device(runtime.device, partial(fingerprint_of, runtime.model, runtime.start))
    facts = RunFacts(
        kind=CHOICES[kind],
        seed=seed,
        start=runtime.start.digest if config.model.adapter is not None else "",
        keys=recorded_keys(config, runtime.start.dropout),
    )
    tokenizer = runtime.model.tokenizer
    generate = await parts.generate(
        runtime.engine,
        rollout.engines if kind == "rollouts" else (),
        runtime.model,
        runtime.adapters,
        runtime.device,
        policy=spec.name,
        folder=spec.folder,
        defer=sources.push_async_callback,
    )
    stream = make_stream(data.environment, data.splits.train, seed)
    collector = parts.collector(
        *(generate, tokenizer, data.environment, stream, rollout, seed, reward_model),
        ahead=config.trainer.max_off_policy_steps,
    )
    evaluator = Evaluator(
        generate=generate,
        tokenizer=tokenizer,
        environment=data.environment,
        problems=data.splits.test,
        samples=evaluation_samples(config.trainer, seed),
        rollout=rollout,
        reward_model=reward_model,
    )
    return TrainerContext(
        device=runtime.device,
        engine=runtime.engine,
        learner=learner,
        adapters=runtime.adapters,
        collector=collector,
        evaluator=parts.evaluator(evaluator) if data.splits.test else None,
        checkpoints=parts.checkpoints(spec.folder, config.checkpoint),
        fingerprint=fingerprint,
        facts=facts,
        recorder=spec.recorder,
        display=spec.display,
        rollouts=_rollouts(spec, runtime, sources, parts) if kind in SAMPLING else None,
        make_pacing=parts.make_pacing(learner),
    )


def _rollouts(spec: PolicySpec, runtime: Runtime, sources: AsyncExitStack, parts: Single) -> RolloutRecord | None:
    """Return what keeps the completions of each step; it is written to the end before `sources` are closed."""
    amount, evaluations = spec.config.metrics.rollouts, read_rows(spec.folder / "evaluations.jsonl")
    if amount == "off":
        return None
    writer = parts.rollout_writer(
        spec.folder,
        TokenTexts(runtime.model.tokenizer.decode_rows).cut,
        max_bytes=spec.config.metrics.rollout_bytes,
        is_decoding=lambda: runtime.device.is_decoding,
        evaluated=[row["step"] for row in evaluations],
    )
    sources.push_async_callback(asyncio.to_thread, writer.close)
    return RolloutRecord(writer, amount)


async def _supervised(
    context: TrainerContext, config: RunConfig, runtime: Runtime, given: Dataset
) -> tuple[TrainerContext, Loop]:
    """Return the trainer of given examples, and the context that it uses."""
    if config.learner.trains in ("embedding", "classifier"):
        begin = partial(encoder_context, context, given, config, encoder=runtime.encoder, start=runtime.start)
        begin = partial(begin, model=runtime.model, streams=runtime.streams)
        return _trained_on(*await on_device(runtime.device, begin), config)
    held_out = tokenize(given.held_out[: config.trainer.evaluate_problems], runtime.model)
    if kind_of(config) == "reward_model":
        make = partial(reward_model_context, context, held_out, config.learner, start=runtime.start)
        make = partial(make, model=runtime.model, streams=runtime.streams)
        context = await on_device(runtime.device, partial(make, total_steps=config.trainer.steps, seed=config.seed))
    else:
        context = add_held_out_loss(context, held_out)
    return _trained_on(context, tokenize(given.train, runtime.model), config)


def _trained_on(
    context: TrainerContext, groups: Sequence[TrajectoryGroup], config: RunConfig
) -> tuple[TrainerContext, Loop]:
    """Return the trainer of these groups in shuffled epochs, and the context that it uses."""
    stream = ProblemStream([group.problem for group in groups], config.seed)
    context, per_step = _drawing_from(context, stream), config.rollout.problems_per_step
    return context, SupervisedTrainer(context, groups, stream, config.trainer, per_step=per_step)


def _drawing_from(context: TrainerContext, stream: Stream) -> TrainerContext:
    return dataclasses.replace(context, facts=dataclasses.replace(context.facts, problems=stream.digest))


async def _restore(
    spec: PolicySpec, runtime: Runtime, context: TrainerContext, trainer: Loop, parts: Single
) -> tuple[TrainingState | None, int]:
    """Restore the newest checkpoint, if there is one. Return it, and the version that the trainer continues from."""
    config = spec.config
    load = partial(context.checkpoints.load, config.checkpoint.resume, context.fingerprint, context.facts)
    state = await on_device(runtime.device, load)
    if config.checkpoint.resume == "auto":
        step = 0 if state is None else state.step
        spec.recorder.go_on_after(step)
        if context.rollouts is not None:
            context.rollouts.go_on_after(step)
    if state is not None:
        await on_device(runtime.device, partial(restore, context, state, serve=config.trainer.publish_if == "always"))
        trainer.resume(state)
    resumed_version = context.learner.adapter.version
    # operators may have named versions that no checkpoint holds: their numbers must not be given again
    pinned, learner = await parts.largest(runtime.kept.state.pinned(spec.name)), context.learner
    if isinstance(learner, Learner) and pinned > resumed_version:
        trainer.renumbered(await on_device(runtime.device, partial(learner.renumber, pinned + 1)))
    return state, resumed_version


def _report_resumption(
    context: TrainerContext, state: TrainingState | None, live: LiveSource | None, resumed_version: int
) -> None:
    """Resume the trajectories of clients, and show what the run continues from."""
    texts = [] if state is None else [f"resumed after step {state.step}, version {state.version}"]
    if live is not None:
        step, now = 0 if state is None else state.step, context.learner.adapter.version
        texts.append(live.resume(step, version=resumed_version, now=now))
    if text := "; ".join(filter(None, texts)):
        context.display.message(text)
    if state is not None and state.facts is not None and (changes := context.facts.changes(state.facts)):
        context.display.message(f"other values than in the run that is gone on with: {', '.join(changes)}")


def _check_context(config: RunConfig, runtime: Runtime) -> None:
    """Raise ConfigError for completions that leave no room for a prompt."""
    max_tokens = config.rollout.max_tokens
    if max_tokens >= runtime.engine.max_context:
        raise ConfigError(
            f"rollout.max_tokens={max_tokens}: prompt and completion together have {runtime.engine.max_context} tokens "
            f"(engine.max_context), and the model knows {runtime.model.max_context} positions; lower it"
        )


def _check_atropos_context(config: RunConfig, runtime: Runtime) -> None:
    """Raise ConfigError for sequences that are longer than the context."""
    max_tokens = config.rollout.atropos.max_token_len
    if max_tokens > runtime.engine.max_context:
        raise ConfigError(
            f"rollout.atropos.max_token_len={max_tokens} is more than the context of "
            f"{runtime.engine.max_context} tokens (engine.max_context); lower it"
        )


def _registration(spec: PolicySpec, trainer: Loop) -> Registration:
    """Return what the API of an Atropos run needs to know of this run now."""
    rollout = spec.config.rollout
    return Registration(
        batch_size=rollout.problems_per_step * rollout.group_size,
        max_token_len=rollout.atropos.max_token_len,
        checkpoint_dir=str(spec.folder.absolute()),
        save_checkpoint_interval=spec.config.checkpoint.every,
        starting_step=trainer.status.step,
        num_steps=spec.config.trainer.steps,
    )
