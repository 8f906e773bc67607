"""Memory of keys and values in slots: whether batches, jobs and the prefix cache fit into the limit together.

`Scheduler` asks it, and says which requests give up their memory when it does not suffice. A batch's buffers are grown
with spare capacity; memory comes from the prefix cache first, then from capacity to spare.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Ordered
from functools import partial

from parallm.engine.decode_batch import DecodeBatchFactory, SequentialDecodeBatch, SlotDecodeBatch
from parallm.engine.decoder import Decoder
from parallm.engine.kv.budget import KvBudget, KvCost
from parallm.engine.kv.prefix_cache import PrefixCache
from parallm.engine.kv.shapes import allocated
from parallm.engine.scheduler import RequestQueue
from parallm.engine.sequence import PrefillJob, Sequence
from parallm.engine.settings import EngineSettings
from parallm.model.shared_model import SharedModel
from parallm.types import GenerationRequest, TrafficClass

LOOKAHEAD = 32
"""Tokens after the prompt that must fit before it is computed, so that its sequence is not preempted at once."""
PREFIX_SHARE = 0.5
"""Share of the limit for the prefix cache: running requests get it back at once, but resizing to fit costs copies."""


class SlotMemory:
    def __init__(
        self, model: SharedModel, settings: EngineSettings, cost: KvCost, queues: Mapping[TrafficClass, RequestQueue]
    ) -> None:
        self.make_batch = DecodeBatchFactory(model, cost)
        bytes_for = partial(self.make_batch().bytes_for, end=None)
        # a cache of all its tokens, if it is preempted near its end, and a batch of its own
        self.budget = KvBudget(settings, cost, lambda count: cost.of(allocated(count)) + bytes_for([count + 1]))
        self.prefixes = PrefixCache(int(self.budget.limit * PREFIX_SHARE))
        self._queues = queues

    def compilations(self) -> Iterator[int]:
        """Nothing: the shapes of buffers are not known ahead."""
        return iter(())

    def num_held_bytes(self) -> int:
        """Bytes that running sequences, admitted jobs and the prefix cache hold now."""
        queues = self._queues.values()
        batches = sum(_batch(decoder).nbytes for queue in queues for decoder in queue.decoders)
        return batches + sum(job.num_bytes for queue in queues for job in queue.admitted()) + self.prefixes.nbytes

    def num_free_bytes(self) -> int:
        """Bytes that can be taken without a preemption."""
        return self.budget.limit - self.num_held_bytes()

    def lower(self, requests: Ordered[GenerationRequest]) -> bool:
        """Lower the limit after memory ran out, before all is computed again; False if `requests` need more."""
        is_lower = self.budget.lower(requests, self.budget.used)
        self.prefixes.limit = int(self.budget.limit * PREFIX_SHARE)
        return is_lower

    def fits(self, job: PrefillJob, decoder: Decoder) -> bool:
        """Whether a job's cache and the first positions of a sequence fit, beside what the batch has."""
        request = job.request
        length = min(len(job.tokens) + LOOKAHEAD, len(request.prompt_tokens) + request.sampling.max_tokens) + 1
        return self._fits(decoder, [*_lengths(decoder.sequences), length], self.allocate(job))

    def allocate(self, job: PrefillJob) -> int:
        """Bytes of a job's cache, which its first chunk creates."""
        return self.budget.cost.of(job.num_allocated)

    def resize(self, decoder: Decoder, sequences: Ordered[Sequence]) -> bool:
        """Bring a batch's buffers to what its sequences need, and those that join next, if it fits."""
        if self.resize_to_grow(decoder, sequences):
            return True
        batch, lengths = _batch(decoder), _lengths(sequences)
        if not batch.holds(lengths) or self.num_free_bytes() < 0:
            if not self._fits(decoder, lengths, 0):
                return False
            batch.resize(lengths, end=None)
        return True

    def resize_to_grow(self, decoder: Decoder, sequences: Ordered[Sequence]) -> bool:
        """The same with capacity to grow into."""
        lengths, end = _lengths(sequences), max((sequence.max_positions for sequence in sequences), default=0)
        if self._held_by_others(decoder) + _batch(decoder).bytes_for(lengths, end=end) > self.budget.limit:
            return False
        _batch(decoder).resize(lengths, end=end)
        return True

    def _held_by_others(self, decoder: Decoder) -> int:
        return self.num_held_bytes() - _batch(decoder).nbytes

    def _fits(self, decoder: Decoder, lengths: Ordered[int], num_more: int) -> bool:
        """Whether exact buffers of a batch and `num_more` bytes fit, if need be after others give up spare capacity.

        With `num_more` the batch is resized later, and until then keeps what it has.
        """
        batch = _batch(decoder)

        def excess() -> int:
            own = max(batch.bytes_for(lengths, end=None), batch.nbytes if num_more else 0)
            return self._held_by_others(decoder) + own + num_more - self.budget.limit

        if excess() > 0:
            self.prefixes.shrink(excess())
        if excess() > 0:
            for other in [other for queue in self._queues.values() for other in queue.decoders]:
                exact = _lengths(other.sequences)
                has_spare = _batch(other).bytes_for(exact, end=None) < _batch(other).nbytes
                if has_spare and (num_more or other is not decoder):
                    _batch(other).resize(exact, end=None)
        return excess() <= 0


def _batch(decoder: Decoder) -> SlotDecodeBatch | SequentialDecodeBatch:
    assert isinstance(decoder.batch, SlotDecodeBatch | SequentialDecodeBatch)
    return decoder.batch


def _lengths(sequences: Ordered[Sequence]) -> list[int]:
    return [sequence.num_reserved for sequence in sequences]
