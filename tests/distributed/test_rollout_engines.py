"""Rollout engines without processes: the pool with engines of a few lines, the checks, the host with a small model."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from parallm.checkpoint.adapter_store import AdapterStore
from parallm.checkpoint.persistent_table import PersistentTable
from parallm.checkpoint.serving_state import ServingState
from parallm.device.governor import Governor
from parallm.device.thread import DeviceThread
from parallm.distributed.rollout_engines import host as host_module
from parallm.distributed.rollout_engines import replica as replica_module
from parallm.distributed.rollout_engines.check import Parity, disproof, fault_of
from parallm.distributed.rollout_engines.host import ReplicaHost
from parallm.distributed.rollout_engines.pool import EnginePool
from parallm.distributed.rollout_engines.replica_client import EngineLost
from parallm.errors import AdapterError, EngineFull, InvalidRequest, Unavailable
from parallm.model.adapters.adapter import Adapter, make_adapter
from parallm.model.adapters.initial import initial_arrays, starting_adapter
from parallm.model.adapters.table import AdapterTable
from parallm.model.adapters.transfer import from_bytes, to_bytes
from parallm.model.load import load_shared_model
from parallm.model.settings import ModelSettings
from parallm.model.shared_model import SharedModel
from parallm.rollout.settings import RolloutSettings
from parallm.server.control.replica_schemas import (
    API,
    JoinAnswer,
    JoinBody,
    ReceivedVersion,
    SampleBody,
    SampledCompletion,
)
from parallm.types import Completion, EngineStats, GenerationRequest, SamplingParams, WeightSpan

# the pool ------------------------------------------------------------------------------------------------------------


def request(name: str = "a", n: int = 2) -> GenerationRequest:
    return GenerationRequest(
        request_id=name, prompt_tokens=(1, 2), sampling=SamplingParams(max_tokens=4, seed=2**64 - 1), n=n
    )


def completion(index: int, text: str = "") -> Completion:
    return Completion(
        request_id="a",
        index=index,
        tokens=(5, 6),
        logprobs=(-0.5, -0.25),
        top_logprobs=((), ()),
        text=text,
        finish_reason="stop",
        weight_versions=(WeightSpan(version=3, start=0, end=2),),
    )


@dataclass
class Engine:
    """Answers with its name after `gate` is set; is lost after `lost_after` completions, and stays away."""

    name: str
    capacity: int = 4
    lost_after: int = 1000
    num_taken: int = 0
    reason: str = ""
    most_taken: int = 0
    asked: list[str] = field(default_factory=list)
    num_closed: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def sample(self, request: GenerationRequest) -> AsyncGenerator[Completion, None]:
        self.asked.append(request.request_id)
        self.most_taken = max(self.most_taken, self.num_taken)
        try:
            await self.gate.wait()
            for index in range(request.n):
                if self.lost_after == 0:
                    self.capacity = 0
                    raise EngineLost("gone")
                self.lost_after -= 1
                await asyncio.sleep(0)
                yield completion(index, self.name)
        finally:
            self.num_closed += 1

    def take_figures(self) -> Mapping[str, float]:
        return {}


def collected(engines: Sequence[Engine], requests: Sequence[GenerationRequest]) -> list[tuple[int, Completion]]:
    async def main() -> list[tuple[int, Completion]]:
        for engine in engines:
            engine.gate.set()
        async with asyncio.timeout(5):
            return [pair async for pair in EnginePool(engines).completions(requests)]

    return asyncio.run(main())


def test_a_request_goes_to_the_engine_with_the_largest_share_of_free_rows() -> None:
    large, small = Engine("large", capacity=12), Engine("small", capacity=4)
    found = collected([small, large], [request(str(number)) for number in range(8)])
    assert sorted(index for index, _ in found) == sorted([*range(8)] * 2)
    assert (len(large.asked), len(small.asked)) == (6, 2)
    assert (large.num_taken, small.num_taken) == (0, 0)


def test_requests_wait_for_free_rows_in_the_order_of_their_coming() -> None:
    engine = Engine("one", capacity=3)
    assert len(collected([engine], [request(str(number)) for number in range(6)])) == 12
    assert engine.asked == ["0", "1", "2", "3", "4", "5"]
    assert engine.most_taken == 4  # the last request may begin with one free row


def test_what_a_lost_engine_leaves_is_sampled_by_another_and_nothing_comes_twice() -> None:
    dying, other = Engine("dying", lost_after=1), Engine("other", capacity=1)
    found = collected([dying, other], [request("a", n=3), request("b", n=3)])
    assert sorted((index, one.index) for index, one in found) == [(i, j) for i in range(2) for j in range(3)]
    assert [one.text for _, one in found].count("dying") == 1
    assert dying.num_taken == other.num_taken == 0


def test_an_error_of_the_request_itself_is_raised_and_the_others_are_aborted() -> None:
    class Refusing(Engine):
        async def sample(self, request: GenerationRequest) -> AsyncGenerator[Completion, None]:
            if not request.n:
                yield completion(0)
            raise InvalidRequest("too long")

    waiting = Engine("waiting")

    pool = EnginePool([Refusing("refusing", capacity=3), waiting])

    async def main() -> None:
        async with asyncio.timeout(5):
            async for _ in pool.completions([request(str(number)) for number in range(4)]):
                pass

    with pytest.raises(InvalidRequest):
        asyncio.run(main())
    assert waiting.num_taken == 0


def test_closing_aborts_what_runs_and_what_waits() -> None:
    engine = Engine("one", capacity=2)

    async def main() -> None:
        pool = EnginePool([engine])
        async with aclosing(pool.completions([request("a"), request("b")])) as completions:
            waiting = asyncio.ensure_future(anext(completions))
            await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(main())
    assert (engine.asked, engine.num_closed, engine.num_taken) == (["a"], 1, 0)


@pytest.mark.parametrize("engines", [("node:8000",), ("http://node/v1",), ("local", "local")])
def test_what_is_no_address_or_stands_twice_is_refused(engines: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"addresses such as|stands there twice"):
        RolloutSettings(engines=engines)


# the checks ----------------------------------------------------------------------------------------------------------

SAMPLED = SampledCompletion.of(completion(1), {3: "abc"})
DIGESTS = {3: "abc"}


def test_a_whole_completion_of_the_version_is_right_and_comes_back_to_the_bit() -> None:
    assert fault_of(SAMPLED, request(), DIGESTS, 10) == ""
    again = SampledCompletion.model_validate_json(SAMPLED.model_dump_json())
    assert again.completion("a") == completion(1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"index": 2}, "completion 2 with 2 tokens was not asked for"),
        ({"tokens": [5, 10]}, "token ids from 5 to 10 are not all below 10"),
        ({"logprobs": [-0.5]}, "2 tokens have 1 log-probs"),
        ({"logprobs": [-0.5, float("nan")]}, "no numbers"),
        ({"weight_versions": SAMPLED.weight_versions[:0]}, "the versions of 2 tokens"),
        ({"weight_versions": [SAMPLED.weight_versions[0].model_copy(update={"end": 1})]}, "the versions of 2 tokens"),
        (
            {"weight_versions": [SAMPLED.weight_versions[0].model_copy(update={"version": 2})]},
            "version 2 has sampled, and 3 was asked for",
        ),
        (
            {"weight_versions": [SAMPLED.weight_versions[0].model_copy(update={"digest": "old"})]},
            "version 3 has the digest old there and abc here",
        ),
    ],
)
def test_every_lie_about_a_completion_is_named(changes: dict[str, Any], said: str) -> None:
    assert said in fault_of(SAMPLED.model_copy(update=changes), request(), DIGESTS, 10)


def parity(mean: float, num_tokens: int = 40) -> Parity:
    made = Parity()
    made.add(np.full(num_tokens, mean))
    return made


def test_log_probs_of_another_version_are_found_and_noise_is_not() -> None:
    assert "are those of policy@2, not of policy@3" in disproof(parity(1e-3), {"policy@2": parity(1e-7)}, "policy@3")
    assert "above 0.05" in disproof(parity(0.06), {"policy@2": parity(0.06)}, "policy@3")
    assert disproof(parity(5e-3), {"policy@2": parity(4e-3)}, "policy@3") == ""
    assert disproof(parity(0), {"policy@2": parity(0)}, "policy@3") == ""
    few = {
        number: disproof(parity(1e-3, number), {"policy@2": parity(1e-4, number)}, "policy@3") for number in (1, 4, 40)
    }
    assert [bool(found) for found in few.values()] == [False, False, True]


def test_sampling_that_the_protocol_has_no_field_for_is_refused() -> None:
    whole = SampleBody.of(request(), session="s", request_id="r", model="policy@3").request()
    assert whole.sampling == request().sampling
    assert (whole.prompt_tokens, whole.n, whole.traffic) == ((1, 2), 2, "rollout")
    other = replace(request(), sampling=SamplingParams(max_tokens=4, top_p=0.5))
    with pytest.raises(InvalidRequest):
        SampleBody.of(other, session="s", request_id="r", model="policy@3")


# the host ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def device() -> Iterator[DeviceThread]:
    made = DeviceThread(Governor(serving_share=0.7, engine_share=0.5))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def model(device: DeviceThread, tiny_model: Callable[[str], Path]) -> SharedModel:
    return device.call(partial(load_shared_model, ModelSettings(path=str(tiny_model("llama"))))).result(60)


@dataclass
class Memory:
    """The part of an engine that a host uses."""

    max_context: int = 64
    num_resets: int = 0

    def stats(self) -> EngineStats:
        names = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
        values: dict[str, Any] = {**names, "tokens_total": {}, "max_rows": 8}
        return EngineStats(**values)

    async def reset_caches(self) -> None:
        self.num_resets += 1


@pytest.fixture
def host(device: DeviceThread, model: SharedModel) -> ReplicaHost:
    return ReplicaHost(device, model, PersistentTable(device, AdapterTable(), trained=()), Memory())


def facts(model: SharedModel, **changes: Any) -> JoinBody:
    own = JoinBody(
        api=API,
        session="first",
        owner="node:run",
        policy="policy",
        base="tiny",
        base_sha256=model.sha256,
        tokenizer_sha256=model.tokenizer.sha256,
        max_context=64,
        served=0,
    )
    return own.model_copy(update=changes)


def version(device: DeviceThread, model: SharedModel, number: int, *, seed: int = 1) -> Adapter:
    def make() -> Adapter:
        arrays = initial_arrays(model.targets, 2, mx.random.key(seed), ranks={})
        added = {name: array + 0.01 * number for name, array in arrays.items()}
        return make_adapter(added, version=number, rank=2, alpha=3.3, rslora=True, parent=number - 1, step=number)

    return device.call(make).result(60)


def test_a_version_arrives_with_its_number_its_scale_and_its_digest(
    device: DeviceThread, model: SharedModel, host: ReplicaHost
) -> None:
    sent = version(device, model, 7)
    content = device.call(partial(to_bytes, sent)).result(60)

    async def main() -> None:
        assert (await host.join(facts(model), is_paused=False)).versions == {}
        received = await host.receive("first", 7, content)
        assert (received.name, received.version, received.digest) == ("policy", 7, sent.digest)
        assert host._table.resolve("policy") is None  # served when the trainer says so
        answer = await host.join(facts(model, served=7), is_paused=True)
        assert (answer.versions, answer.max_rows) == ({"7": sent.digest}, 0)

    asyncio.run(main())
    received = host._table.resolve("policy")
    assert received is not None
    assert (received.digest, received.scales) == (sent.digest, sent.scales)


class Direct:
    """A client that calls a host without HTTP."""

    url = "http://server"

    def __init__(self, host: ReplicaHost) -> None:
        self._host = host

    async def join(self, body: JoinBody) -> JoinAnswer:
        return await self._host.join(body, is_paused=False)

    async def send(self, session: str, version: int, content: bytes) -> ReceivedVersion:
        return await self._host.receive(session, version, content)


def test_a_restarted_server_serves_an_older_version_that_the_trainer_goes_back_to(
    device: DeviceThread, model: SharedModel
) -> None:
    own, theirs = AdapterTable(), AdapterTable(keep=1)
    host = ReplicaHost(device, model, PersistentTable(device, theirs, trained=()), Memory())
    trainer = replica_module.Trainer(
        facts=facts(model),
        versions=replica_module.Versions(own, "policy", device),
        rescorer=cast("Any", None),
        vocabulary_size=10,
        dtype="float32",
    )
    replica = replica_module.Replica(cast("Any", Direct(host)), trainer)
    for number in (1, 2, 3):
        own.publish(version(device, model, number))
    asyncio.run(replica.sync())
    assert theirs.keys() == {("policy", 3)}
    for number in (1, 3, 2):
        own.promote(number)
        asyncio.run(replica.sync())
        served, wanted = theirs.resolve("policy"), own.resolve("policy")
        assert served is not None
        assert wanted is not None
        assert (served.version, served.digest) == (number, wanted.digest)
    assert theirs.next_version("policy") == 4


def test_a_version_of_a_session_never_changes(device: DeviceThread, model: SharedModel, host: ReplicaHost) -> None:
    old, new = version(device, model, 7), version(device, model, 7, seed=2)
    contents = [device.call(partial(to_bytes, one)).result(60) for one in (old, new)]

    async def main() -> None:
        await host.join(facts(model), is_paused=False)
        for _ in range(2):  # the first answer may be lost
            assert (await host.receive("first", 7, contents[0])).digest == old.digest
        with pytest.raises(AdapterError, match="policy@7 was sent before, with other arrays"):
            await host.receive("first", 7, contents[1])

    asyncio.run(main())


def test_a_host_says_once_that_it_cannot_serve_what_the_trainer_serves(
    model: SharedModel, host: ReplicaHost, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        for _ in range(4):
            await host.join(facts(model, served=5), is_paused=False)

    asyncio.run(main())
    said = "clients get version 0 of policy here and version 5 at node:run: the trainer has not sent it"
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [said]


def test_bytes_that_have_changed_on_the_way_are_found(device: DeviceThread, model: SharedModel) -> None:
    content = bytearray(device.call(partial(to_bytes, version(device, model, 7))).result(60))
    content[-3] ^= 64
    with pytest.raises(AdapterError, match="its arrays have changed on the way"):
        device.call(partial(from_bytes, bytes(content), model.targets)).result(60)
    with pytest.raises(AdapterError, match="no adapter version"):
        device.call(partial(from_bytes, bytes(content[:50]), model.targets)).result(60)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"api": API + 1}, f"speaks version {API} of the protocol of rollout engines, the trainer {API + 1}"),
        ({"base": "other", "base_sha256": "12345678901234"}, r"the trainer other \(sha256 123456789012\)"),
        ({"tokenizer_sha256": "abc"}, "the trainer's abc; give both the same tokenizer files"),
        ({"max_context": 65}, "a context of 64 tokens, the trainer asks for up to 65; .*engine.max_context=65"),
        ({"policy": "base"}, "train a policy of another name"),
    ],
)
def test_a_trainer_that_does_not_fit_is_refused_with_the_value(
    model: SharedModel, host: ReplicaHost, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(Unavailable, match=said):
        asyncio.run(host.join(facts(model, **changes), is_paused=False))


def test_another_run_waits_until_the_trainer_has_left_and_its_versions_begin_anew(
    device: DeviceThread, model: SharedModel, host: ReplicaHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = version(device, model, 7), version(device, model, 7, seed=2)
    contents = [device.call(partial(to_bytes, one)).result(60) for one in (old, new)]
    other = facts(model, session="second", owner="node:other")

    async def main() -> None:
        await host.join(facts(model), is_paused=False)
        await host.receive("first", 7, contents[0])
        with pytest.raises(EngineFull, match="samples policy for node:run; stop that run"):
            await host.join(other, is_paused=False)
        host.leave("first")
        host._table.acquire(old)
        with pytest.raises(EngineFull, match="1 sequences still run"):
            await host.join(other, is_paused=False)
        host._table.release(old)
        assert (await host.join(other, is_paused=False)).versions == {}
        await host.receive("second", 7, contents[1])
        with pytest.raises(Unavailable, match="join again"):
            await host.receive("first", 8, contents[0])
        # the same run again, after a kill: at once
        again = facts(model, session="third", owner="node:other")
        assert (await host.join(again, is_paused=False)).versions == {}
        monkeypatch.setattr(host_module, "LEASE_SECONDS", -1.0)  # its trainer is silent
        await host.join(facts(model, session="fourth"), is_paused=False)

    asyncio.run(main())
    assert host._table.next_version("policy") == 1


def test_operators_and_trainers_leave_each_others_names_alone(
    device: DeviceThread, model: SharedModel, host: ReplicaHost
) -> None:
    start = device.call(partial(starting_adapter, ModelSettings(), model, 0)).result(60)
    store = AdapterStore(
        device, model, host._kept, root=None, max_bytes=10**6, max_names=8, start=start, owner=host.owner
    )
    asyncio.run(host.join(facts(model), is_paused=False))
    changes: list[Coroutine[Any, Any, object]] = [
        store.promote("policy", 0),
        store.upload("policy", b""),
        store.set_alias("a", "policy", 1),
    ]
    for change in changes:
        with pytest.raises(AdapterError, match="policy is trained by node:run"):
            asyncio.run(change)
    host._kept.state = ServingState(highest=MappingProxyType({"poet": 1}))
    with pytest.raises(Unavailable, match="poet is an adapter that operators have loaded"):
        asyncio.run(host.join(facts(model, policy="poet"), is_paused=False))
