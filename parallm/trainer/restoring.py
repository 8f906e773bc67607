"""A checkpoint back into the parts of a run."""

import dataclasses
import logging
from pathlib import Path

from parallm.checkpoint.state import TrainingState
from parallm.errors import AdapterError, CheckpointError
from parallm.model.adapter import Adapter
from parallm.model.adapter_files import read_adapter
from parallm.trainer.parts import Parts
from parallm.types import BEST

logger = logging.getLogger(__name__)


def restore(parts: Parts, state: TrainingState, *, serve: bool) -> None:
    """Bring back the learner, the newest version, and under its alias the best one that is still on disk.

    Without `serve` the trainer says what clients get. Raises CheckpointError beside a given adapter of a later version,
    which a checkpoint that does not say what it began from may meet. Runs on the device thread.
    """
    known = _versions(parts)
    if max(known, default=0) > state.version:
        raise CheckpointError(
            f"model.adapter is version {max(known)} of {parts.policy}, and the checkpoint version {state.version}: "
            "going on would sample from the former; leave model.adapter out"
        )
    # a named checkpoint may be of another policy; how much is dropped is the run's to say
    newest = dataclasses.replace(state.adapter, name=parts.policy, dropout=parts.learner.adapter.dropout)
    parts.learner.restore(newest, dict(state.optimizer))
    versions = {state.version: newest}
    best = parts.checkpoints.best()
    best_adapter = _best_adapter(best, parts.policy) if best is not None else None
    if best_adapter is not None and 0 < best_adapter.version <= state.version:
        versions.setdefault(best_adapter.version, best_adapter)
    for version in sorted(versions):
        if version > max(known, default=0):
            parts.adapters.publish(versions[version], serve=serve)
    if best_adapter is not None and best_adapter.version in _versions(parts):
        parts.adapters.set_alias(BEST, best_adapter.version, name=parts.policy)


def _versions(parts: Parts) -> set[int]:
    """Of the policy, in memory."""
    return {card.version for card in parts.adapters.cards() if card.name == parts.policy}


def _best_adapter(checkpoint: Path, policy: str) -> Adapter | None:
    try:
        return read_adapter(checkpoint / "adapter", name=policy)
    except AdapterError as error:
        logger.warning("the alias %s is not restored: %s", BEST, error)
        return None
