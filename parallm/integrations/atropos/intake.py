"""Groups that are not trained on: counted by reason, the first of each kept in the run folder for people to look at."""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from parallm.integrations.atropos.rescoring import Rescorer
from parallm.integrations.atropos.sample_store import SampleStore, SamplingRecord
from parallm.integrations.atropos.scored_group import (
    GroupRefused,
    Limits,
    Reason,
    ScoredGroup,
    ScoredSequence,
    read_group,
)
from parallm.integrations.atropos.trajectories import Decode, group_of
from parallm.rollout.atropos_settings import AtroposSettings
from parallm.rollout.live.journal import Journal
from parallm.types import TrajectoryGroup

FILE = "quarantine.jsonl"
MAX_KEPT = 16
"""Groups of each reason: an environment may get every single one wrong."""
OF_THE_RUN: frozenset[Reason] = frozenset({"stale", "no_signal"})
"""Nothing is wrong with such groups."""


class Quarantine:
    """For the asyncio thread; the file is written in another one."""

    def __init__(self, folder: Path) -> None:
        self._journal = Journal(folder / FILE)
        self._counts: Counter[Reason] = Counter()

    @property
    def counts(self) -> Mapping[Reason, int]:
        """Groups by reason, since the start."""
        return dict(sorted(self._counts.items()))

    def put(self, refused: GroupRefused, group: Any) -> None:
        self._counts[refused.reason] += 1
        if refused.reason not in OF_THE_RUN and self._counts[refused.reason] <= MAX_KEPT:
            self._journal.append(lambda: {"reason": refused.reason, "detail": refused.detail, "group": group})

    def close(self) -> None:
        """Wait until the file holds everything."""
        self._journal.close()


MAX_LOGPROB_GAP = 1e-3
"""By so much may the log-probs that an environment posts differ from those that it was given."""

logger = logging.getLogger(__name__)


class Intake:
    """For one task on the asyncio thread. Counts are since it was made."""

    def __init__(
        self,
        settings: AtroposSettings,
        sample_store: SampleStore,
        quarantine: Quarantine,
        *,
        limits: Limits,
        rescorer: Rescorer,
        decode: Decode,
    ) -> None:
        self._settings = settings
        self._sample_store = sample_store
        self._quarantine = quarantine
        self._limits = limits
        self._rescorer = rescorer
        self._decode = decode
        self._warned: set[str] = set()
        self.num_groups = 0
        self.num_read = 0
        """Sequences of groups that are well-formed."""
        self.num_joined = 0
        """Of them, those of which every trained token was found in the ledger."""
        self.num_recomputed = 0
        self.sizes: Counter[int] = Counter()

    async def read(self, batch: Sequence[Any], version: int) -> list[TrajectoryGroup]:
        """What can be trained on; `version` is the learner's."""
        groups = []
        for value in batch:
            self.num_groups += 1
            await asyncio.sleep(0)  # a large group takes 10 ms, in which nobody else is answered
            try:
                groups.append(await self._group(value, version))
            except GroupRefused as refused:
                self._warn(refused.reason, f"a group is not trained on: {refused}")
                self._quarantine.put(refused, value)
        return groups

    async def _group(self, value: Any, version: int) -> TrajectoryGroup:
        self.sizes[_size(value)] += 1
        scored = read_group(value, self._limits)
        self.num_read += len(scored.sequences)
        behaviours = {index: self._found(one) for index, one in enumerate(scored.sequences)}
        missing = [index for index, found in behaviours.items() if found is None]
        if missing:
            behaviours.update(await self._recomputed(scored, missing, version))
        known = [one for _, one in sorted(behaviours.items()) if one is not None]
        return group_of(scored, known, self._decode)

    def _found(self, sequence: ScoredSequence) -> SamplingRecord | None:
        if sequence.is_demonstration:
            return None
        found = self._sample_store.find(sequence.tokens_T, sequence.trained_T, sequence.logprobs_T)
        if found is not None:
            self.num_joined += 1
            self._compare(sequence, found)
        return found

    async def _recomputed(
        self, scored: ScoredGroup, missing: Sequence[int], version: int
    ) -> Mapping[int, SamplingRecord]:
        if self._settings.unmatched == "drop":
            raise GroupRefused(
                "unmatched",
                f"{len(missing)} of {len(scored.sequences)} sequences hold trained tokens that no completion of the "
                "last while has; rollout.atropos.unmatched=recompute would train on them as on the policy's own",
            )
        found = await self._rescorer.score([scored.sequences[index] for index in missing], version)
        self.num_recomputed += len(missing)
        return dict(zip(missing, found, strict=True))

    def _compare(self, sequence: ScoredSequence, found: SamplingRecord) -> None:
        """What was sampled here is known exactly, so it counts; that an environment says otherwise should be known."""
        if sequence.temperature is not None and abs(sequence.temperature - found.temperature) > MAX_LOGPROB_GAP:
            self._warn(
                "temperature",
                f"an environment says that it has sampled at temperature {sequence.temperature:g}; it has at "
                f"{found.temperature:g}, which counts",
            )
        trained_T = sequence.trained_T
        if sequence.logprobs_T is not None and trained_T.any():
            gap = float(np.abs(sequence.logprobs_T - found.logprobs_T)[trained_T].max())
            if gap > MAX_LOGPROB_GAP:
                self._warn(
                    "logprobs",
                    f"an environment has posted log-probs that differ by up to {gap:.3g} from those that it was "
                    "given, which count",
                )
        if found.is_filtered:
            self._warn(
                "filtered",
                "an environment samples with top_p, top_k, min_p, penalties or a grammar: its log-probs are those "
                "of the whole policy, so the gradient is biased",
            )

    def _warn(self, about: str, text: str) -> None:
        """Once."""
        if about not in self._warned:
            self._warned.add(about)
            logger.warning("%s", text)


def _size(value: Any) -> int:
    tokens = value.get("tokens") if isinstance(value, Mapping) else None
    return len(tokens) if isinstance(tokens, list) else 0
