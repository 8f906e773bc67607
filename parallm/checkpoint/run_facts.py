"""The identity of a run: kind, seed, problems and keys decide which run may go on from which checkpoint."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from parallm.errors import CheckpointError

IDENTITY = ("learner.preset",)
"""Keys that make another run of the same name, besides its kind, its seed and its problems."""
PROBLEMS = ("environment.", "learner.data")
"""Keys with these beginnings say what is trained on."""
UNSAID = ("trainer.steps", "trainer.keep_serving")
"""Keys whose change says itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """One run. JSON holds it as it is."""

    kind: str
    """As a user chooses it, e.g. `learner=sft`."""
    seed: int
    start: str = ""
    """Digest of the adapter that the run was given; empty for a new one."""
    problems: str = ""
    """Digest of what is drawn from, in its order; empty where nothing is."""
    keys: Mapping[str, Any]
    """Every other key that training depends on, dotted, with its value."""

    def check_fits(self, saved: "RunFacts", where: str, *, is_same_run: bool) -> None:
        """Raise CheckpointError, with a line for each key and the way out, unless this run can go on from `saved`.

        `is_same_run`: the checkpoint was found in the run's own folder. One that a user has named may be branched from.
        """
        lines = [*self._contradictions(saved, where)]
        if is_same_run and not lines:
            lines = [*self._of_another_run(saved, where)]
        if lines:
            raise CheckpointError("\n".join(lines))

    def changes(self, saved: "RunFacts") -> list[str]:
        """Every key that is another one now, with both values."""
        ours, theirs = {"seed": self.seed, **self.keys}, {"seed": saved.seed, **saved.keys}
        differing = [key for key in ours if key in theirs and key not in UNSAID and ours[key] != theirs[key]]
        return [f"{key}={_shown(ours[key])} (was {_shown(theirs[key])})" for key in differing]

    def draws_as(self, saved: "RunFacts | None") -> bool:
        """Whether a place in the problems of `saved` is the same problem here."""
        return saved is None or (saved.problems, saved.seed) == (self.problems, self.seed)

    def scores_as(self, saved: "RunFacts | None") -> bool:
        """Whether rewards and accuracies of `saved` can be compared with those of this run."""
        if saved is None or saved.problems == self.problems:
            return True
        return all(self.keys.get(key) == saved.keys.get(key) for key in self._keys_of_problems(saved))

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
        """One line for each key that makes this another run than that of `saved`."""
        ours, theirs = {"seed": self.seed, **self.keys}, {"seed": saved.seed, **saved.keys}
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
    """As on the command line."""
    return value if isinstance(value, str) else json.dumps(value)
