"""Prompts and their completions as one flat sequence of tokens: what a packed forward computes.

Linear layers, norms and rotary embeddings see every token as a row of its own, so nothing of them is padding and one
product serves all. Only attention knows which tokens belong together: a prompt is computed once, and the completions
of its group read its keys and values. Gradients flow back into the prompt through them.

Axes: M computed tokens, G completions, T longest of their inputs, P prompt tokens, H key-value heads, Q query heads,
D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx
import numpy as np

from parallm.model.attention import LEAST_ROWS, OwnCache, attention
from parallm.model.lora import View
from parallm.model.shared_model import SharedModel

FUSED_LENGTH = 128
"""MLX's CUDA build differentiates attention without keeping the scores only for multiples of this many queries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One prompt and its completions, in runs of `count` rows of `length` inputs: rectangles of similar length."""

    prompt: int
    runs: tuple[tuple[int, int], ...] = ()

    @property
    def sizes(self) -> list[int]:
        """Tokens of the prompt and of each run, in the order of the flat sequence."""
        return [self.prompt, *(count * length for count, length in self.runs)]

    def positions(self) -> list[np.ndarray]:
        """Where each token stands in its own row's sequence."""
        behind = [np.tile(np.arange(self.prompt, self.prompt + length), count) for count, length in self.runs]
        return [np.arange(self.prompt), *behind]


@dataclass(frozen=True, slots=True)
class Window:
    """Stands for a mask: a token sees itself and the `size` - 1 tokens before it."""

    size: int


class PackedLayer(OwnCache):
    """What a layer takes for its cache: keeps nothing, and attends within each segment."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self.offset = mx.array(np.concatenate([part for one in segments for part in one.positions()]).astype(np.int32))

    def make_mask(self, _: int, return_array: bool = False, window_size: int | None = None) -> Window | None:
        assert not return_array, "a model that computes with masks cannot be packed"
        return None if window_size is None else Window(window_size)

    def update_and_fetch(self, keys_MH1D: mx.array, values_MH1D: mx.array) -> tuple[mx.array, mx.array]:
        return keys_MH1D, values_MH1D

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: mx.array | str | Window | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Queries (M, Q, 1, D), keys and values (M, H, 1, D) -> (M, Q, 1, D)."""
        window = mask.size if isinstance(mask, Window) else None
        cuts = list(accumulate(size for segment in self._segments for size in segment.sizes))[:-1]
        parts = zip(*(mx.split(array[:, :, 0], cuts) for array in (queries, keys, values)), strict=True)
        found: list[mx.array] = []
        for segment in self._segments:
            rows = _Rows(*(_as_rows(part, 1) for part in next(parts)))
            found.append(_flat(rows.attend(rows.keys, rows.values, scale, window, sinks)))
            for count, _ in segment.runs:
                run = _Rows(*(_as_rows(part, count) for part in next(parts)))
                keys_GHLD, values_GHLD = _behind(rows.keys, run.keys), _behind(rows.values, run.values)
                found.append(_flat(run.attend(keys_GHLD, values_GHLD, scale, window, sinks)))
        return mx.concatenate(found)[:, :, None]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one length: queries (G, Q, T, D), keys and values (G, H, T, D)."""

    queries: mx.array
    keys: mx.array
    values: mx.array

    def attend(
        self, keys_GHLD: mx.array, values_GHLD: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        """Each query sees the positions up to its own, which is counted from the last one back."""
        length, positions = self.queries.shape[2], keys_GHLD.shape[2]
        mask: mx.array | str = "causal"
        if window is not None and window < positions:
            distance = mx.arange(positions - length, positions)[:, None] - mx.arange(positions)[None]
            mask = (distance >= 0) & (distance < window)
        if isinstance(mask, str) and mx.default_device() != mx.Device(mx.cpu):
            fused = self._squared(keys_GHLD, values_GHLD)
            found = attention(fused.queries, fused.keys, fused.values, scale=scale, mask=mask, sinks=sinks)
            return found[:, :, positions - length : positions]
        return attention(self.queries, keys_GHLD, values_GHLD, scale=scale, mask=mask, sinks=sinks)

    def _squared(self, keys_GHLD: mx.array, values_GHLD: mx.array) -> "_Rows":
        """As many queries as keys, a multiple of FUSED_LENGTH of both, so that a GPU has a fused gradient.

        Queries before the row's own are of no use; keys behind it are seen by no query of the row.
        """
        length, positions = self.queries.shape[2], keys_GHLD.shape[2]
        behind = -positions % FUSED_LENGTH
        return _Rows(
            _padded(self.queries, positions - length, behind),
            _padded(keys_GHLD, 0, behind),
            _padded(values_GHLD, 0, behind),
        )


def packed_hidden(model: SharedModel, inputs_M: mx.array, segments: Sequence[Segment], view: View | None) -> mx.array:
    """Hidden states (M, hidden) of a flat sequence that `segments` describe."""
    missing = LEAST_ROWS - inputs_M.size
    if missing > 0:  # a product of fewer rows would round differently from the engine's
        inputs_M = mx.concatenate([inputs_M, mx.zeros((missing,), mx.int32)])
        segments = [*segments, Segment(prompt=missing)]
    layer = PackedLayer(segments)
    hidden_M1H = model.hidden(inputs_M[:, None], [layer] * len(model.make_cache()), view)
    return hidden_M1H[: hidden_M1H.shape[0] - max(0, missing), 0]


def can_pack(model: SharedModel) -> bool:
    """Whether a packed forward gives the model's own hidden states: tried with a few tokens.

    It does where layers mix tokens by `scaled_dot_product_attention` alone. Some add position scores of their own
    (multi-head latent attention) or keep a state.
    """
    if not model.batches_exactly:
        return False
    prompt, completions = [3, 1, 4, 1, 5], [[9, 2], [6, 5]]
    inputs = mx.array(prompt + [token for one in completions for token in one])
    try:
        packed = packed_hidden(model, inputs, [Segment(prompt=len(prompt), runs=((2, 2),))], None)
        whole = [model.hidden(mx.array([prompt + one]), model.make_cache(), None)[0] for one in completions]
        expected = mx.concatenate([whole[0], whole[1][len(prompt) :]])
        difference = mx.linalg.norm((packed - expected).astype(mx.float32)) / mx.linalg.norm(expected)
        return float(difference.item()) < (1e-3 if model.dtype == mx.float32 else 3e-2)
    except (AssertionError, AttributeError, TypeError, ValueError):  # shapes or masks that a layer does not understand
        return False


def _as_rows(flat: mx.array, count: int) -> mx.array:
    """(G*T, heads, D) -> (G, heads, T, D)."""
    return flat.reshape(count, -1, *flat.shape[1:]).swapaxes(1, 2)


def _flat(rows: mx.array) -> mx.array:
    """(G, heads, T, D) -> (G*T, heads, D)."""
    return rows.swapaxes(1, 2).reshape(-1, rows.shape[1], rows.shape[3])


def _padded(rows: mx.array, before: int, behind: int) -> mx.array:
    return mx.pad(rows, [(0, 0), (0, 0), (before, behind), (0, 0)]) if before or behind else rows


def _behind(shared_1HPD: mx.array, own_GHTD: mx.array) -> mx.array:
    repeated = mx.broadcast_to(shared_1HPD, (own_GHTD.shape[0], *shared_1HPD.shape[1:]))
    return mx.concatenate([repeated, own_GHTD], axis=2)
