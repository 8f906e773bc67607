"""The groups of a batch on their way to the learner: checked, joined with what was sampled, counted, or refused."""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from parallm.rollout.atropos.ledger import Behaviour, SampledLedger
from parallm.rollout.atropos.quarantine import Quarantine
from parallm.rollout.atropos.rescoring import Rescorer
from parallm.rollout.atropos.scored_group import GroupRefused, Limits, ScoredGroup, ScoredSequence, read_group
from parallm.rollout.atropos.settings import AtroposSettings
from parallm.rollout.atropos.trajectories import Decode, group_of
from parallm.types import TrajectoryGroup

GAP = 1e-3
"""By so much may the log-probs that an environment posts differ from those that it was given."""

logger = logging.getLogger(__name__)


class Intake:
    """For one task on the asyncio thread. Counts are since it was made."""

    def __init__(
        self,
        settings: AtroposSettings,
        ledger: SampledLedger,
        quarantine: Quarantine,
        *,
        limits: Limits,
        rescorer: Rescorer,
        decode: Decode,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
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

    def _found(self, sequence: ScoredSequence) -> Behaviour | None:
        if sequence.is_demonstration:
            return None
        found = self._ledger.find(sequence.tokens_T, sequence.trained_T, sequence.logprobs_T)
        if found is not None:
            self.num_joined += 1
            self._compare(sequence, found)
        return found

    async def _recomputed(self, scored: ScoredGroup, missing: Sequence[int], version: int) -> Mapping[int, Behaviour]:
        if self._settings.unmatched == "drop":
            raise GroupRefused(
                "unmatched",
                f"{len(missing)} of {len(scored.sequences)} sequences hold trained tokens that no completion of the "
                "last while has; rollout.atropos.unmatched=recompute would train on them as on the policy's own",
            )
        found = await self._rescorer.score([scored.sequences[index] for index in missing], version)
        self.num_recomputed += len(missing)
        return dict(zip(missing, found, strict=True))

    def _compare(self, sequence: ScoredSequence, found: Behaviour) -> None:
        """What was sampled here is known exactly, so it counts; that an environment says otherwise should be known."""
        if sequence.temperature is not None and abs(sequence.temperature - found.temperature) > GAP:
            self._warn(
                "temperature",
                f"an environment says that it has sampled at temperature {sequence.temperature:g}; it has at "
                f"{found.temperature:g}, which counts",
            )
        trained_T = sequence.trained_T
        if sequence.logprobs_T is not None and trained_T.any():
            gap = float(np.abs(sequence.logprobs_T - found.logprobs_T)[trained_T].max())
            if gap > GAP:
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
