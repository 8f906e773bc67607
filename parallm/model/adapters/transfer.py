"""One adapter version as the bytes of a safetensors file, to be sent to another process and back.

The arrays are those in memory, so the digest is the same at both ends; all that is no array stands in the metadata.
"""

import io
import json
from collections.abc import Mapping
from typing import Any, cast

import mlx.core as mx

from parallm.errors import AdapterError
from parallm.model.adapters.adapter import Adapter, make_adapter
from parallm.model.adapters.files import check_fit
from parallm.model.lora.targets import Shape

HEAD = "adapter"
"""Name in the metadata of what is no array, as JSON."""
FIELDS = ("name", "version", "parent", "step", "rank", "alpha", "ranks", "alphas", "rslora", "dropout")


def to_bytes(adapter: Adapter) -> bytes:
    """Return the safetensors file of `adapter`. Runs on the device thread."""
    fields = {name: getattr(adapter, name) for name in FIELDS}
    head = {**fields, "ranks": dict(adapter.ranks), "alphas": dict(adapter.alphas), "digest": adapter.digest}
    file = io.BytesIO()
    mx.save_safetensors(file, dict(sorted(adapter.arrays.items())), {HEAD: json.dumps(head)})
    return file.getvalue()


def from_bytes(content: bytes, targets: Mapping[str, Shape]) -> Adapter:
    """Undo `to_bytes`; the digest is computed from the arrays that have come. Runs on the device thread.

    `targets` are those of the base. Raises AdapterError if the arrays are not those that were sent, or
    do not fit `targets`.
    """
    try:
        loaded = mx.load(io.BytesIO(content), format="safetensors", return_metadata=True)
        arrays, metadata = cast(tuple[dict[str, mx.array], dict[str, str]], loaded)
        head: dict[str, Any] = json.loads(metadata[HEAD])
        digest = head.pop("digest")
        adapter = make_adapter(arrays, **head)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise AdapterError(f"the bytes are no adapter version: {error!r}") from error
    if adapter.digest != digest:
        raise AdapterError(
            f"{adapter.name}@{adapter.version} has the digest {adapter.digest[:12]} here, it was sent with "
            f"{digest[:12]}: its arrays have changed on the way"
        )
    check_fit(adapter, targets)
    return adapter
