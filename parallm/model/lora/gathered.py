"""LoRA of rows that use any number of adapters: their weights in stacks, and a product for each row (as BGMV).

Axes: B rows, T tokens, S stacked adapters, I input, R rank, O output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from parallm.model.attention import at_least_rows
from parallm.model.lora.single import SingleLora, padded


@dataclass(frozen=True, slots=True)
class GatheredLora:
    """Row b uses the adapter at `index_B[b]` of the stacks; a stack entry of zeros is the base."""

    a_SIR: Mapping[str, mx.array]
    b_SRO: Mapping[str, mx.array]
    dora_scale_SO: Mapping[str, mx.array]
    index_B: mx.array

    def apply(self, target: str, x: mx.array, y: mx.array) -> mx.array:
        if target not in self.a_SIR:
            return y
        rows = at_least_rows(x.astype(mx.float32), axis=1)  # the only type that a CPU's gather_mm knows
        hidden = mx.gather_mm(rows, self.a_SIR[target], rhs_indices=self.index_B)
        return y + mx.gather_mm(hidden, self.b_SRO[target], rhs_indices=self.index_B)[:, : x.shape[1]].astype(y.dtype)

    def dora_scale(self, target: str) -> mx.array | None:
        return self.dora_scale_SO[target][self.index_B][:, None] if target in self.dora_scale_SO else None


def stack_loras(adapters: Sequence[SingleLora | None], targets: Mapping[str, tuple[int, int]]) -> GatheredLora:
    """Stack adapters (None: the base) for `GatheredLora`; ranks are padded with zeros. `index_B` is empty."""
    present = [adapter for adapter in adapters if adapter is not None]
    stacks_a: dict[str, mx.array] = {}
    stacks_b: dict[str, mx.array] = {}
    scales: dict[str, mx.array] = {}
    for target, (inputs, outputs) in targets.items():
        rank = max((adapter.a_IR[target].shape[1] for adapter in present if target in adapter.a_IR), default=0)
        if rank:
            no_a, no_b = mx.zeros((inputs, rank)), mx.zeros((rank, outputs))
            all_a = [padded(a.a_IR.get(target, no_a) if a else no_a, 1, 0, rank) for a in adapters]
            all_b = [padded(a.b_RO.get(target, no_b) if a else no_b, 0, 0, rank) for a in adapters]
            stacks_a[target] = mx.stack(all_a).astype(mx.float32)
            stacks_b[target] = mx.stack(all_b).astype(mx.float32)
        if any(target in adapter.dora_scale_O for adapter in present):
            none = mx.zeros((outputs,))
            scales[target] = mx.stack([a.dora_scale_O.get(target, none) if a else none for a in adapters])
    return GatheredLora(stacks_a, stacks_b, scales, mx.zeros((0,), mx.uint32))
