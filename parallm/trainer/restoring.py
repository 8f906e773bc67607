"""A checkpoint back into the parts of a run."""

import logging
from pathlib import Path

from parallm.checkpoint.state import TrainingState
from parallm.errors import AdapterError
from parallm.model.adapter import Adapter
from parallm.model.adapter_files import read_adapter
from parallm.trainer.evaluations import BEST
from parallm.trainer.parts import Parts
from parallm.types import POLICY

logger = logging.getLogger(__name__)


def restore(parts: Parts, state: TrainingState, *, serve: bool) -> None:
    """Bring back the learner, the newest version, and under its alias the best one that is still on disk.

    Without `serve` the trainer says what clients get. Runs on the device thread.
    """
    parts.learner.restore(state.adapter, dict(state.optimizer))
    versions = {state.version: state.adapter}
    best = parts.checkpoints.best()
    best_adapter = _best_adapter(best) if best is not None else None
    if best_adapter is not None and 0 < best_adapter.version <= state.version:
        versions.setdefault(best_adapter.version, best_adapter)
    known = max((card.version for card in parts.adapters.cards()), default=0)
    for version in sorted(versions):
        if version > known:
            parts.adapters.publish(versions[version], serve=serve)
    if best_adapter is not None and best_adapter.version in {card.version for card in parts.adapters.cards()}:
        parts.adapters.set_alias(BEST, best_adapter.version)


def _best_adapter(checkpoint: Path) -> Adapter | None:
    try:
        return read_adapter(checkpoint / "adapter", name=POLICY)
    except AdapterError as error:
        logger.warning("the alias %s is not restored: %s", BEST, error)
        return None
