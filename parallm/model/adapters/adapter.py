"""`Adapter`: one version of LoRA or DoRA weights, what its arrays must be, and their digest.

Versions in memory are in `table.py`, files in `files.py`; `lora/` applies adapters.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

import mlx.core as mx

from parallm.errors import AdapterError, AdapterNotFinite
from parallm.types import POLICY, TaskSpec

Value = TypeVar("Value", int, float)
Key = tuple[str, int]
"""Name and version."""

CHECKSUM_FACTORS = (0x9E3779B1, 0x85EBCA77)
REWARD_HEAD = "reward_head"
"""Array of a reward model, (hidden,): a completion's score is its product with the hidden state of the last token."""
HEAD = "head"
"""Array of an adapter that scores or classifies texts, (labels, hidden); `Adapter.task` names the labels."""
HEADS = frozenset({REWARD_HEAD, HEAD})
REWARD = TaskSpec(task="score", pooling=("last",), source="learner=reward_model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksums:
    """The values of all arrays, as `arrays_digest` needs them."""

    sums: mx.array
    """(2,) uint32."""
    is_finite: mx.array
    """Whether all values are finite, also times the adapter's largest scale and in bfloat16."""


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
    """Targets with another rank than `rank`."""
    alphas: Mapping[str, float]
    """Targets with another alpha than `alpha`; files of PEFT may have them."""
    rslora: bool
    """Scaled by alpha / sqrt(rank) (https://arxiv.org/abs/2312.03732) rather than by alpha / rank."""
    dropout: float
    targets: tuple[str, ...]
    """Module paths, sorted, e.g. "model.layers.0.self_attn.q_proj"."""
    arrays: Mapping[str, mx.array]
    """`{target}.lora_a` (inputs, rank), `.lora_b` (rank, outputs), for experts with their number before, for DoRA `.m`
    (outputs,); of `HEADS`; float32."""
    digest: str
    """Digest of the arrays alone: equal for equal weights, whatever their version."""
    task: TaskSpec | None = None
    """What it makes of texts, as its files say; None: it writes text, or is a reward model."""

    @property
    def spec(self) -> TaskSpec | None:
        """What it makes of texts; None: it writes text."""
        return REWARD if self.task is None and REWARD_HEAD in self.arrays else self.task

    @property
    def head(self) -> mx.array | None:
        """The head (labels, hidden), if it has one."""
        reward_head_H = self.arrays.get(REWARD_HEAD)
        return self.arrays.get(HEAD) if reward_head_H is None else reward_head_H[None]

    @property
    def key(self) -> Key:
        return self.name, self.version

    @property
    def is_dora(self) -> bool:
        return f"{self.targets[0]}.m" in self.arrays

    @property
    def scales(self) -> dict[str, float]:
        """Factor of each target's product."""
        ranks = {target: self.ranks.get(target, self.rank) for target in self.targets}
        divisors = {target: math.sqrt(rank) if self.rslora else rank for target, rank in ranks.items()}
        return {target: self.alphas.get(target, self.alpha) / divisor for target, divisor in divisors.items()}

    @property
    def max_scale(self) -> float:
        return max(self.scales.values())

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

    `ranks` and `alphas` are for targets that differ from `rank` and `alpha`; `checksums` are those of float32 `arrays`,
    where known. Raises AdapterError if there is no target, if a target lacks an array, or if an array is not of its
    rank, AdapterNotFinite if one holds NaN or infinity, or would with its scale.
    """
    adapter = Adapter(
        name=name,
        version=version,
        parent=parent,
        step=step,
        rank=rank,
        alpha=float(alpha),
        ranks=ranks,
        alphas=alphas,
        rslora=rslora,
        dropout=float(dropout),
        targets=(),
        arrays=arrays,
        digest="",
    )
    return _checked(adapter, checksums)


def next_version(adapter: Adapter, arrays: Mapping[str, mx.array], checksums: Checksums, step: int) -> Adapter:
    """The version after `adapter`, of the same form, with the arrays after `step` steps. Raises AdapterNotFinite."""
    version, parent = adapter.version + 1, adapter.version
    return with_arrays(adapter, arrays, version=version, parent=parent, step=step, checksums=checksums)


def with_arrays(
    adapter: Adapter,
    arrays: Mapping[str, mx.array],
    *,
    version: int,
    parent: int | None = None,
    step: int = 0,
    checksums: Checksums | None = None,
) -> Adapter:
    """An adapter of the same name and form as `adapter`; see `make_adapter`."""
    return _checked(replace(adapter, version=version, parent=parent, step=step, arrays=arrays), checksums)


def _checked(adapter: Adapter, checksums: Checksums | None) -> Adapter:
    single = {key: adapter.arrays[key].astype(mx.float32) for key in sorted(adapter.arrays)}
    targets = tuple(sorted({key.rpartition(".")[0] for key in single if key not in HEADS}))
    check_arrays(targets, single, {target: adapter.ranks.get(target, adapter.rank) for target in targets})
    mx.eval(single)
    made = replace(
        adapter,
        targets=targets,
        arrays=MappingProxyType(single),
        ranks=_exceptions(adapter.ranks, adapter.rank, targets),
        alphas=_exceptions(adapter.alphas, adapter.alpha, targets),
    )
    return replace(made, digest=arrays_digest(single, made.max_scale, checksums))


def _exceptions(values: Mapping[str, Value], usual: Value, targets: tuple[str, ...]) -> Mapping[str, Value]:
    return MappingProxyType({s: values[s] for s in targets if s in values and values[s] != usual})


def check_arrays(targets: tuple[str, ...], arrays: Mapping[str, mx.array], ranks: Mapping[str, int]) -> None:
    """Raise AdapterError unless `arrays` are those of an adapter on `targets`, each of its rank in `ranks`."""
    if not targets:
        raise AdapterError("an adapter needs at least one target")
    for target in targets:
        _check_target(target, arrays, ranks[target])
    scaled = [target for target in targets if f"{target}.m" in arrays]
    if scaled and len(scaled) < len(targets):
        lacking = next(target for target in targets if f"{target}.m" not in arrays)
        raise AdapterError(f"{lacking} lacks its magnitudes m, which {len(scaled)} other targets have (DoRA)")
    names = {f"{target}.{part}" for target in targets for part in ("lora_a", "lora_b", "m")} | HEADS
    if extra := sorted(set(arrays) - names):
        raise AdapterError(f"{extra[0]} is no adapter array; names end with .lora_a, .lora_b or .m")
    for name, ndim, axes in ((REWARD_HEAD, 1, "(hidden,)"), (HEAD, 2, "(labels, hidden)")):
        if name in arrays and arrays[name].ndim != ndim:
            raise AdapterError(f"{name} has shape {arrays[name].shape}; it must be {axes}")


def _check_target(target: str, arrays: Mapping[str, mx.array], rank: int) -> None:
    a, b = arrays.get(f"{target}.lora_a"), arrays.get(f"{target}.lora_b")
    if a is None or b is None:
        raise AdapterError(f"{target} lacks its {'lora_a' if a is None else 'lora_b'}")
    is_matrix = a.ndim == b.ndim and a.ndim in (2, 3) and a.shape[:-2] == b.shape[:-2]
    if not is_matrix or a.shape[-1] != rank or b.shape[-2] != rank:
        raise AdapterError(
            f"{target} has lora_a {a.shape}, lora_b {b.shape}; rank {rank} needs (inputs, {rank}) and ({rank}, outputs)"
            ", for experts with their number before"
        )
    m = arrays.get(f"{target}.m")
    if m is not None and (a.ndim != 2 or m.shape != b.shape[1:]):
        raise AdapterError(f"{target} has {b.shape[-1]} outputs and magnitudes m of shape {m.shape}")


def checksums(arrays: Mapping[str, mx.array], scale: float = 1.0) -> Checksums:
    """Checksums of all values in the order of the names; `scale` is the adapter's largest. Not evaluated.

    They are computed where the arrays are: reading them all would move them out of a GPU's memory. Each is the sum
    modulo 2^32 of MurmurHash3's finalizer (https://github.com/aappleby/smhasher) over a value's bits and index.
    """
    # one operation on all values is faster than one on each array
    values_N = mx.concatenate([arrays[name].reshape(-1).astype(mx.float32) for name in sorted(arrays)])
    index_N = mx.arange(values_N.size, dtype=mx.uint32)
    sums = mx.stack([_mixed(values_N.view(mx.uint32) ^ (index_N * factor)).sum() for factor in CHECKSUM_FACTORS])
    return Checksums(sums=sums, is_finite=_are_finite(values_N, scale).all())


def arrays_digest(arrays: Mapping[str, mx.array], scale: float = 1.0, computed: Checksums | None = None) -> str:
    """SHA-256 over the names, the shapes and the checksums of `arrays`, if they were `computed` before.

    Raises AdapterNotFinite, naming an array, if one holds NaN or infinity, or values that the adapter's largest `scale`
    makes infinite: rows of several versions share products, in which an infinite factor would reach the others.
    """
    computed = computed or checksums(arrays, scale)
    mx.eval(computed.sums, computed.is_finite)
    names = sorted(arrays)
    if not computed.is_finite.item():
        broken = next(name for name in names if not _are_finite(arrays[name], scale).all().item())
        if mx.isfinite(arrays[broken]).all().item():
            raise AdapterNotFinite(
                f"{broken} times the adapter's largest scale {scale:g} is more than float32 and bfloat16 hold (3.4e38)"
            )
        raise AdapterNotFinite(f"{broken} holds values that are not finite; take an earlier version of the adapter")
    shapes = [(name, arrays[name].shape) for name in names]
    return hashlib.sha256(f"{shapes} {computed.sums.tolist()}".encode()).hexdigest()


def _are_finite(values: mx.array, scale: float) -> mx.array:
    # 1%: bfloat16 rounds to infinity a little below the largest float32
    return mx.isfinite(values * (1.01 * max(scale, 1.0)))


def _mixed(bits_N: mx.array) -> mx.array:
    bits_N = (bits_N ^ (bits_N >> 16)) * 0x85EBCA6B
    bits_N = (bits_N ^ (bits_N >> 13)) * 0xC2B2AE35
    return bits_N ^ (bits_N >> 16)
