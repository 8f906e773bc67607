"""Names, shapes and digest of the arrays that make an adapter."""

import hashlib
from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from parallm.errors import AdapterError, AdapterNotFinite


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
    known = {f"{site}.{part}" for site in targets for part in ("lora_a", "lora_b", "m")}
    if extra := sorted(set(arrays) - known):
        raise AdapterError(f"{extra[0]} is no adapter array; names end with .lora_a, .lora_b or .m")


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


def check_finite(arrays: Mapping[str, mx.array]) -> None:
    """Raise AdapterNotFinite, naming an array, if one holds NaN or infinity; evaluates the arrays.

    Every version passes here when it is made, so none that holds such values is ever trained on or served.
    """
    if mx.stack([mx.isfinite(array).all() for array in arrays.values()]).all().item():
        return
    broken = next(name for name, array in arrays.items() if not mx.isfinite(array).all().item())
    raise AdapterNotFinite(f"{broken} holds values that are not finite; take an earlier version of the adapter")


def arrays_sha256(arrays: Mapping[str, mx.array]) -> str:
    """Digest over names, shapes and bytes in the order of the names; evaluates the arrays."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        values = np.ascontiguousarray(np.asarray(arrays[name]))
        digest.update(f"{name}{values.shape}".encode())
        digest.update(values.data)
    return digest.hexdigest()
