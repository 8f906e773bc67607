"""The place of keys and values: pages or slots. The engine chooses once, by the device and the model."""

from collections.abc import Callable, Mapping

from parallm.engine.flat_prefill import fits
from parallm.engine.kv.budget import measure_cost
from parallm.engine.kv.paged_cache import can_decode
from parallm.engine.paged_memory import PagedMemory
from parallm.engine.scheduler import RequestQueue
from parallm.engine.settings import EngineSettings
from parallm.engine.slot_memory import SlotMemory
from parallm.model.shared_model import SharedModel
from parallm.types import TrafficClass

KvMemory = PagedMemory | SlotMemory


def has_pages(model: SharedModel, settings: EngineSettings) -> bool:
    """Whether prompts and steps of a model can have pages on this device. Drafts need slots."""
    return settings.speculation.method != "ngram" and can_decode(model) and fits(model)


def make_memory(
    model: SharedModel,
    settings: EngineSettings,
    queues: Mapping[TrafficClass, RequestQueue],
    is_servable: Callable[[str, int], bool],
) -> KvMemory:
    """`queues` are filled before the first request comes; `is_servable`: see `PagedMemory`."""
    cost = measure_cost(model)
    if has_pages(model, settings):
        return PagedMemory(model, settings, cost, queues, is_servable)
    return SlotMemory(model, settings, cost, queues)
