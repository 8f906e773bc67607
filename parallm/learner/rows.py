"""Sums over the tokens of each sequence, and back. Axes: S sequences, N tokens of any of them."""

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Rows:
    """Which trained tokens belong to which sequence: a bool matrix, since a scatter's sums have no order on a GPU."""

    members_SN: mx.array

    def sums(self, values_N: mx.array) -> mx.array:
        """(S,). What stands at other tokens does not matter, not even if it is not finite."""
        return mx.where(self.members_SN, values_N[None], 0.0).sum(axis=1)

    def means(self, values_N: mx.array) -> mx.array:
        """(S,); 0 for a sequence without trained tokens."""
        return self.sums(values_N) / mx.maximum(self.members_SN.sum(axis=1), 1)

    def spread(self, values_S: mx.array) -> mx.array:
        """Each token's is its sequence's, (N,); 0 at tokens that are not trained."""
        return mx.where(self.members_SN, values_S[:, None], 0.0).sum(axis=0)


def rows_of(rows_N: mx.array, trained_N: mx.array, num_rows: int) -> Rows:
    """`rows_N` holds each token's sequence, `trained_N` is True where the token counts."""
    return Rows((rows_N[None] == mx.arange(num_rows)[:, None]) & trained_N[None])
