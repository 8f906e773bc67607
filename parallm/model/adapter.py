"""Adapters. Their versions in memory are in `adapter_table`, files in `adapter_files`; `lora` applies them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

import mlx.core as mx

from parallm.model.adapter_arrays import REWARD_HEAD, Checksums, arrays_digest, check_arrays
from parallm.types import POLICY

Value = TypeVar("Value", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One version of a LoRA or DoRA adapter. Immutable, arrays evaluated; made by `make_adapter`."""

    name: str
    version: int
    parent: int | None
    """The version that this one was trained from."""
    step: int
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    """Sites with another rank than `rank`."""
    alphas: Mapping[str, float]
    """Sites with another alpha than `alpha`; files of PEFT may have them."""
    rslora: bool
    """Scaled by alpha / sqrt(rank) (https://arxiv.org/abs/2312.03732) rather than by alpha / rank."""
    dropout: float
    targets: tuple[str, ...]
    """Module paths of the sites, sorted, e.g. "model.layers.0.self_attn.q_proj"."""
    arrays: Mapping[str, mx.array]
    """`{site}.lora_a` (inputs, rank), `.lora_b` (rank, outputs), for DoRA `.m` (outputs,), and REWARD_HEAD; float32."""
    digest: str
    """Digest of the arrays alone: equal for equal weights, whatever their version."""

    @property
    def is_dora(self) -> bool:
        return f"{self.targets[0]}.m" in self.arrays

    @property
    def scales(self) -> dict[str, float]:
        """Factor of each site's product."""
        ranks = {site: self.ranks.get(site, self.rank) for site in self.targets}
        divisors = {site: math.sqrt(rank) if self.rslora else rank for site, rank in ranks.items()}
        return {site: self.alphas.get(site, self.alpha) / divisor for site, divisor in divisors.items()}

    @property
    def largest_scale(self) -> float:
        return max(self.scales.values())

    @property
    def num_parameters(self) -> int:
        return sum(array.size for array in self.arrays.values())

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def make_adapter(
    arrays: Mapping[str, mx.array],
    *,
    version: int,
    rank: int,
    alpha: float,
    ranks: Mapping[str, int] = MappingProxyType({}),
    alphas: Mapping[str, float] = MappingProxyType({}),
    rslora: bool = False,
    name: str = POLICY,
    parent: int | None = None,
    step: int = 0,
    dropout: float = 0.0,
    checksums: Checksums | None = None,
) -> Adapter:
    """An adapter of `arrays`, which are cast to float32, evaluated and hashed here; float32 arrays are not copied.

    `ranks` and `alphas` are those of sites that differ from `rank` and `alpha`, `checksums` those of float32 `arrays`,
    where they are known. Raises AdapterError if there is no site, if a site lacks an array, or if an array is not of
    its rank, AdapterNotFinite if one holds NaN or infinity, or would with its scale.
    """
    single = {key: arrays[key].astype(mx.float32) for key in sorted(arrays)}
    targets = tuple(sorted({key.rpartition(".")[0] for key in single if key != REWARD_HEAD}))
    check_arrays(targets, single, {site: ranks.get(site, rank) for site in targets})
    mx.eval(single)
    made = Adapter(
        name=name,
        version=version,
        parent=parent,
        step=step,
        rank=rank,
        alpha=float(alpha),
        ranks=_exceptions(ranks, rank, targets),
        alphas=_exceptions(alphas, float(alpha), targets),
        rslora=rslora,
        dropout=float(dropout),
        targets=targets,
        arrays=MappingProxyType(single),
        digest="",
    )
    return replace(made, digest=arrays_digest(single, made.largest_scale, checksums))


def next_version(adapter: Adapter, arrays: Mapping[str, mx.array], checksums: Checksums, step: int) -> Adapter:
    """The version after `adapter`, of the same form, with the arrays that `step` steps have made. Raises
    AdapterNotFinite if one holds NaN or infinity, or would with its scale."""
    return make_adapter(
        arrays,
        name=adapter.name,
        version=adapter.version + 1,
        parent=adapter.version,
        step=step,
        rank=adapter.rank,
        alpha=adapter.alpha,
        ranks=adapter.ranks,
        alphas=adapter.alphas,
        rslora=adapter.rslora,
        dropout=adapter.dropout,
        checksums=checksums,
    )


def _exceptions(values: Mapping[str, Value], usual: Value, targets: tuple[str, ...]) -> Mapping[str, Value]:
    return MappingProxyType({s: values[s] for s in targets if s in values and values[s] != usual})
