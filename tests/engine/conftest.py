"""An engine on the thread of the test: requests join at chosen steps, and the completions come back by request."""

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx
import pytest

from parallm.device.streams import DeviceStreams
from parallm.engine.engine import TRAFFIC_CLASSES, Engine
from parallm.engine.settings import EngineSettings
from parallm.model.adapters.adapter import Adapter, make_adapter
from parallm.model.adapters.table import AdapterTable
from parallm.model.shared_model import SharedModel
from parallm.types import Completion, GenerationRequest, SamplingParams, TokenEvent

Failures = list[tuple[list[str], Exception]]


@pytest.fixture
def make_engine(streams: DeviceStreams) -> Callable[..., Engine]:
    """An engine whose events and failures go to the lists that the test gives."""

    def make(
        model: SharedModel,
        *,
        events: list[TokenEvent] | None = None,
        failures: Failures | None = None,
        table: AdapterTable | None = None,
        settings: EngineSettings | None = None,
        async_scheduling: bool = False,
    ) -> Engine:
        heard = [] if events is None else events
        failed = [] if failures is None else failures
        return Engine(
            model,
            table or AdapterTable(),
            streams,
            settings or EngineSettings(),
            emit=heard.extend,
            report=lambda names, error: failed.append((names, error)),
            async_scheduling=async_scheduling,
        )

    return make


@pytest.fixture
def complete(make_engine: Callable[..., Engine]) -> Callable[..., dict[str, list[Completion]]]:
    """All completions by request id, where request i joins after `apart * i` units of work."""

    def run(
        model: SharedModel,
        requests: Sequence[GenerationRequest],
        *,
        apart: int = 0,
        table: AdapterTable | None = None,
        settings: EngineSettings | None = None,
    ) -> dict[str, list[Completion]]:
        events: list[TokenEvent] = []
        engine = make_engine(model, events=events, table=table, settings=settings)
        for request in requests:
            engine.add(request, False)
            for _ in range(apart):
                step(engine)
        while step(engine):
            pass
        return by_request(requests, events)

    return run


@pytest.fixture
def ask() -> Callable[..., GenerationRequest]:
    """A greedy request that does not end before `max_tokens`; sampling fields can be changed by name."""

    def make(
        name: str,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        n: int = 1,
        model: str = "policy",
        **sampling: object,
    ) -> GenerationRequest:
        fields = {"temperature": 0.0, "ignore_eos": True} | sampling
        params = SamplingParams(max_tokens=max_tokens, **fields)  # type: ignore[arg-type]  # by name, from the test
        return GenerationRequest(request_id=name, prompt_tokens=tuple(prompt), sampling=params, n=n, model=model)

    return make


@pytest.fixture
def random_adapter() -> Callable[..., Adapter]:
    """A version whose product is not zero, so that it changes the tokens."""

    def make(
        model: SharedModel,
        version: int,
        *,
        rank: int = 4,
        size: float = 0.2,
        name: str = "policy",
        rslora: bool = False,
        dora: bool = False,
    ) -> Adapter:
        key = mx.random.key(version)
        arrays = {}
        for target, (*stack, inputs, outputs) in model.targets.items():
            key, key_a, key_b = mx.random.split(key, 3)
            arrays[f"{target}.lora_a"] = mx.random.normal((*stack, inputs, rank), key=key_a) * size
            arrays[f"{target}.lora_b"] = mx.random.normal((*stack, rank, outputs), key=key_b) * size
            if dora:
                arrays[f"{target}.m"] = mx.random.uniform(1.5, 2.5, (outputs,), key=key)
        return make_adapter(arrays, name=name, version=version, rank=rank, alpha=2 * rank, rslora=rslora)

    return make


def step(engine: Engine) -> bool:
    """One unit of each traffic class that has work; False if there was none."""
    ready = [traffic for traffic in TRAFFIC_CLASSES if engine.has_work(traffic)]
    for traffic in ready:
        engine.step(traffic)
    return bool(ready)


def by_request(requests: Sequence[GenerationRequest], events: Sequence[TokenEvent]) -> dict[str, list[Completion]]:
    made: Mapping[str, list[Completion]] = {request.request_id: [] for request in requests}
    for event in events:
        if event.completion is not None:
            made[event.request_id].append(event.completion)
    return {name: sorted(some, key=lambda completion: completion.index) for name, some in made.items()}
