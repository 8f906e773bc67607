"""Groups of a batch on their way to the learner: checked, joined with what was sampled here, counted, or refused.

Called by `AtroposSource`. A refused group is counted by reason and never trained on.
Axes: T tokens of a posted sequence, N of its trajectory, from the first trained token to the last.
"""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from parallm.integrations.atropos.sample_store import SampleStore, SamplingRecord
from parallm.integrations.atropos.scored_group import GroupRefused, Limits, ScoredGroup, ScoredSequence, read_group
from parallm.rollout.live.journal import Journal
from parallm.rollout.runner import GenerateAll
from parallm.rollout.settings import AtroposSettings
from parallm.types import (
    Completion,
    GenerationRequest,
    Problem,
    SamplingParams,
    Trajectory,
    TrajectoryGroup,
    WeightSpan,
)

FILE = "quarantine.jsonl"
MAX_KEPT = 16
"""Groups that the file keeps of each reason: an environment may get every single one wrong."""
MAX_LOGPROB_GAP = 1e-3
"""Tolerated difference between the log-probs that an environment posts and those that it was given."""
DEFAULT_TEMPERATURE = 1.0
"""Temperature of an environment that names none, as in atroposlib's example trainer."""
Decode = Callable[[Sequence[int]], str]

logger = logging.getLogger(__name__)


class Quarantine:
    """Counts refused groups and keeps the first of each reason in the run folder.

    Used on the asyncio thread; another thread writes the file.
    """

    def __init__(self, folder: Path) -> None:
        self._journal = Journal(folder / FILE)
        self.counts: Counter[str] = Counter()
        """Groups that were not trained on by reason, since the start."""

    def put(self, refused: GroupRefused, group: Any) -> None:
        self.counts[refused.reason] += 1
        if self.counts[refused.reason] <= MAX_KEPT:
            self._journal.append({"reason": refused.reason, "detail": refused.detail, "group": group})

    def close(self) -> None:
        self._journal.close()


@dataclass(frozen=True, slots=True)
class Rescorer:
    """Scores tokens that were not sampled here: the present policy is taken for the one that sampled them.

    The engine computes the log-probs as those of a prompt, which are the very numbers that the learner computes.
    """

    generate_all: GenerateAll
    model: str
    numbers: Iterator[int] = field(default_factory=itertools.count)

    async def score(self, sequences: Sequence[ScoredSequence], version: int) -> list[SamplingRecord]:
        """Return a record of each sequence under the policy's `version`."""
        answers = await self.generate_all([self._request(sequence) for sequence in sequences])
        return [
            _rescored(sequence, completion, version) for sequence, (completion,) in zip(sequences, answers, strict=True)
        ]

    def _request(self, sequence: ScoredSequence) -> GenerationRequest:
        return GenerationRequest(
            request_id=f"rescore-{self.model}-{next(self.numbers)}",
            prompt_tokens=tuple(sequence.tokens_T.tolist()),
            sampling=SamplingParams(max_tokens=0, temperature=temperature_of(sequence), prompt_logprobs=0),
            model=self.model,
            traffic="rollout",
            is_continued=False,
        )


def temperature_of(sequence: ScoredSequence) -> float:
    """The posted temperature, where 0 means 1, as in atroposlib's example trainer."""
    return sequence.temperature or DEFAULT_TEMPERATURE


def _rescored(sequence: ScoredSequence, completion: Completion, version: int) -> SamplingRecord:
    assert completion.prompt_logprobs is not None, "the request asks for them"
    logprobs_T = [0.0 if entry is None else entry.logprob for entry in completion.prompt_logprobs]
    return SamplingRecord(
        logprobs_T=np.asarray(logprobs_T, np.float32),
        versions_T=np.full(len(sequence.tokens_T), version, np.int32),
        temperature=temperature_of(sequence),
        is_filtered=False,
        finish_reason="stop",
    )


@dataclass(slots=True, kw_only=True)
class Intake:
    """Turns posted groups into groups to train on. Used by one task; counts are since the start of the process."""

    settings: AtroposSettings
    sample_store: SampleStore
    quarantine: Quarantine
    limits: Limits
    rescorer: Rescorer
    decode: Decode
    warned: set[str] = field(default_factory=set)
    num_groups: int = 0
    num_sequences: int = 0
    num_read: int = 0
    """Sequences of well-formed groups."""
    num_joined: int = 0
    """Sequences whose trained tokens all stand in the sample store."""
    num_recomputed: int = 0

    async def read(self, batch: Sequence[Any], version: int) -> list[TrajectoryGroup]:
        """Return the groups that can be trained on; `version` is the learner's."""
        groups = []
        for value in batch:
            self.num_groups += 1
            self.num_sequences += _num_sequences(value)
            await asyncio.sleep(0)  # a large group takes 10 ms, during which no request is answered
            try:
                groups.append(await self._group(value, version))
            except GroupRefused as refused:
                self._warn(refused.reason, f"a group is not trained on: {refused}")
                self.quarantine.put(refused, value)
        return groups

    async def _group(self, value: Any, version: int) -> TrajectoryGroup:
        scored = read_group(value, self.limits)
        self.num_read += len(scored.sequences)
        records = [self._find(sequence) for sequence in scored.sequences]
        missing = [index for index, record in enumerate(records) if record is None]
        if missing:
            for index, record in zip(missing, await self._recompute(scored, missing, version), strict=True):
                records[index] = record
        return group_of(scored, [record for record in records if record is not None], self.decode)

    def _find(self, sequence: ScoredSequence) -> SamplingRecord | None:
        if sequence.is_demonstration:
            return None
        record = self.sample_store.find(sequence.tokens_T, sequence.trained_T, sequence.logprobs_T)
        if record is not None:
            self.num_joined += 1
            self._compare(sequence, record)
        return record

    async def _recompute(self, scored: ScoredGroup, missing: Sequence[int], version: int) -> list[SamplingRecord]:
        if self.settings.unmatched == "drop":
            raise GroupRefused(
                "unmatched",
                f"{len(missing)} of {len(scored.sequences)} sequences hold trained tokens that no completion of the "
                "last while has; rollout.atropos.unmatched=recompute would train on them as on the policy's own",
            )
        records = await self.rescorer.score([scored.sequences[index] for index in missing], version)
        self.num_recomputed += len(missing)
        return records

    def _compare(self, sequence: ScoredSequence, record: SamplingRecord) -> None:
        """Warn where the environment posts something else than was sampled here, which counts."""
        if sequence.temperature is not None and abs(sequence.temperature - record.temperature) > MAX_LOGPROB_GAP:
            self._warn(
                "temperature",
                f"an environment says that it has sampled at temperature {sequence.temperature:g}; it has at "
                f"{record.temperature:g}, which counts",
            )
        trained_T = sequence.trained_T
        if sequence.logprobs_T is not None and trained_T.any():
            gap = float(np.abs(sequence.logprobs_T - record.logprobs_T)[trained_T].max())
            if gap > MAX_LOGPROB_GAP:
                self._warn(
                    "logprobs",
                    f"an environment has posted log-probs that differ by up to {gap:.3g} from those that it was "
                    "given, which count",
                )
        if record.is_filtered:
            self._warn(
                "filtered",
                "an environment samples with top_p, top_k, min_p, penalties or a grammar: its log-probs are those "
                "of the whole policy, so the gradient is biased",
            )

    def _warn(self, about: str, text: str) -> None:
        """Log `text`, the first time for each `about`."""
        if about not in self.warned:
            self.warned.add(about)
            logger.warning("%s", text)


def _num_sequences(value: Any) -> int:
    tokens = value.get("tokens") if isinstance(value, Mapping) else None
    return len(tokens) if isinstance(tokens, list) else 0


def group_of(scored: ScoredGroup, records: Sequence[SamplingRecord], decode: Decode) -> TrajectoryGroup:
    """Return the group as the learner trains on it.

    Raises GroupRefused for tokens that are no samples of one policy at one temperature.
    """
    for record in records:
        if record.temperature == 0:
            raise GroupRefused("greedy", "its tokens were sampled at temperature 0")
        if not np.isfinite(record.temperature):
            raise GroupRefused("mixed_temperatures", "turns of one sequence were sampled at different temperatures")
    environment = "unknown" if scored.env_id is None else f"env_{scored.env_id}"
    first = scored.sequences[0]
    start = int(first.trained_T.argmax())
    digest = blake2b(first.tokens_T[:start].tobytes(), digest_size=8).hexdigest()
    problem = Problem(problem_id=f"{environment}/{digest}", messages=(), answer="", environment=environment)
    is_alone = len(scored.sequences) == 1
    return TrajectoryGroup(
        problem=problem,
        trajectories=tuple(
            _trajectory(sequence, record, problem.problem_id, decode, is_alone=is_alone)
            for sequence, record in zip(scored.sequences, records, strict=True)
        ),
    )


def _trajectory(
    sequence: ScoredSequence, record: SamplingRecord, problem_id: str, decode: Decode, *, is_alone: bool
) -> Trajectory:
    """The trajectory up to the last trained token: those after it predict nothing that counts."""
    indices = np.flatnonzero(sequence.trained_T)
    start, end = (int(indices[0]), int(indices[-1]) + 1) if len(indices) else (len(sequence.tokens_T),) * 2
    trained = slice(start, end)
    mask_N = sequence.trained_T[trained]
    tokens = tuple(sequence.tokens_T[trained].tolist())
    return Trajectory(
        problem_id=problem_id,
        prompt_tokens=tuple(sequence.tokens_T[:start].tolist()),
        tokens=tokens,
        loss_mask=tuple(mask_N.tolist()),
        logprobs=tuple(np.where(mask_N, record.logprobs_T[trained], 0.0).tolist()),
        temperature=record.temperature,
        weight_versions=spans_of(record.versions_T[trained], mask_N),
        reward_parts={},
        reward=sequence.score,
        text=decode(tokens),
        finish_reason=record.finish_reason,
        token_advantages=_own_advantages(sequence, trained, is_alone=is_alone),
    )


def _own_advantages(sequence: ScoredSequence, trained: slice, *, is_alone: bool) -> tuple[float, ...] | None:
    """Advantages that do not follow from the scores of the group, as atroposlib's example trainer has them.

    A group of one keeps its score, since there is nothing to compare it with.
    """
    length = trained.stop - trained.start
    if sequence.is_zeroed:
        return (0.0,) * length
    if sequence.is_demonstration:
        return (1.0,) * length
    if sequence.advantages_T is not None:
        return tuple(sequence.advantages_T[trained].tolist())
    return (sequence.score,) * length if is_alone else None


def spans_of(versions_N: np.ndarray, mask_N: np.ndarray) -> tuple[WeightSpan, ...]:
    """The versions of trained tokens, as runs of equal ones."""
    keys_N = np.where(mask_N, versions_N, -1)
    cuts = [0, *(np.flatnonzero(np.diff(keys_N)) + 1).tolist(), len(keys_N)] if len(keys_N) else []
    runs = [(start, end) for start, end in pairwise(cuts) if mask_N[start]]
    return tuple(WeightSpan(version=int(versions_N[start]), start=start, end=end) for start, end in runs)
