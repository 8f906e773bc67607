"""The trainer of one policy of a run: its parts wired to each other, and the checkpoint that it goes on from."""

import dataclasses
import logging
from functools import partial

from parallm.checkpoint.manager import CheckpointManager
from parallm.checkpoint.run_facts import RunFacts
from parallm.config import RunConfig
from parallm.errors import CheckpointError, ConfigError
from parallm.house import House, on_device
from parallm.learner.learner import Learner
from parallm.learner.presets import objective_of
from parallm.lessons import Lessons
from parallm.model.adapter import Adapter
from parallm.model_names import of_alias
from parallm.policy_runs import PolicyRun
from parallm.resuming import resume
from parallm.rollout.atropos.rescoring import Rescorer
from parallm.rollout.atropos.scored_group import Limits
from parallm.rollout.atropos.source import AtroposSource
from parallm.rollout.collector import Collector
from parallm.rollout.evaluation import Evaluator
from parallm.rollout.live.environment_scores import own_scores
from parallm.rollout.problem_stream import Stream, make_stream
from parallm.run_kinds import CHOICES, kind_of, recorded_keys
from parallm.trainer.client_trainer import ClientTrainer
from parallm.trainer.evaluation_samples import evaluation_samples
from parallm.trainer.evaluations import adapter_to_keep
from parallm.trainer.given_update import GivenUpdates
from parallm.trainer.live_trainer import LiveTrainer
from parallm.trainer.loop import Loop
from parallm.trainer.parts import Parts
from parallm.trainer.reward_training import open_reward_model, paired, reward_parts
from parallm.trainer.saving import fingerprint_of, write_adapter
from parallm.trainer.supervised_trainer import SupervisedTrainer, tokenized, with_held_out
from parallm.trainer.trainer import Trainer
from parallm.types import LATEST

logger = logging.getLogger(__name__)


async def make_trainer(run: PolicyRun, house: House, lessons: Lessons) -> Loop:
    """A trainer that goes on where its checkpoints end."""
    config, parts = run.config, await _make_parts(run, house, lessons)
    per_step, save_every = config.rollout.problems_per_step, config.checkpoint.every
    trainer: Loop
    if lessons.pairs is not None:
        make = partial(reward_parts, parts, lessons.pairs, config.learner, config.trainer, start=house.start)
        make = partial(make, model=house.model, lanes=house.lanes, seed=config.seed)
        parts = await on_device(house.device, make)
        given = paired(lessons.pairs.train, house.model, per_step=per_step, seed=config.seed)
        parts = _drawing_from(parts, given.stream)
        trainer = SupervisedTrainer(parts, given, config.trainer, save_every=save_every)
    elif lessons.demonstrations is not None:
        held_out = lessons.demonstrations.held_out[: config.trainer.evaluate_problems]
        parts = with_held_out(parts, held_out, house.model)
        given = tokenized(lessons.demonstrations.train, house.model, per_step=per_step, seed=config.seed)
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
    await resume(run, house, parts, trainer)
    if run.traffic is not None:
        scores = own_scores(config.environment.name, lessons.environment)
        run.traffic.connect(partial(house.model.tokenizer.decode, special=True), scores)
    if lessons.pairs is None and lessons.demonstrations is None:
        run.given_updates = GivenUpdates(
            trainer,
            parts,
            advantage=objective_of(config.learner).advantage,
            max_off_policy_steps=config.trainer.max_off_policy_steps,
            max_tokens=config.rollout.max_tokens,
            num_token_ids=house.model.vocabulary_size,
        )
    if run.atropos is not None:
        _connect(run.atropos, config, house, parts.policy, version=parts.learner.adapter.version)
    return trainer


async def leave_adapter(run: PolicyRun, house: House) -> None:
    """Write the adapter that the run leaves into its folder, or say that there is none. Raises CheckpointError."""
    try:
        kept = await _write_adapter(run, house)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; the same adapter is in the last checkpoint") from error
    if kept is None:
        run.display.message("no update has moved the adapter, so the run leaves none")


async def rescue_adapter(run: PolicyRun, house: House) -> None:
    """A disk that has no room for the last checkpoint may have some for the adapter alone."""
    try:
        kept = await _write_adapter(run, house)
    except CheckpointError as error:
        logger.warning("%s", error)
        return
    if kept is not None:
        logger.warning("version %d is in %s; the state of its training is lost", kept.version, run.folder / "adapter")


async def _write_adapter(run: PolicyRun, house: House) -> Adapter | None:
    """Write the adapter that the run leaves for use elsewhere, if there is one."""
    assert run.adapters is not None, "its trainer has run"
    kept = adapter_to_keep(run.adapters, run.name, run.config.trainer.keep_best)
    if kept is not None:
        await on_device(house.device, partial(write_adapter, kept, run.folder, house.model))
    return kept


def _connect(source: AtroposSource, config: RunConfig, house: House, policy: str, *, version: int) -> None:
    """Raises ConfigError for sequences that no model here could compute."""
    longest = config.rollout.atropos.max_token_len
    if longest > house.engine.max_context:
        raise ConfigError(
            f"rollout.atropos.max_token_len={longest} is more than the context of {house.engine.max_context} tokens "
            "(engine.max_context); lower it"
        )
    source.connect(
        Limits(max_tokens=longest, num_token_ids=house.model.vocabulary_size),
        Rescorer(house.engine.generate_all, of_alias(LATEST, policy)),
        partial(house.model.tokenizer.decode, special=True),
        version,
    )


def _check_context(config: RunConfig, house: House) -> None:
    """Raise ConfigError for completions that leave no room for a prompt."""
    longest = config.rollout.max_tokens
    if longest >= house.engine.max_context:
        raise ConfigError(
            f"rollout.max_tokens={longest}: prompt and completion together have {house.engine.max_context} tokens "
            f"(engine.max_context), and the model knows {house.model.max_context} positions; lower it"
        )


async def _make_parts(run: PolicyRun, house: House, lessons: Lessons) -> Parts:
    config = run.config
    kind = kind_of(config)
    if kind == "rollouts" or (kind != "reward_model" and lessons.splits.test):
        _check_context(config, house)
    learner = await on_device(
        house.device,
        partial(
            Learner,
            house.model,
            house.lanes,
            config.learner,
            start=house.start,
            total_steps=config.trainer.steps,
            seed=config.seed,
        ),
    )
    fingerprint = await on_device(house.device, partial(fingerprint_of, house.model, house.start))
    reward_model = run.reward_model = await open_reward_model(
        config.rollout.reward_model, config.learner, house.device, house.model, house.lanes
    )
    checkpoints = CheckpointManager(run.folder, config.checkpoint)
    facts = RunFacts(
        kind=CHOICES[kind],
        seed=config.seed,
        start=house.start.digest if config.model.adapter is not None else "",
        keys=recorded_keys(config, house.start.dropout),
    )
    collector = Collector(
        house.engine.generate_all,
        house.model.tokenizer,
        lessons.environment,
        make_stream(lessons.environment, lessons.splits.train, config.seed),
        config.rollout,
        config.seed,
        reward_model,
    )
    evaluator = Evaluator(
        generate_all=house.engine.generate_all,
        tokenizer=house.model.tokenizer,
        environment=lessons.environment,
        problems=lessons.splits.test,
        max_tokens=config.rollout.max_tokens,
        samples=evaluation_samples(config.trainer, config.seed),
        rollout=config.rollout,
        reward_model=reward_model,
    )
    return Parts(
        device=house.device,
        engine=house.engine,
        learner=learner,
        adapters=house.adapters,
        collector=collector,
        evaluator=evaluator if lessons.splits.test else None,
        checkpoints=checkpoints,
        fingerprint=fingerprint,
        facts=facts,
        recorder=run.recorder,
        display=run.display,
    )


def _drawing_from(parts: Parts, stream: Stream) -> Parts:
    return dataclasses.replace(parts, facts=dataclasses.replace(parts.facts, problems=stream.digest))
