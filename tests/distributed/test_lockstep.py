"""An engine that follows another one, call for call: the same tokens, in the same units, with nothing but messages."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from parallm.conversation import GrammarSource
from parallm.device.streams import DeviceStreams
from parallm.distributed.calls import CallReader, CallWriter
from parallm.distributed.lockstep import FollowingEngine, LeadingEngine
from parallm.engine.settings import EngineSettings
from parallm.engine.slot_memory import SlotMemory
from parallm.errors import ConfigError, ExchangeFailed, UnknownModel, WorkersDiffer
from parallm.model.adapters.adapter import Adapter, make_adapter
from parallm.model.adapters.initial import initial_arrays
from parallm.model.adapters.table import AdapterTable
from parallm.model.shared_model import SharedModel
from parallm.types import GenerationRequest, SamplingParams, TokenEvent

LoadTiny = Callable[..., SharedModel]


class Line:
    """Stands in for the channel of both ranks."""

    def __init__(self, rank: int, sent: deque[bytes]) -> None:
        self.rank = rank
        self.failure: str | None = None
        self._sent = sent

    def gather(self, label: str, part: bytes) -> Future[list[bytes]]:
        future: Future[list[bytes]] = Future()
        future.set_result([part, part])
        return future

    def guarded(self, label: str, future: Future[Any]) -> AbstractContextManager[None]:
        return nullcontext()

    def broadcast(self, content: bytes) -> None:
        self._sent.append(content)

    def fail(self, reason: str) -> None:
        self.failure = reason

    def await_failure(self, seconds: float) -> None:
        self.failure = "rank 1 is gone"


class Pair:
    """A leader and the engine that follows it, in one process, with whole models."""

    def __init__(self, model: SharedModel, streams: DeviceStreams, settings: EngineSettings) -> None:
        self.table = AdapterTable()
        self.sent: deque[bytes] = deque()
        self.events: list[TokenEvent] = []
        self.failures: list[str] = []
        parts: tuple[Any, ...] = model, self.table, streams, settings
        report = lambda names, error: self.failures.append(str(error))  # noqa: E731
        self.line = Line(0, self.sent)
        options: dict[str, Any] = {"emit": self.events.extend, "report": report}
        self.leader = LeadingEngine(*parts, channel=self.line, **options)  # type: ignore[arg-type]  # stands in
        self.follower = FollowingEngine(*parts, channel=Line(1, self.sent), **options)  # type: ignore[arg-type]

    def follow(self) -> None:
        while self.sent:
            self.follower.follow(self.sent.popleft())

    def units(self, most: int = 10_000) -> None:
        """Up to `most` units, each followed at once."""
        for _ in range(most):
            ready = [traffic for traffic in ("serving", "rollout") if self.leader.has_work(traffic)]
            if not ready:
                return
            for traffic in ready:
                self.leader.step(traffic)  # type: ignore[arg-type]
                self.follow()
                self.check()

    def check(self) -> None:
        assert self.follower._checksum.value == self.leader._checksum.value
        assert self.follower.num_running() == self.leader.num_running()
        assert self.follower.num_waiting() == self.leader.num_waiting()
        assert self.follower.kv_budget.used == self.leader.kv_budget.used
        assert self.follower.scheduler.num_preempted == self.leader.scheduler.num_preempted


@pytest.fixture
def pair(load_tiny: LoadTiny, streams: DeviceStreams) -> Callable[..., Pair]:
    def make(**settings: Any) -> Pair:
        return Pair(load_tiny("llama"), streams, EngineSettings(**settings))

    return make


def request(name: str, length: int, max_tokens: int, *, model: str = "base", **sampling: Any) -> GenerationRequest:
    tokens = np.random.default_rng(length).integers(2, 385, length)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
    return GenerationRequest(
        request_id=name, prompt_tokens=tuple(int(one) for one in tokens), sampling=params, model=model
    )


def adapter_of(model: SharedModel, version: int, size: float = 0.2) -> Adapter:
    arrays = initial_arrays(model.targets, 4, mx.random.key(version))
    keys = mx.random.split(mx.random.key(version + 50), len(arrays))
    arrays = {
        name: mx.random.normal(array.shape, key=key) * size
        for (name, array), key in zip(arrays.items(), keys, strict=True)
    }
    return make_adapter(arrays, version=version, rank=4, alpha=8.0)


def tokens_of(events: Sequence[TokenEvent]) -> dict[tuple[str, int], tuple[int, ...]]:
    return {(event.request_id, event.index): event.completion.tokens for event in events if event.completion}


def test_a_follower_computes_the_units_of_requests_without_seeds_that_join_and_leave(pair: Callable[..., Pair]) -> None:
    both = pair()
    for place in range(6):
        both.leader.add(replace(request(f"r{place}", 5 + 7 * place, 4 + 3 * place), n=1 + place % 3), place % 2 == 0)
        both.units(2)
    both.units()
    assert len(tokens_of(both.events)) == 12
    assert both.leader._checksum.value != 0


def test_aborts_cancels_pauses_and_resets_are_followed(pair: Callable[..., Pair]) -> None:
    both = pair()
    for name in ("a", "b", "c"):
        both.leader.add(request(name, 20, 60), False)
    both.units(8)
    both.leader.abort("a")
    both.leader.pause("serving")
    both.leader.resume("serving")
    both.units(3)
    both.leader.cancel("b")
    both.leader.reset_caches()
    both.units()
    assert set(tokens_of(both.events)) == {("b", 0), ("c", 0)}


def test_events_are_held_alike(pair: Callable[..., Pair]) -> None:
    both = pair()
    for name in ("a", "b"):
        both.leader.add(request(name, 20, 40), True)
    both.leader.hold_events(True)
    for _ in range(3):
        both.units(8)
        both.leader.hold_events(True)
    both.leader.hold_events(False)
    both.units()
    assert set(map(len, tokens_of(both.events).values())) == {40}
    assert any(len(event.tokens) > 4 for event in both.events)


@pytest.mark.cpu  # counts positions of slots
def test_preemptions_are_alike(pair: Callable[..., Pair]) -> None:
    both = pair(kv_cache_bytes=5 * 96 * 512, max_context=256)
    for place in range(8):
        both.leader.add(request(f"r{place}", 40 + place % 2, 30 + place, temperature=1.0, seed=place), False)
    both.units()
    assert both.leader.scheduler.num_preempted > 0
    assert len(tokens_of(both.events)) == 8


def test_cached_prefixes_are_alike(pair: Callable[..., Pair]) -> None:
    both = pair()
    for place in range(3):
        both.leader.add(request(f"r{place}", 140, 8), False)
        both.units()
    assert both.leader.prefill.num_cached_tokens == both.follower.prefill.num_cached_tokens > 0


def test_adapter_versions_go_once_and_are_forgotten_when_they_leave(pair: Callable[..., Pair]) -> None:
    both = pair()
    for version in (1, 2):
        both.table.publish(adapter_of(both.leader.model, version))
    both.leader.add(request("one", 9, 5, model="policy@1"), False)
    first = len(both.sent[-1])
    both.leader.add(request("two", 9, 5, model="policy@1"), False)
    assert first > 10 * len(both.sent[-1])
    both.leader.add(request("three", 9, 5, model="policy"), False)
    both.units()
    done = tokens_of(both.events)
    assert done["one", 0] != done["three", 0]
    both.table.unload("policy")
    both.leader.add(request("four", 9, 2), False)
    both.units()
    assert both.follower._reader._adapters == {}


def test_a_grammar_is_compiled_again_from_its_source(pair: Callable[..., Pair]) -> None:
    both = pair()
    source = GrammarSource(form="regex", text="[0-9]{6}", parameter="response_format")
    grammar = both.leader.model.tokenizer.compile_grammar(source)
    both.leader.add(replace(request("g", 9, 12), sampling=SamplingParams(max_tokens=12, grammar=grammar)), False)
    both.units()
    assert both.events[-1].completion is not None
    assert both.events[-1].completion.text.isdigit()


def test_a_request_that_is_refused_goes_nowhere(pair: Callable[..., Pair]) -> None:
    both = pair()
    with pytest.raises(UnknownModel):
        both.leader.add(request("x", 5, 5, model="nobody"), False)
    assert not both.sent


def test_an_error_of_a_step_ends_its_requests_at_both(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = pair()
    both.leader.add(request("a", 9, 20), False)
    both.units(3)
    for engine in (both.leader, both.follower):
        monkeypatch.setattr(engine.scheduler, "schedule_decode", lambda traffic: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        both.leader.step("serving")
    both.leader.fail("serving", caught.value)
    both.follow()
    monkeypatch.undo()
    both.check()
    assert both.failures == ["division by zero"]
    both.leader.add(request("b", 9, 5), False)
    both.units()
    assert ("b", 0) in tokens_of(both.events)


def test_an_error_of_one_alone_stops_all(pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    both = pair()
    both.leader.add(request("a", 9, 20), False)
    both.units(3)
    monkeypatch.setattr(both.follower.scheduler, "schedule_decode", lambda traffic: 1 / 0)
    both.leader.step("serving")
    both.leader.step("serving")
    with pytest.raises(WorkersDiffer, match="a step has failed at rank 1 and not at rank 0"):
        both.follow()


def test_what_is_prepared_in_idle_moments_is_prepared_by_all(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def compilations(memory: object) -> Iterator[int]:
        for count in (4, 8):
            made.append(f"{'leader' if memory is both.leader.memory else 'follower'} {count}")
            yield count

    monkeypatch.setattr(SlotMemory, "compilations", compilations)
    both = pair()
    assert not both.follower.prepare(), "of itself"
    for count in (4, 8):
        assert both.leader.prepare()
        both.follow()
        assert made[-2:] == [f"leader {count}", f"follower {count}"]
    assert not both.leader.prepare()
    both.follow()
    assert not both.leader.prepare()
    assert not both.sent, "nothing is left"
    both.leader.add(request("a", 9, 5), False)
    both.units()
    assert ("a", 0) in tokens_of(both.events)


def test_an_error_of_a_preparation_ends_no_request(pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    def compilations(_: object) -> Iterator[int]:
        yield 1 // 0

    monkeypatch.setattr(SlotMemory, "compilations", compilations)
    both = pair()
    assert not both.leader.prepare()
    both.leader.add(request("a", 9, 5), False)
    both.units()
    assert ("a", 0) in tokens_of(both.events)
    assert both.failures == []


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_that_runs_out_in_a_preparation_stops_all(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    def compilations(memory: object) -> Iterator[int]:
        yield 4
        if memory is (both.leader, both.follower)[rank].memory:
            raise RuntimeError("[malloc] Unable to allocate 8 bytes")
        yield 8

    monkeypatch.setattr(SlotMemory, "compilations", compilations)
    both = pair()
    for _ in range(2):
        both.leader.prepare()
        both.follow()
    lines: list[Any] = [both.line, both.follower._channel]
    assert [line.failure is not None for line in lines] == [rank == 0, rank == 1]
    assert f"rank {rank}: [malloc] Unable to allocate 8 bytes; lower engine.kv_cache_bytes" == lines[rank].failure


def test_memory_that_runs_out_stops_all(pair: Callable[..., Pair]) -> None:
    both = pair()
    both.leader.fail("serving", RuntimeError("[malloc] Unable to allocate 8 bytes"))
    assert both.line.failure is not None
    assert "lower engine.kv_cache_bytes" in both.line.failure


@pytest.mark.parametrize(
    ("error", "told"),
    [("[ring] connection to a peer was lost", "rank 1 is gone"), ("division by zero", "division by zero")],
)
def test_requests_of_a_lost_rank_hear_which_one_it_was(pair: Callable[..., Pair], error: str, told: str) -> None:
    both = pair()
    both.leader.add(request("a", 9, 20), False)
    both.units(3)
    both.leader.fail("serving", RuntimeError(error))
    assert both.failures == [told]


def test_other_tokens_at_a_follower_stop_all(pair: Callable[..., Pair]) -> None:
    both = pair()
    both.leader.add(request("a", 9, 20), False)
    both.units(4)
    both.follower._checksum.value += 1  # as if it had sampled another token
    both.leader.step("serving")
    with pytest.raises(WorkersDiffer, match="rank 1 has sampled other tokens than rank 0"):
        both.follow()


def test_another_base_is_refused_with_its_rank(pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(self: Line, label: str, part: bytes) -> Future[list[bytes]]:
        future: Future[list[bytes]] = Future()
        future.set_result([part, part.replace(b'"the base": "', b'"the base": "0')])
        return future

    monkeypatch.setattr(Line, "gather", gather)
    with pytest.raises(ConfigError, match=r"the base is .* at rank 1"):
        pair()


def test_a_call_may_name_the_types_of_requests_alone(nano: SharedModel) -> None:
    reader = CallReader(nano.tokenizer)
    content = CallWriter().write(("add", (request("a", 5, 5), True), 0, None, frozenset({("policy", 1)})))
    name, (received, is_streaming), *_ = reader.read(content)
    assert (name, received.request_id, is_streaming) == ("add", "a", True)
    with pytest.raises(ExchangeFailed, match="belongs to no call"):
        reader.read(b"cposix\nsystem\n(S'true'\ntR.")
