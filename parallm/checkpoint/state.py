"""The state of a training run, and the identity that decides which run may resume from which checkpoint."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from parallm.errors import CheckpointError
from parallm.model.adapters.adapter import Adapter

IDENTITY = ("learner.preset",)
"""Keys that identify a run, besides its kind, seed and problems."""
PROBLEMS = ("environment.", "learner.data")
"""Prefixes of the keys that choose what is trained on."""
UNREPORTED = ("trainer.steps", "trainer.keep_serving")
"""Keys whose change is not reported, because it is obvious."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """One run. JSON holds it as it is."""

    kind: str
    """The user's choice, e.g. `learner=sft`."""
    seed: int
    start: str = ""
    """Digest of the given start adapter; empty for a new one."""
    problems: str = ""
    """Digest of the problems in their order; empty if nothing is drawn."""
    keys: Mapping[str, Any]
    """All other keys that training depends on, dotted, with their values."""

    def check_fits(self, saved: "RunFacts", where: str, *, is_same_run: bool) -> None:
        """Raise CheckpointError, with a line per key and the way out, unless this run can resume from `saved`.

        `is_same_run`: the checkpoint is in the run's own folder. A checkpoint that a user names may be branched from.
        """
        lines = [*self._contradictions(saved, where)]
        if is_same_run and not lines:
            lines = [*self._of_another_run(saved, where)]
        if lines:
            raise CheckpointError("\n".join(lines))

    def changes(self, saved: "RunFacts") -> list[str]:
        """Every key whose value differs, with both values."""
        ours, theirs = self._all_keys, saved._all_keys
        differing = [key for key in ours if key in theirs and key not in UNREPORTED and ours[key] != theirs[key]]
        return [f"{key}={_shown(ours[key])} (was {_shown(theirs[key])})" for key in differing]

    def draws_same_problems(self, saved: "RunFacts | None") -> bool:
        """Whether an index into the problems of `saved` is the same problem here."""
        return saved is None or (saved.problems, saved.seed) == (self.problems, self.seed)

    def scores_same_problems(self, saved: "RunFacts | None") -> bool:
        """Whether rewards and accuracies of `saved` are comparable with this run's."""
        if saved is None or saved.problems == self.problems:
            return True
        return all(self.keys.get(key) == saved.keys.get(key) for key in self._keys_of_problems(saved))

    @property
    def _all_keys(self) -> dict[str, Any]:
        return {"seed": self.seed, **self.keys}

    def _keys_of_problems(self, saved: "RunFacts") -> list[str]:
        return [key for key in sorted(self.keys.keys() | saved.keys.keys()) if key.startswith(PROBLEMS)]

    def _contradictions(self, saved: "RunFacts", where: str) -> Iterator[str]:
        if saved.kind != self.kind:
            yield (
                f"{where} is of a run with {saved.kind}, and this one is with {self.kind}; choose {saved.kind}, or "
                f"start a new run from its adapter: checkpoint.resume=never model.adapter={where}"
            )
        if self.start not in ("", saved.start):
            began = "another one" if saved.start else "a new one"
            yield (
                f"model.adapter names an adapter, and the run of {where} began from {began}; leave model.adapter out "
                "to go on from the checkpoint, or start anew from the adapter with checkpoint.resume=never"
            )

    def _of_another_run(self, saved: "RunFacts", where: str) -> Iterator[str]:
        """One line per key that distinguishes this run from that of `saved`."""
        ours, theirs = self._all_keys, saved._all_keys
        keys = ["seed", *IDENTITY]
        if saved.problems != self.problems:
            keys += self._keys_of_problems(saved)
        for key in keys:
            if ours.get(key) != theirs.get(key):
                yield (
                    f"{key}={_shown(ours.get(key))}: {where}, from which checkpoint.resume=auto would go on, is of a "
                    f"run with {key}={_shown(theirs.get(key))}; set that, give this run another name, or branch off "
                    f"with checkpoint.resume={where}"
                )


def _shown(value: object) -> str:
    """The value in command-line form."""
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The base and LoRA shape that a run shares with the checkpoint that it resumes from."""

    model: str
    """Name or path of the base, for people: a base may be moved."""
    model_sha256: str
    num_layers: int
    rank: int
    alpha: float
    targets: tuple[str, ...]
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Target modules with a rank of their own."""
    rslora: bool = False
    dora: bool = False

    def check_fits(self, saved: "Fingerprint", where: str) -> None:
        """Raise CheckpointError, naming the first difference and the way out, unless `saved` fits this run."""
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
        for target in sorted(saved.ranks.keys() | self.ranks.keys()):
            ours, theirs = self.ranks.get(target, self.rank), saved.ranks.get(target, saved.rank)
            if ours != theirs:
                raise CheckpointError(
                    f"{where} has rank {theirs} at {target}, this run {ours}; set model.lora.ranks as in that run, or "
                    f"{way_out}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """A run between two steps. The manager evaluates its arrays, on the device thread."""

    step: int
    """Finished steps."""
    version: int
    adapter: Adapter
    optimizer: Mapping[str, mx.array]
    """The optimizer's state by flattened name."""
    counters: Mapping[str, Any]
    """Data cursor, random states and counters as JSON: no tuples, string keys only. `NaN` and `Infinity` are kept."""
    score: float | None
    """Held-out accuracy of this version, if it was evaluated."""
    fingerprint: Fingerprint
    facts: RunFacts | None = None
    """None in checkpoints of older versions."""
