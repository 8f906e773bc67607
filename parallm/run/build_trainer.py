"""The trainer of one policy of a run: its parts wired to each other, and the checkpoint that it goes on from."""

import dataclasses
import logging
from functools import partial

from parallm.checkpoint.manager import CheckpointManager
from parallm.checkpoint.state import RunFacts
from parallm.config.run_kinds import CHOICES, kind_of, recorded_keys
from parallm.config.schema import RunConfig
from parallm.errors import CheckpointError, ConfigError
from parallm.integrations.atropos.intake import Rescorer
from parallm.integrations.atropos.scored_group import Limits
from parallm.integrations.atropos.source import AtroposSource
from parallm.learner.learner import Learner
from parallm.learner.loss.presets import resolve_objective
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.names import of_alias
from parallm.rollout.collector import Collector
from parallm.rollout.evaluation import Evaluator
from parallm.rollout.live.scoring_functions import environment_scoring_functions
from parallm.rollout.problems import Stream, make_stream
from parallm.run.policy_runs import PolicyRun
from parallm.run.runtime import Runtime, on_device
from parallm.run.training_data import TrainingData
from parallm.trainer.context import TrainerContext
from parallm.trainer.evaluations import final_adapter
from parallm.trainer.evaluators import evaluation_samples
from parallm.trainer.given_update import GivenUpdates
from parallm.trainer.live_trainer import ClientTrainer, LiveTrainer
from parallm.trainer.loop import Loop
from parallm.trainer.reward_training import open_reward_model, reward_model_context, tokenize_pairs
from parallm.trainer.saving import fingerprint_of, restore, write_adapter
from parallm.trainer.supervised_trainer import SupervisedTrainer, add_held_out_loss, tokenize_demonstrations
from parallm.trainer.trainer import Trainer
from parallm.types import LATEST


async def resume(run: PolicyRun, runtime: Runtime, parts: TrainerContext, trainer: Loop) -> None:
    """Go on after the newest checkpoint, if there is one, with what clients have sent, and say so."""
    config, texts = run.config, []
    load = partial(parts.checkpoints.load, config.checkpoint.resume, parts.fingerprint, parts.facts)
    state = await on_device(runtime.device, load)
    if config.checkpoint.resume == "auto":
        run.recorder.go_on_after(0 if state is None else state.step)
    if state is not None:
        await on_device(runtime.device, partial(restore, parts, state, serve=config.trainer.publish_if == "always"))
        trainer.resume(state)
        texts.append(f"resumed after step {state.step}, version {state.version}")
    run.resumed_version = parts.learner.adapter.version
    await _renumber(run, runtime, parts, trainer)
    if run.traffic is not None:
        step, now = 0 if state is None else state.step, parts.learner.adapter.version
        texts.append(run.traffic.resume(step, version=run.resumed_version, now=now))
    if text := "; ".join(filter(None, texts)):
        parts.display.message(text)
    if state is not None and state.facts is not None and (changes := parts.facts.changes(state.facts)):
        parts.display.message(f"other values than in the run that is gone on with: {', '.join(changes)}")


async def _renumber(run: PolicyRun, runtime: Runtime, parts: TrainerContext, trainer: Loop) -> None:
    """Where operators have named versions that no checkpoint holds the trainer goes on with numbers above those."""
    pinned, learner = runtime.kept.state.pinned(run.name), parts.learner
    if isinstance(learner, Learner) and pinned > learner.adapter.version:
        trainer.renumbered(await on_device(runtime.device, partial(learner.renumber, pinned + 1)))


logger = logging.getLogger(__name__)


async def make_trainer(run: PolicyRun, runtime: Runtime, training_data: TrainingData) -> Loop:
    """A trainer that goes on where its checkpoints end."""
    config, parts = run.config, await _make_parts(run, runtime, training_data)
    per_step, save_every = config.rollout.problems_per_step, config.checkpoint.every
    trainer: Loop
    if training_data.pairs is not None:
        make = partial(
            reward_model_context, parts, training_data.pairs, config.learner, config.trainer, start=runtime.start
        )
        make = partial(make, model=runtime.model, streams=runtime.streams, seed=config.seed)
        parts = await on_device(runtime.device, make)
        given = tokenize_pairs(training_data.pairs.train, runtime.model, per_step=per_step, seed=config.seed)
        parts = _drawing_from(parts, given.stream)
        trainer = SupervisedTrainer(parts, given, config.trainer, save_every=save_every)
    elif training_data.demonstrations is not None:
        held_out = training_data.demonstrations.held_out[: config.trainer.evaluate_problems]
        parts = add_held_out_loss(parts, held_out, runtime.model)
        given = tokenize_demonstrations(
            training_data.demonstrations.train, runtime.model, per_step=per_step, seed=config.seed
        )
        parts = _drawing_from(parts, given.stream)
        trainer = SupervisedTrainer(parts, given, config.trainer, save_every=save_every)
    elif run.traffic is not None:
        trainer = ClientTrainer(parts, run.traffic, config.trainer, config.rollout, save_every=save_every)
    elif run.atropos is not None:
        trainer = LiveTrainer(parts, run.atropos, config.trainer, config.rollout, save_every=save_every)
    else:
        parts = _drawing_from(parts, parts.collector.stream)
        trainer = Trainer(parts, config.trainer, config.rollout, save_every=save_every)
    run.adapters = parts.adapters
    await resume(run, runtime, parts, trainer)
    if run.traffic is not None:
        scores = environment_scoring_functions(config.environment.name, training_data.environment)
        run.traffic.connect(partial(runtime.model.tokenizer.decode, special=True), scores)
    if training_data.pairs is None and training_data.demonstrations is None:
        run.given_updates = GivenUpdates(
            trainer,
            parts,
            advantage=resolve_objective(config.learner).advantage,
            max_off_policy_steps=config.trainer.max_off_policy_steps,
            max_tokens=config.rollout.max_tokens,
            num_token_ids=runtime.model.vocabulary_size,
        )
    if run.atropos is not None:
        _connect(run.atropos, config, runtime, parts.policy, version=parts.learner.adapter.version)
    return trainer


async def leave_adapter(run: PolicyRun, runtime: Runtime) -> None:
    """Write the adapter that the run leaves into its folder, or say that there is none. Raises CheckpointError."""
    try:
        kept = await _write_adapter(run, runtime)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; the same adapter is in the last checkpoint") from error
    if kept is None:
        run.display.message("no update has moved the adapter, so the run leaves none")


async def rescue_adapter(run: PolicyRun, runtime: Runtime) -> None:
    """A disk that has no room for the last checkpoint may have some for the adapter alone."""
    try:
        kept = await _write_adapter(run, runtime)
    except CheckpointError as error:
        logger.warning("%s", error)
        return
    if kept is not None:
        logger.warning("version %d is in %s; the state of its training is lost", kept.version, run.folder / "adapter")


async def _write_adapter(run: PolicyRun, runtime: Runtime) -> Adapter | None:
    """Write the adapter that the run leaves for use elsewhere, if there is one."""
    assert run.adapters is not None, "its trainer has run"
    kept = final_adapter(run.adapters, run.name, run.config.trainer.keep_best)
    if kept is not None:
        await on_device(runtime.device, partial(write_adapter, kept, run.folder, runtime.model))
    return kept


def _connect(source: AtroposSource, config: RunConfig, runtime: Runtime, policy: str, *, version: int) -> None:
    """Raises ConfigError for sequences that no model here could compute."""
    longest = config.rollout.atropos.max_token_len
    if longest > runtime.engine.max_context:
        raise ConfigError(
            f"rollout.atropos.max_token_len={longest} is more than the context of {runtime.engine.max_context} tokens "
            "(engine.max_context); lower it"
        )
    source.connect(
        Limits(max_tokens=longest, num_token_ids=runtime.model.vocabulary_size),
        Rescorer(runtime.engine.generate_all, of_alias(LATEST, policy)),
        partial(runtime.model.tokenizer.decode, special=True),
        version,
    )


def _check_context(config: RunConfig, runtime: Runtime) -> None:
    """Raise ConfigError for completions that leave no room for a prompt."""
    longest = config.rollout.max_tokens
    if longest >= runtime.engine.max_context:
        raise ConfigError(
            f"rollout.max_tokens={longest}: prompt and completion together have {runtime.engine.max_context} tokens "
            f"(engine.max_context), and the model knows {runtime.model.max_context} positions; lower it"
        )


async def _make_parts(run: PolicyRun, runtime: Runtime, training_data: TrainingData) -> TrainerContext:
    config = run.config
    kind = kind_of(config)
    if kind == "rollouts" or (kind != "reward_model" and training_data.splits.test):
        _check_context(config, runtime)
    learner = await on_device(
        runtime.device,
        partial(
            Learner,
            runtime.model,
            runtime.streams,
            config.learner,
            start=runtime.start,
            total_steps=config.trainer.steps,
            seed=config.seed,
        ),
    )
    fingerprint = await on_device(runtime.device, partial(fingerprint_of, runtime.model, runtime.start))
    reward_model = run.reward_model = await open_reward_model(
        config.rollout.reward_model, config.learner, runtime.device, runtime.model, runtime.streams
    )
    checkpoints = CheckpointManager(run.folder, config.checkpoint)
    facts = RunFacts(
        kind=CHOICES[kind],
        seed=config.seed,
        start=runtime.start.digest if config.model.adapter is not None else "",
        keys=recorded_keys(config, runtime.start.dropout),
    )
    collector = Collector(
        runtime.engine.generate_all,
        runtime.model.tokenizer,
        training_data.environment,
        make_stream(training_data.environment, training_data.splits.train, config.seed),
        config.rollout,
        config.seed,
        reward_model,
    )
    evaluator = Evaluator(
        generate_all=runtime.engine.generate_all,
        tokenizer=runtime.model.tokenizer,
        environment=training_data.environment,
        problems=training_data.splits.test,
        max_tokens=config.rollout.max_tokens,
        samples=evaluation_samples(config.trainer, config.seed),
        rollout=config.rollout,
        reward_model=reward_model,
    )
    return TrainerContext(
        device=runtime.device,
        engine=runtime.engine,
        learner=learner,
        adapters=runtime.adapters,
        collector=collector,
        evaluator=evaluator if training_data.splits.test else None,
        checkpoints=checkpoints,
        fingerprint=fingerprint,
        facts=facts,
        recorder=run.recorder,
        display=run.display,
    )


def _drawing_from(parts: TrainerContext, stream: Stream) -> TrainerContext:
    return dataclasses.replace(parts, facts=dataclasses.replace(parts.facts, problems=stream.digest))
