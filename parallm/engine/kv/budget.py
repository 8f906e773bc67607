"""The memory of keys, values and states: what is held, what may be held, and what could never fit."""

import logging
from collections.abc import Iterable

import mlx.core as mx

from parallm.device.memory import free_memory
from parallm.engine.decode_batch import DecodeBatchFactory
from parallm.engine.kv.cost import KvCost, format_for, measure_cost
from parallm.engine.kv.prefix_cache import PrefixCache
from parallm.engine.kv.shapes import allocated
from parallm.engine.request_queue import RequestQueue
from parallm.engine.settings import EngineSettings
from parallm.errors import ConfigError, ContextTooLong
from parallm.model.shared_model import SharedModel
from parallm.types import GenerationRequest

DEVICE_SHARE = 0.4
"""Of what an accelerator has left beside the base: the learner keeps up to half of it for its backward."""
CPU_SHARE = 0.25
"""Of the free RAM: other programs live there too, and on a CPU time runs out long before keys and values do."""
MAX_DEFAULT_CONTEXT = 8192
"""Models claim up to a million tokens; more than this is asked for by engine.max_context."""
ROWS, CPU_ROWS = 128, 256
"""On a CPU a row takes less time the more there are; see the README. None takes memory before it runs."""
PREFIX_SHARE = 0.5
"""Of the limit, for what other prompts may begin with: rows get it back at once, but tight pools cost copies."""
LOWERED_SHARE = 0.8
"""Of what was held when memory ran out: what may be held from then on."""

logger = logging.getLogger(__name__)


class KvBudget:
    """Adds up what the rows and prompts of an engine hold. Used on the device thread; its numbers from any."""

    def __init__(self, model: SharedModel, settings: EngineSettings) -> None:
        """Raises ConfigError where the settings do not fit the model or the device."""
        kv_format = format_for(model, settings.kv_bits)
        self.cost: KvCost = measure_cost(model)
        self.limit = settings.kv_cache_bytes or default_limit()
        self.used = 0
        """As of the engine's last unit."""
        self.prefixes = PrefixCache(int(self.limit * PREFIX_SHARE))
        self.batch = DecodeBatchFactory(model, self.cost, kv_format)
        self._empty_shard = self.batch()

    def held(self, states: Iterable[RequestQueue]) -> int:
        """Bytes that rows and prompts hold now."""
        return sum(map(self._held_by, states))

    def total(self, states: Iterable[RequestQueue]) -> int:
        """With what is kept for other prompts."""
        return self.held(states) + self.prefixes.nbytes

    def needed(self, request: GenerationRequest) -> int:
        """Bytes that a request takes at most when it has all memory to itself."""
        num_tokens = len(request.prompt_tokens) + request.sampling.max_tokens
        own = self.cost.of(allocated(num_tokens))  # of its prompt, or of all its tokens if it is computed again
        return own + self._empty_shard.bytes_for([num_tokens + 1], end=None)

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
        """Lower the limit below what was held when memory ran out; False if `requests` leave no room for that."""
        most = int(LOWERED_SHARE * self.used)
        floor = max(map(self.needed, requests), default=0)
        if max(most, floor) >= self.limit:
            return False
        logger.warning(
            "memory ran out with %d bytes of keys and values; the limit is %d from now on instead of %d; lower "
            "engine.kv_cache_bytes, or what else is in memory",
            self.used,
            max(most, floor),
            self.limit,
        )
        self.limit = max(most, floor)
        self.prefixes.limit = int(self.limit * PREFIX_SHARE)
        return True

    def _held_by(self, state: RequestQueue) -> int:
        rows = sum(decoder.batch.nbytes for decoder in state.decoders)
        return rows + sum(prompt.num_bytes for prompt in state.admitted())


def max_rows(settings: EngineSettings) -> int:
    """Rows of a class that decode at the same time."""
    return settings.max_rows or (CPU_ROWS if mx.default_device() == mx.Device(mx.cpu) else ROWS)


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
