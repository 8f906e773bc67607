"""Scores of a reward model: the product of its head with the hidden state of each completion's last token.

Completions of one prompt are computed over one copy of it (`packing`). Work is cut into passes, so that whoever decodes
on the same device never waits long. Axes: M computed tokens, S completions, H hidden.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import mlx.core as mx
import numpy as np

from parallm.device.streams import DeviceStreams
from parallm.learner.passes.packing import Segment, packed_hidden
from parallm.model.adapters.adapter import REWARD_HEAD, Adapter
from parallm.model.lora.dora import lora_scaling
from parallm.model.lora.linear import LoraBinding
from parallm.model.lora.single import single_lora
from parallm.model.shared_model import SharedModel
from parallm.types import ScoringRequest

Pass = list[int]
"""Which items one forward computes, by their places."""


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
        self._view = single_lora(dict(adapter.arrays), lora_scaling(adapter, model))

    def units(self, items: Sequence[ScoringRequest]) -> Iterator[list[float] | None]:
        """Yields None after each round of passes of at most `budget` tokens, and last the scores of all completions."""
        parts = [part for item in items for part in split(item, self._budget)]
        found: dict[int, list[float]] = {}
        passes = make_passes([part.num_tokens for part in parts], self._budget, self._streams.width)
        for start in range(0, len(passes), self._streams.width):
            chosen = passes[start : start + self._streams.width]
            scores = self._streams.run(lambda places: self._scores([parts[place] for place in places]), chosen)
            mx.eval(scores)
            for places, scores_S in zip(chosen, scores, strict=True):
                values = iter(np.array(scores_S).tolist())
                found |= {place: [next(values) for _ in parts[place].completions] for place in places}
            yield None
        yield [score for place in range(len(parts)) for score in found[place]]

    def _scores(self, items: Sequence[ScoringRequest]) -> mx.array:
        return reward_scores(last_hidden(self._model, items, self._view, packs=self._packs), self._head_H)


def reward_scores(hidden_SH: mx.array, head_H: mx.array) -> mx.array:
    """(S,), float32."""
    # no matrix product, whose rounding may depend on the number of rows
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


def split(item: ScoringRequest, budget: int) -> list[ScoringRequest]:
    """`item` in parts of at most `budget` tokens, prompt included; a part has one completion at least."""
    parts: list[list[tuple[int, ...]]] = []
    room = 0
    for tokens in item.completions:
        if not parts or len(tokens) > room:
            parts.append([])
            room = budget - len(item.prompt_tokens)
        parts[-1].append(tokens)
        room -= len(tokens)
    return [ScoringRequest(prompt_tokens=item.prompt_tokens, completions=tuple(part)) for part in parts]


def make_passes(sizes: Sequence[int], budget: int, streams: int) -> list[Pass]:
    """Items of `sizes` tokens in passes of at most `budget`, one item at least, the largest passes first.

    The number of passes is a multiple of `streams` where there are that many items, and they are of similar size.
    """
    needed = -(-sum(sizes) // budget)
    passes: list[Pass] = [[] for _ in range(-(-needed // streams) * streams)]
    filled = [0] * len(passes)
    for place in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        emptiest = min(range(len(passes)), key=lambda one: filled[one])
        if filled[emptiest] and filled[emptiest] + sizes[place] > budget:
            emptiest = len(passes)
            passes += [[] for _ in range(streams)]
            filled += [0] * streams
        passes[emptiest].append(place)
        filled[emptiest] += sizes[place]
    used = [index for index in range(len(passes)) if passes[index]]
    return [passes[index] for index in sorted(used, key=lambda index: -filled[index])]


def _flat(item: ScoringRequest) -> np.ndarray:
    return np.asarray([*item.prompt_tokens, *(token for tokens in item.completions for token in tokens)], np.int32)


def _ends(item: ScoringRequest) -> np.ndarray:
    """Where the last token of each completion stands in `_flat`."""
    lengths = [len(tokens) for tokens in item.completions]
    return len(item.prompt_tokens) + np.cumsum(lengths, dtype=np.int32) - 1


def _segment(item: ScoringRequest) -> Segment:
    if len(item.completions) == 1:
        return Segment(prompt=item.num_tokens)  # to attention one sequence, which has the faster kernels
    return Segment(prompt=len(item.prompt_tokens), runs=tuple((1, len(tokens)) for tokens in item.completions))
