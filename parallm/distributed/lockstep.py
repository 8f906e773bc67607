"""Engines in lockstep: rank 0's engine leads, and the engines of all other ranks do what it does, call for call.

With tensor parallelism every forward has sums over all ranks, so all must compute the same forwards in the same order.
An engine depends on nothing but its calls: random numbers are those of seed and position, and logits are the same bits
at all ranks. So the leader sends each call before it computes: requests with their seeds and adapters, aborts, and one
short message for a unit of work. Engines do not know of it.

Each unit's message has a checksum over all tokens that the leader has emitted. A follower that has others stops all.
"""

import json
import re
import secrets
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from parallm.device.memory import is_out_of_memory
from parallm.device.streams import DeviceStreams
from parallm.distributed.calls import CallReader, CallWriter
from parallm.distributed.channel import Channel
from parallm.distributed.team import difference
from parallm.engine.engine import Engine
from parallm.engine.kv.budget import default_limit
from parallm.engine.settings import EngineSettings
from parallm.errors import ConfigError, EngineStopped, WorkersDiffer
from parallm.model.adapters.adapter import Adapter, Key
from parallm.model.adapters.table import AdapterTable
from parallm.model.shared_model import SharedModel
from parallm.types import GenerationRequest, TokenEvent, TrafficClass

Emit = Callable[[list[TokenEvent]], None]
Report = Callable[[list[str], Exception], None]

OF_COLLECTIVE = re.compile(r"\[(ring|jaccl|mpi|nccl)\]")
"""Begins what MLX raises when a sum over all ranks has failed."""
LOSS_SECONDS = 5.0
"""Time until the channel, too, has lost a rank that MLX has lost."""


class LedTable(AdapterTable):
    """The leader's adapter versions as its engine sees them. Which ones requests can name changes between calls only,
    since prefix caches depend on it."""

    def __init__(self, table: AdapterTable) -> None:
        super().__init__(policies=table.policies)
        self.held: frozenset[Key] = frozenset()
        self.resolved: Adapter | None = None
        """The result of the last `resolve`."""
        self._table = table

    def look(self) -> bool:
        """Look which versions there are now; whether they have changed."""
        before, self.held = self.held, frozenset(self._table.keys())
        return before != self.held

    def resolve(self, model: str) -> Adapter | None:
        self.resolved = self._table.resolve(model)
        return self.resolved

    def holds(self, name: str, version: int) -> bool:
        return (name, version) in self.held

    def acquire(self, adapter: Adapter | None) -> None:
        self._table.acquire(adapter)

    def release(self, adapter: Adapter | None) -> None:
        self._table.release(adapter)


class FollowedTable(LedTable):
    """The same at a follower, which hears what the leader has resolved and holds."""

    def resolve(self, model: str) -> Adapter | None:
        return self.resolved

    def acquire(self, adapter: Adapter | None) -> None:
        """A sequence holds its adapter by itself."""

    def release(self, adapter: Adapter | None) -> None:
        """See `acquire`."""


class LeadingEngine(Engine):
    """The engine of rank 0. Every call that changes it goes to the followers, too."""

    def __init__(
        self,
        model: SharedModel,
        adapters: AdapterTable,
        streams: DeviceStreams,
        settings: EngineSettings,
        *,
        channel: Channel,
        emit: Emit,
        report: Report,
        async_scheduling: bool = False,
    ) -> None:
        """Raises ConfigError if another rank differs in what must be alike."""
        self._channel = channel
        self._writer = CallWriter()
        self._table = LedTable(adapters)
        self._checksum = Checksum(emit)
        self._is_in_call = False
        super().__init__(
            model,
            self._table,
            streams,
            agreed_settings(channel, model, streams, settings),
            emit=self._checksum.emit,
            report=report,
            async_scheduling=async_scheduling,
        )
        self._preparations = self._led(ended_by_memory(self._preparations, channel))

    def add(self, request: GenerationRequest, is_streaming: bool) -> None:
        if request.switches_in_flight:
            raise EngineStopped("requests that switch versions in flight cannot be followed by other ranks")
        if request.sampling.seed is None:
            request = replace(request, sampling=replace(request.sampling, seed=secrets.randbits(63)))
        super().add(request, is_streaming)  # first: a request that is refused goes nowhere, and nothing is computed
        self._send("add", request, is_streaming, adapter=self._table.resolved)

    def abort(self, *request_ids: str) -> None:
        with self._sent("abort", *request_ids):
            super().abort(*request_ids)

    def cancel(self, *request_ids: str) -> None:
        with self._sent("cancel", *request_ids):
            super().cancel(*request_ids)

    def pause(self, traffic: TrafficClass) -> None:
        with self._sent("pause", traffic):
            super().pause(traffic)

    def resume(self, traffic: TrafficClass) -> None:
        with self._sent("resume", traffic):
            super().resume(traffic)

    def hold_events(self, is_holding: bool) -> None:
        with self._sent("hold_events", is_holding):
            super().hold_events(is_holding)

    def reset_caches(self) -> None:
        with self._sent("reset_caches"):
            super().reset_caches()

    def step(self, traffic: TrafficClass) -> None:
        with self._sent("step", traffic), self._channel.guarded("a step", Future()):
            super().step(traffic)

    def flush(self, traffic: TrafficClass) -> None:
        with self._sent("flush", traffic), self._channel.guarded("the end of a step", Future()):
            super().flush(traffic)

    def fail(self, traffic: TrafficClass, error: Exception) -> None:
        if isinstance(error, EngineStopped):  # the end of this process, which the followers hear of
            super().fail(traffic, error)
            return
        self._is_in_call = False  # the call that failed
        if is_out_of_memory(error):
            self._channel.fail(f"rank 0: {error}; lower engine.kv_cache_bytes")
        elif OF_COLLECTIVE.match(str(error)):
            self._channel.await_failure(LOSS_SECONDS)  # it says which rank
        if self._channel.failure is not None:
            error = EngineStopped(self._channel.failure)
        with self._sent("fail", traffic):
            super().fail(traffic, error)

    def _led(self, preparations: Iterator[int]) -> Iterator[int]:
        """Yield the same, after telling the followers to make each, too."""
        while True:
            try:
                with self._sent("prepare"), self._channel.guarded("a preparation", Future()):
                    prepared = next(preparations, None)
            finally:
                self._is_in_call = False  # no `fail` follows an error
            if prepared is None:
                return
            yield prepared

    @contextmanager
    def _sent(self, name: str, *arguments: Any) -> Iterator[None]:
        """Send a call before the block makes it; nothing for calls that an engine makes of itself."""
        is_outer, self._is_in_call = not self._is_in_call, True
        if is_outer:
            self._send(name, *arguments)
        yield
        if is_outer:
            self._is_in_call = False

    def _send(self, name: str, *arguments: Any, adapter: Adapter | None = None) -> None:
        held = self._table.held if self._table.look() else None
        if held is not None:
            self._writer.forget(held)
        call = (name, arguments, self._checksum.value, adapter, held)
        self._channel.broadcast(self._writer.write(call))


class FollowingEngine(Engine):
    """The engine of another rank. It makes the calls that come from rank 0, on the device thread."""

    def __init__(
        self,
        model: SharedModel,
        _: AdapterTable,
        streams: DeviceStreams,
        settings: EngineSettings,
        *,
        channel: Channel,
        emit: Emit,
        report: Report,
        async_scheduling: bool = False,
    ) -> None:
        """Adapters come from rank 0; events are dropped, because clients talk to rank 0. Raises as `LeadingEngine`."""
        self._channel = channel
        self._rank = channel.rank
        self._table = FollowedTable(AdapterTable())
        self._checksum = Checksum(lambda events: None)
        self._error: Exception | None = None  # of the last call
        self._reader = CallReader(model.tokenizer)
        super().__init__(
            model,
            self._table,
            streams,
            agreed_settings(channel, model, streams, settings),
            emit=self._checksum.emit,
            report=lambda names, error: None,
            async_scheduling=async_scheduling,
        )
        self._preparations = ended_by_memory(self._preparations, channel)

    def has_work(self, traffic: TrafficClass) -> bool:
        """No: rank 0 says when."""
        return False

    def prepare(self) -> bool:
        """Nothing: rank 0 says when."""
        return False

    def follow(self, content: bytes) -> None:
        """Make a call of rank 0. Raises WorkersDiffer if the engines are not alike, or only this one fails."""
        name, arguments, checksum, adapter, held = self._reader.read(content)
        if checksum != self._checksum.value:
            raise WorkersDiffer(f"rank {self._rank} has sampled other tokens than rank 0 before {name}")
        if held is not None:
            self._table.held = held
            self._reader.forget(held)
        self._table.resolved = adapter
        if name == "fail":
            self._fail_alike(*arguments)
            return
        self._check_last()
        if name == "prepare":
            with self._channel.guarded("a preparation", Future()):
                super().prepare()
            return
        try:
            with self._channel.guarded(f"a {name}", Future()):
                getattr(self, name)(*arguments)
        except Exception as error:  # noqa: BLE001  # rank 0 has the same one, and says `fail` next
            self._error = error

    def _fail_alike(self, traffic: TrafficClass) -> None:
        error, self._error = self._error, None
        if error is None:
            raise WorkersDiffer(f"a step has failed at rank 0 and not at rank {self._rank}")
        super().fail(traffic, error)

    def _check_last(self) -> None:
        if self._error is not None:
            raise WorkersDiffer(f"a step has failed at rank {self._rank} and not at rank 0: {self._error}")


def ended_by_memory(preparations: Iterator[int], channel: Channel) -> Iterator[int]:
    """Yield the same. A rank whose memory runs out ends all, because others may wait for it in a sum."""
    while True:
        try:
            prepared = next(preparations, None)
        except Exception as error:
            if is_out_of_memory(error):
                channel.fail(f"rank {channel.rank}: {error}; lower engine.kv_cache_bytes")
            raise
        if prepared is None:
            return
        yield prepared


def agreed_settings(
    channel: Channel, model: SharedModel, streams: DeviceStreams, settings: EngineSettings
) -> EngineSettings:
    """`settings` with the memory that every rank has. Waits for all. Raises ConfigError if ranks cannot compute one
    model together."""
    own = {
        "the base": model.sha256,
        "the type that it computes in": str(model.dtype),
        "the number of streams on a CPU": streams.width,
    }
    limit = settings.kv_cache_bytes or default_limit()
    gathered = channel.gather("engine", json.dumps([own, limit]).encode()).result()
    parts = [json.loads(part) for part in gathered]
    for rank, (facts, _) in enumerate(parts):
        if mistake := difference(parts[0][0], facts, rank):
            raise ConfigError(mistake)
    return replace(settings, kv_cache_bytes=min(part[1] for part in parts))


class Checksum:
    """A number over all tokens that an engine has emitted."""

    def __init__(self, emit: Emit) -> None:
        self.value = 0
        self._emit = emit

    def emit(self, events: list[TokenEvent]) -> None:
        tokens = [(event.request_id, event.index, event.tokens) for event in events]
        self.value = zlib.crc32(repr(tokens).encode(), self.value)
        self._emit(events)
