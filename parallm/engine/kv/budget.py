"""The memory budget of keys, values and states: bytes of a token, the limit, and what could never fit."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import mlx.core as mx

from parallm.device.memory import free_memory
from parallm.engine.kv.shapes import BLOCK, blocks
from parallm.engine.settings import EngineSettings
from parallm.errors import ConfigError, ContextTooLong
from parallm.model.kernels.cuda import on_cuda
from parallm.model.shared_model import SharedModel, leaves
from parallm.types import GenerationRequest

DEVICE_SHARE = 0.4
"""Share of what an accelerator has left beside the base: the learner keeps up to half of that for its backward."""
CPU_SHARE = 0.25
"""Share of the free RAM: other programs need some, and on a CPU time runs out long before keys and values do."""
MAX_DEFAULT_CONTEXT = 8192
"""Models claim up to a million tokens; engine.max_context asks for more than this."""
DEFAULT_ROWS, DEFAULT_CPU_ROWS, MAX_DEFAULT_ROWS = 128, 256, 1024
"""On a CPU a row takes less time the more there are; see the README. None takes memory before it runs."""
TYPICAL_POSITIONS = 1024
"""CUDA decodes at once the sequences of this length that memory holds: small models are bound by launches."""
LOWERED_SHARE = 0.8
"""Share of what was held when memory ran out that may be held from then on."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCost:
    """Bytes of one sequence in a cache of its own."""

    layers: tuple[tuple[int, int | None], ...]
    """(bytes of a position, positions kept at most or None: all), summed over the layers that keep the same number."""
    per_sequence: int
    """Bytes that do not grow: recurrent states."""

    @property
    def per_token(self) -> int:
        return sum(size for size, _ in self.layers)

    def of(self, num_positions: int) -> int:
        """Bytes of a sequence with this many positions, in whole blocks."""
        whole = blocks(num_positions) * BLOCK
        return self.per_sequence + sum(size * min(whole, kept or whole) for size, kept in self.layers)


class KvBudget:
    """The limit of an engine's memory. Used on the device thread; any thread may read its numbers."""

    def __init__(self, settings: EngineSettings, cost: KvCost, bytes_for: Callable[[int], int]) -> None:
        """`bytes_for`: bytes that a sequence of this many tokens takes at most."""
        self.cost = cost
        self.limit = settings.kv_cache_bytes or default_limit()
        self.max_rows = settings.max_rows or default_rows(cost, self.limit)
        """Sequences of a traffic class that decode at the same time."""
        self.used = 0
        """Bytes held after the engine's last unit."""
        self._bytes_for = bytes_for

    def needed(self, request: GenerationRequest) -> int:
        """Bytes that a sequence of this request takes at most."""
        return self._bytes_for(len(request.prompt_tokens) + request.sampling.max_tokens)

    def check(self, request: GenerationRequest) -> None:
        """Raises ContextTooLong for a request that would not fit if it had all memory to itself."""
        if self.needed(request) > self.limit:
            raise ContextTooLong(
                f"the keys and values of {len(request.prompt_tokens)} prompt tokens and max_tokens="
                f"{request.sampling.max_tokens} take {self.needed(request)} bytes; the limit is {self.limit}; "
                "shorten them",
                "max_tokens",
                setting="engine.kv_cache_bytes",
            )

    def lower(self, requests: Iterable[GenerationRequest], num_allocated: int) -> bool:
        """Lower the limit below the bytes that were allocated when memory ran out; False if `requests` need more."""
        limit = max(int(LOWERED_SHARE * num_allocated), max(map(self.needed, requests), default=0))
        if limit >= self.limit:
            return False
        logger.warning(
            "memory ran out with %d bytes of keys and values; the limit is %d from now on instead of %d; lower "
            "engine.kv_cache_bytes, or what else is in memory",
            num_allocated,
            limit,
            self.limit,
        )
        self.limit = limit
        return True


def default_rows(cost: KvCost, limit: int) -> int:
    """Sequences of a traffic class that decode at the same time, where the settings name no number.

    On CUDA it is a power of two, so that a full batch is one of the shapes that a step is compiled for.
    """
    if not on_cuda():
        return DEFAULT_CPU_ROWS if mx.default_device() == mx.Device(mx.cpu) else DEFAULT_ROWS
    fitting = max(limit // max(cost.of(TYPICAL_POSITIONS), 1), 1)
    return min(max(2 ** (fitting.bit_length() - 1), DEFAULT_ROWS), MAX_DEFAULT_ROWS)


def max_context(settings: EngineSettings, model: SharedModel) -> int:
    """Tokens of prompt and completion together. Raises ConfigError for more positions than the model knows."""
    if settings.max_context is None:
        return min(model.max_context, MAX_DEFAULT_CONTEXT)
    if settings.max_context > model.max_context:
        raise ConfigError(
            f"engine.max_context={settings.max_context}: the model knows {model.max_context} positions, and what "
            "it writes after them is noise; lower it, or stretch them by rope_scaling in the model's config.json"
        )
    return settings.max_context


def default_limit() -> int:
    """Bytes for keys and values where the settings name none."""
    share = CPU_SHARE if mx.default_device() == mx.Device(mx.cpu) else DEVICE_SHARE
    return int(share * free_memory())


def measure_cost(model: SharedModel) -> KvCost:
    """Measure the shapes that one token leaves in the model's own caches; evaluates nothing.

    So layers that share their keys and values count once.
    """
    caches = model.make_cache()
    model.hidden(mx.zeros((1, 1), mx.int32), caches, None)
    layers: Counter[int | None] = Counter()
    per_sequence = 0
    for cache in leaves(caches):
        keys = _arrays(getattr(cache, "keys", None))
        if keys:
            # mlx-lm allocates ahead, which is no cost of a position
            total = sum(array.nbytes for array in keys + _arrays(cache.values))
            layers[getattr(cache, "max_size", None)] += total // keys[0].shape[2]
        else:
            per_sequence += sum(array.nbytes for array in _arrays(cache.state))
    return KvCost(layers=tuple((size, kept) for kept, size in layers.items()), per_sequence=per_sequence)


def _arrays(part: object) -> list[mx.array]:
    if isinstance(part, mx.array):
        return [part]
    return [array for item in part for array in _arrays(item)] if isinstance(part, list | tuple) else []
