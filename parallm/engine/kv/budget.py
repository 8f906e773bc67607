"""The memory budget of keys, values and states: what is held, what may be held, and what could never fit."""

import logging
from collections.abc import Iterable

import mlx.core as mx

from parallm.device.memory import free_memory
from parallm.engine.decode_batch import DecodeBatch
from parallm.engine.kv.cost import KvCost
from parallm.engine.kv.prefix_cache import PrefixCache
from parallm.engine.kv.shapes import allocated
from parallm.engine.request_queue import RequestQueue
from parallm.engine.settings import EngineSettings
from parallm.errors import ConfigError, ContextTooLong
from parallm.model.shared_model import SharedModel
from parallm.types import GenerationRequest

DEVICE_SHARE = 0.4
"""Share of what an accelerator has left beside the base: the learner keeps up to half of that for its backward."""
CPU_SHARE = 0.25
"""Share of the free RAM: other programs need some, and on a CPU time runs out long before keys and values do."""
MAX_DEFAULT_CONTEXT = 8192
"""Models claim up to a million tokens; engine.max_context asks for more than this."""
DEFAULT_ROWS, DEFAULT_CPU_ROWS = 128, 256
"""On a CPU a row takes less time the more there are; see the README. None takes memory before it runs."""
PREFIX_SHARE = 0.5
"""Share of the limit for the prefix cache: running requests get it back at once, but resizing to fit costs copies."""
LOWERED_SHARE = 0.8
"""Share of what was held when memory ran out that may be held from then on."""

logger = logging.getLogger(__name__)


class KvBudget:
    """Adds up what an engine holds. Used on the device thread; any thread may read its numbers."""

    def __init__(self, settings: EngineSettings, cost: KvCost, empty_batch: DecodeBatch) -> None:
        self.cost = cost
        self.limit = settings.kv_cache_bytes or default_limit()
        self.used = 0
        """Bytes held after the engine's last unit."""
        self.prefixes = PrefixCache(int(self.limit * PREFIX_SHARE))
        self._empty_batch = empty_batch

    def held(self, queues: Iterable[RequestQueue]) -> int:
        """Bytes that running sequences and admitted jobs hold now."""
        return sum(
            sum(decoder.batch.nbytes for decoder in queue.decoders) + sum(job.num_bytes for job in queue.admitted())
            for queue in queues
        )

    def total(self, queues: Iterable[RequestQueue]) -> int:
        """`held`, and what the prefix cache holds."""
        return self.held(queues) + self.prefixes.nbytes

    def needed(self, request: GenerationRequest) -> int:
        """Bytes that a sequence of this request takes at most."""
        num_tokens = len(request.prompt_tokens) + request.sampling.max_tokens
        prefill = self.cost.of(allocated(num_tokens))  # all its tokens, if it is preempted near its end
        return prefill + self._empty_batch.bytes_for([num_tokens + 1], end=None)

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

    def lower(self, requests: Iterable[GenerationRequest]) -> bool:
        """Lower the limit below what was held when memory ran out; False if `requests` need more than that."""
        limit = max(int(LOWERED_SHARE * self.used), max(map(self.needed, requests), default=0))
        if limit >= self.limit:
            return False
        logger.warning(
            "memory ran out with %d bytes of keys and values; the limit is %d from now on instead of %d; lower "
            "engine.kv_cache_bytes, or what else is in memory",
            self.used,
            limit,
            self.limit,
        )
        self.limit = limit
        self.prefixes.limit = int(limit * PREFIX_SHARE)
        return True


def max_rows(settings: EngineSettings) -> int:
    """Sequences of a traffic class that decode at the same time."""
    return settings.max_rows or (DEFAULT_CPU_ROWS if mx.default_device() == mx.Device(mx.cpu) else DEFAULT_ROWS)


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
