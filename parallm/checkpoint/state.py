"""What a training run needs to go on as if it had never stopped."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from parallm.checkpoint.run_facts import RunFacts
from parallm.errors import CheckpointError
from parallm.model.adapter import Adapter
from parallm.types import TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What a run and the checkpoint that it resumes from must have in common."""

    model: str
    """Name or path of the base, for people: a base may be moved."""
    model_sha256: str
    num_layers: int
    rank: int
    alpha: float
    targets: tuple[str, ...]
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Sites of another rank."""
    rslora: bool = False
    dora: bool = False

    def check_fits(self, saved: "Fingerprint", where: str) -> None:
        """Raise CheckpointError, naming the first difference and the way out, unless `saved` can go on in this run."""
        way_out = "set checkpoint.resume=never to start anew"
        if (saved.model_sha256, saved.num_layers) != (self.model_sha256, self.num_layers):
            raise CheckpointError(
                f"{where} was trained on the base {saved.model} (sha256 {saved.model_sha256[:12]}), this run loads "
                f"{self.model} (sha256 {self.model_sha256[:12]}); set model.path to that base, or {way_out}"
            )
        for name in ("rank", "alpha", "rslora", "dora"):
            ours, theirs = getattr(self, name), getattr(saved, name)
            if ours != theirs:
                raise CheckpointError(
                    f"{where} has LoRA {name} {theirs}, this run {ours}; set model.lora.{name}={str(theirs).lower()}, "
                    f"or {way_out}"
                )
        if differing := sorted(set(saved.targets) ^ set(self.targets)):
            raise CheckpointError(
                f"{where} adapts {len(saved.targets)} layers, this run {len(self.targets)}; {differing[0]} is only "
                f"in one of them; set model.lora.targets and model.lora.layers as in that run, or {way_out}"
            )
        self._check_ranks(saved, where, way_out)

    def _check_ranks(self, saved: "Fingerprint", where: str, way_out: str) -> None:
        for site in sorted(saved.ranks.keys() | self.ranks.keys()):
            ours, theirs = self.ranks.get(site, self.rank), saved.ranks.get(site, saved.rank)
            if ours != theirs:
                raise CheckpointError(
                    f"{where} has rank {theirs} at {site}, this run {ours}; set model.lora.ranks as in that run, or "
                    f"{way_out}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Everything between two steps of a run. Arrays are evaluated by the manager, on the device thread."""

    step: int
    """Finished steps."""
    version: int
    adapter: Adapter
    optimizer: Mapping[str, mx.array]
    """The optimizer's state by flattened name."""
    schedule_step: int
    counters: Mapping[str, Any]
    """Data cursor, random states and counters; as JSON: no tuples, string keys only. Numbers that are not finite come
    back as they were: state.json has `NaN`, `Infinity` and `-Infinity`, as Python's json writes and reads them."""
    groups: tuple[TrajectoryGroup, ...]
    """Sampled, not yet trained on."""
    score: float | None
    """Held-out accuracy of this version, if it was evaluated."""
    fingerprint: Fingerprint
    facts: RunFacts | None = None
    """None in checkpoints of versions that did not keep them."""
