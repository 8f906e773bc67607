"""Names, shapes and digest of the arrays that make an adapter."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from parallm.errors import AdapterError, AdapterNotFinite

REWARD_HEAD = "reward_head"
"""Of a reward model, (hidden,): a completion's score is its product with the hidden state of the last token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksums:
    """What `arrays_digest` must know of the values of all arrays."""

    sums: mx.array
    """(2,) uint32."""
    is_finite: mx.array
    """Also times the largest scale of the adapter, and in bfloat16."""


def check_arrays(targets: tuple[str, ...], arrays: Mapping[str, mx.array], ranks: Mapping[str, int]) -> None:
    """Raise AdapterError unless `arrays` are those of an adapter on `targets`, each of its rank in `ranks`."""
    if not targets:
        raise AdapterError("an adapter needs at least one site")
    for site in targets:
        _check_site(site, arrays, ranks[site])
    stretched = [site for site in targets if f"{site}.m" in arrays]
    if stretched and len(stretched) < len(targets):
        lacking = next(site for site in targets if f"{site}.m" not in arrays)
        raise AdapterError(f"{lacking} lacks its magnitudes m, which {len(stretched)} other sites have (DoRA)")
    known = {f"{site}.{part}" for site in targets for part in ("lora_a", "lora_b", "m")} | {REWARD_HEAD}
    if extra := sorted(set(arrays) - known):
        raise AdapterError(f"{extra[0]} is no adapter array; names end with .lora_a, .lora_b or .m")
    head = arrays.get(REWARD_HEAD)
    if head is not None and head.ndim != 1:
        raise AdapterError(f"{REWARD_HEAD} has shape {head.shape}; it must be one number for each hidden one")


def _check_site(site: str, arrays: Mapping[str, mx.array], rank: int) -> None:
    a, b = arrays.get(f"{site}.lora_a"), arrays.get(f"{site}.lora_b")
    if a is None or b is None:
        raise AdapterError(f"{site} lacks its {'lora_a' if a is None else 'lora_b'}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != rank or b.shape[0] != rank:
        raise AdapterError(
            f"{site} has lora_a {a.shape}, lora_b {b.shape}; rank {rank} needs (inputs, {rank}) and ({rank}, outputs)"
        )
    m = arrays.get(f"{site}.m")
    if m is not None and m.shape != b.shape[1:]:
        raise AdapterError(f"{site} has {b.shape[1]} outputs and magnitudes m of shape {m.shape}")


def checksums(arrays: Mapping[str, mx.array], scale: float = 1.0) -> Checksums:
    """Of all values in the order of the names; `scale` is the largest of the adapter's. Not evaluated.

    They are worked out where the arrays are: reading them all would move them out of a GPU's memory. Each is the sum
    modulo 2^32 of MurmurHash3's finalizer (https://github.com/aappleby/smhasher) over a value's bits and place.
    """
    # one operation on all values is faster than one on each array
    values_N = mx.concatenate([arrays[name].reshape(-1).astype(mx.float32) for name in sorted(arrays)])
    places_N = mx.arange(values_N.size, dtype=mx.uint32)
    sums = mx.stack([_mixed(values_N.view(mx.uint32) ^ (places_N * factor)).sum() for factor in _FACTORS])
    return Checksums(sums=sums, is_finite=_are_finite(values_N, scale).all())


def arrays_digest(arrays: Mapping[str, mx.array], scale: float = 1.0, found: Checksums | None = None) -> str:
    """SHA-256 over the names, the shapes and the checksums of `arrays`, which are `found` if they are known.

    Raises AdapterNotFinite, naming an array, if one holds NaN or infinity, or values that the adapter's largest `scale`
    makes infinite. Every version passes here when it is made, so none that holds such values is ever trained on or
    served: rows of several versions share products, in which an infinite factor would reach the others.
    """
    found = found or checksums(arrays, scale)
    mx.eval(found.sums, found.is_finite)
    names = sorted(arrays)
    if not found.is_finite.item():
        broken = next(name for name in names if not _are_finite(arrays[name], scale).all().item())
        if mx.isfinite(arrays[broken]).all().item():
            raise AdapterNotFinite(
                f"{broken} times the adapter's largest scale {scale:g} is more than float32 and bfloat16 hold (3.4e38)"
            )
        raise AdapterNotFinite(f"{broken} holds values that are not finite; take an earlier version of the adapter")
    shapes = [(name, arrays[name].shape) for name in names]
    return hashlib.sha256(f"{shapes} {found.sums.tolist()}".encode()).hexdigest()


_FACTORS = (0x9E3779B1, 0x85EBCA77)


def _are_finite(values: mx.array, scale: float) -> mx.array:
    # 1%: bfloat16 rounds to infinity a little below the largest float32
    return mx.isfinite(values * (1.01 * max(scale, 1.0)))


def _mixed(bits_N: mx.array) -> mx.array:
    bits_N = (bits_N ^ (bits_N >> 16)) * 0x85EBCA6B
    bits_N = (bits_N ^ (bits_N >> 13)) * 0xC2B2AE35
    return bits_N ^ (bits_N >> 16)
