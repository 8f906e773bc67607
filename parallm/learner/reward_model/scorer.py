"""Scores of a reward model: its head times the hidden state of each completion's last token.

`RewardLearner` and rollouts call it. Completions share one copy of their prompt (`packing`). Work is cut into passes,
so that decoding on the same device never waits long. Axes: M computed tokens, S completions, H hidden.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import mlx.core as mx
import numpy as np

from parallm.device.streams import DeviceStreams
from parallm.learner.passes.batch import make_passes
from parallm.learner.passes.packing import Segment, packed_hidden
from parallm.model.adapters.adapter import REWARD_HEAD, Adapter
from parallm.model.lora.dora import lora_scaling
from parallm.model.lora.linear import LoraBinding
from parallm.model.lora.single import single_lora
from parallm.model.shared_model import SharedModel
from parallm.types import ScoringRequest, TrajectoryGroup


def to_scoring_request(group: TrajectoryGroup) -> ScoringRequest:
    """The prompt and completions of a group."""
    return ScoringRequest(
        prompt_tokens=group.trajectories[0].prompt_tokens,
        completions=tuple(trajectory.tokens for trajectory in group.trajectories),
    )


class RewardScorer:
    """Scores with one version of a reward model, on the shared base. Made and used on the device thread."""

    def __init__(
        self, model: SharedModel, streams: DeviceStreams, adapter: Adapter, *, budget: int, packs: bool
    ) -> None:
        self._model = model
        self._streams = streams
        self._budget = budget
        self._packs = packs
        self._head_H = adapter.arrays[REWARD_HEAD]
        self._lora = single_lora(dict(adapter.arrays), lora_scaling(adapter, model))

    def units(self, items: Sequence[ScoringRequest]) -> Iterator[list[float] | None]:
        """Score in passes of at most `budget` tokens. Yields None after each round, all scores last."""
        parts = [part for item in items for part in split_completions(item, self._budget)]
        scores_of_part: dict[int, list[float]] = {}
        passes = make_passes([part.num_tokens for part in parts], self._budget, self._streams.width)
        for start in range(0, len(passes), self._streams.width):
            chosen = passes[start : start + self._streams.width]
            scores = self._streams.run(lambda indices: self._scores([parts[index] for index in indices]), chosen)
            mx.eval(scores)
            for indices, scores_S in zip(chosen, scores, strict=True):
                values = iter(np.array(scores_S).tolist())
                scores_of_part |= {index: [next(values) for _ in parts[index].completions] for index in indices}
            yield None
        yield [score for index in range(len(parts)) for score in scores_of_part[index]]

    def _scores(self, items: Sequence[ScoringRequest]) -> mx.array:
        return reward_scores(last_hidden(self._model, items, self._lora, packs=self._packs), self._head_H)


def reward_scores(hidden_SH: mx.array, head_H: mx.array) -> mx.array:
    """Scores (S,), float32."""
    # no matrix product: its rounding may depend on the number of rows
    return (hidden_SH.astype(mx.float32) * head_H).sum(axis=-1)


def last_hidden(
    model: SharedModel, items: Sequence[ScoringRequest], lora: LoraBinding | None, *, packs: bool
) -> mx.array:
    """Hidden states (S, H) of the last token of each completion, in the order of the items."""
    if not packs:
        rows = [(*item.prompt_tokens, *tokens) for item in items for tokens in item.completions]
        return mx.stack([model.hidden(mx.array([row]), None, lora)[0, -1] for row in rows])
    tokens_M = np.concatenate([_flat(item) for item in items])
    starts = accumulate((item.num_tokens for item in items), initial=0)
    last_S = np.concatenate([start + _ends(item) for start, item in zip(starts, items, strict=False)])
    return packed_hidden(model, mx.array(tokens_M), [_segment(item) for item in items], lora)[mx.array(last_S)]


def split_completions(item: ScoringRequest, budget: int) -> list[ScoringRequest]:
    """`item` in parts of at most `budget` tokens, prompt included, with at least one completion each."""
    parts: list[list[tuple[int, ...]]] = []
    free = 0
    for tokens in item.completions:
        if not parts or len(tokens) > free:
            parts.append([])
            free = budget - len(item.prompt_tokens)
        parts[-1].append(tokens)
        free -= len(tokens)
    return [ScoringRequest(prompt_tokens=item.prompt_tokens, completions=tuple(part)) for part in parts]


def _flat(item: ScoringRequest) -> np.ndarray:
    return np.asarray([*item.prompt_tokens, *(token for tokens in item.completions for token in tokens)], np.int32)


def _ends(item: ScoringRequest) -> np.ndarray:
    """Index in `_flat` of the last token of each completion."""
    lengths = [len(tokens) for tokens in item.completions]
    return len(item.prompt_tokens) + np.cumsum(lengths, dtype=np.int32) - 1


def _segment(item: ScoringRequest) -> Segment:
    if len(item.completions) == 1:
        return Segment(prompt=item.num_tokens)  # one sequence has faster attention kernels
    return Segment(prompt=len(item.prompt_tokens), runs=tuple((1, len(tokens)) for tokens in item.completions))
