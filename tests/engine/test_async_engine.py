import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from parallm.device.governor import Governor
from parallm.device.streams import DeviceStreams
from parallm.device.thread import DeviceThread
from parallm.engine.async_engine import AsyncEngine, Channel, joined
from parallm.engine.engine import Engine
from parallm.engine.settings import EngineSettings
from parallm.engine.warm_up import warm_up
from parallm.errors import ContextTooLong, EngineFull, EngineStopped, InvalidRequest, ParallmError, UnknownModel
from parallm.model.adapters.table import AdapterTable
from parallm.model.load import load_shared_model
from parallm.model.settings import ModelSettings
from parallm.model.shared_model import SharedModel
from parallm.types import Completion, GenerationRequest, TokenEvent, TopLogprob

Ask = Callable[..., GenerationRequest]
Work = Callable[[AsyncEngine, DeviceThread], Awaitable[None]]
PROMPT = (5, 300, 17, 9, 44, 2, 8)


@pytest.fixture(scope="module")
def device() -> Iterator[DeviceThread]:
    made = DeviceThread(Governor(serving_share=0.7, engine_share=0.5))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def core(device: DeviceThread, tiny_model: Callable[[str], Path]) -> tuple[SharedModel, DeviceStreams]:
    """The model and the streams, made on the device thread."""
    model = device.call(partial(load_shared_model, ModelSettings(path=str(tiny_model("llama"))))).result(60)
    return model, device.call(lambda: DeviceStreams(lambda _: None)).result(60)


@pytest.fixture
def with_engine(device: DeviceThread, core: tuple[SharedModel, DeviceStreams]) -> Callable[..., None]:
    """Run a coroutine function on an engine of its own."""

    def run(work: Work, *, async_scheduling: bool = False, **settings: Any) -> None:
        async def main() -> None:
            engine = AsyncEngine(device, asyncio.get_running_loop())
            build = partial(
                Engine, core[0], AdapterTable(), core[1], EngineSettings(**settings), emit=engine.emit,
                report=engine.report, async_scheduling=async_scheduling,
            )  # fmt: skip
            engine.attach(await asyncio.wrap_future(device.call(build)))
            await asyncio.wait_for(work(engine, device), 60)
            await idle(engine)

        asyncio.run(main())

    return run


async def idle(engine: AsyncEngine) -> None:
    """Wait until nothing runs or waits: every test leaves the engine so."""
    for _ in range(2000):
        stats = engine.stats()
        if stats.num_running == stats.num_waiting == 0:
            return
        await asyncio.sleep(0.002)
    raise AssertionError(f"rows are left: {engine.stats()}")


def test_streamed_events_add_up_to_the_completions(with_engine: Callable[..., None], ask: Ask) -> None:
    async def work(engine: AsyncEngine, _: DeviceThread) -> None:
        events = [event async for event in engine.stream(ask("a", PROMPT, 9, n=3, temperature=1.0, seed=5))]
        whole = await engine.generate(ask("b", PROMPT, 9, n=3, temperature=1.0, seed=5))
        for index, completion in enumerate(whole):
            own = [event for event in events if event.index == index]
            assert sum((event.tokens for event in own), ()) == completion.tokens
            assert sum((event.logprobs for event in own), ()) == completion.logprobs
            assert "".join(event.text for event in own) == completion.text
            assert [event.completion is not None for event in own] == [False] * (len(own) - 1) + [True]
        assert engine.stats().tokens_total == {"serving": 54, "rollout": 0}

    with_engine(work)


def test_a_consumer_that_was_elsewhere_gets_what_it_missed_in_one_event(
    with_engine: Callable[..., None], ask: Ask
) -> None:
    async def work(engine: AsyncEngine, _: DeviceThread) -> None:
        whole = await engine.generate(ask("whole", PROMPT, 12))
        events: list[TokenEvent] = []
        async for event in engine.stream(ask("a", PROMPT, 12)):
            if not events:
                await idle(engine)
                await asyncio.sleep(0)  # the last events are on their way here
            events.append(event)
        assert len(events) == 2
        assert sum((event.tokens for event in events), ()) == whole[0].tokens
        assert "".join(event.text for event in events) == whole[0].text

    with_engine(work)


def test_running_ahead_both_classes_and_the_learner_share_the_device(
    with_engine: Callable[..., None], ask: Ask
) -> None:
    requests = [ask(f"r{i}", PROMPT[: 4 + i % 3], 5 + i, n=2, temperature=1.0, seed=i) for i in range(12)]
    requests = [replace(one, traffic=("serving", "rollout")[place % 2]) for place, one in enumerate(requests)]
    made: list[list[tuple[int, ...]]] = []

    async def work(engine: AsyncEngine, device: DeviceThread) -> None:
        update = device.iterate(iter(range(50)))
        some = await asyncio.gather(*(engine.generate(request) for request in requests))
        made.append([completion.tokens for completions in some for completion in completions])
        assert await asyncio.wrap_future(update) == 49

    for async_scheduling in (True, False):
        with_engine(work, async_scheduling=async_scheduling)
    assert made[0] == made[1]
    assert [len(tokens) for tokens in made[0]] == [5 + i for i in range(12) for _ in range(2)]


def test_the_statistics_say_what_is_held_and_what_was_known_before(with_engine: Callable[..., None], ask: Ask) -> None:
    async def work(engine: AsyncEngine, _: DeviceThread) -> None:
        for turn in ("a", "b"):
            await engine.generate(ask(turn, PROMPT * 5, 9))
        await idle(engine)
        stats = engine.stats()
        assert stats.kv_bytes == stats.prefix_bytes == 512 * 32  # of 35 + 8 computed tokens; the second turn added none
        assert (stats.num_prefix_lookups, stats.num_prefix_hits, stats.num_preemptions) == (2, 1, 0)
        assert (stats.prompt_tokens_total, stats.cached_prompt_tokens_total) == (70, 16)
        assert stats.kv_bytes_limit == 10**6

    with_engine(work, kv_cache_bytes=10**6)


def test_a_request_that_could_never_fit_in_memory_is_refused_at_once(
    with_engine: Callable[..., None], ask: Ask
) -> None:
    async def work(engine: AsyncEngine, _: DeviceThread) -> None:
        with pytest.raises(ContextTooLong, match=r"the limit is 100000; .* raise engine.kv_cache_bytes"):
            await engine.generate(ask("a", PROMPT, 60))
        assert len(await engine.generate(ask("a", PROMPT, 9))) == 1

    with_engine(work, kv_cache_bytes=10**5)


def test_requests_given_together_come_back_in_order(with_engine: Callable[..., None], ask: Ask) -> None:
    async def work(engine: AsyncEngine, _: DeviceThread) -> None:
        requests = [ask(f"r{i}", PROMPT[: 4 + i % 3], 3 + i, n=1 + i % 2) for i in range(8)]
        made = await engine.generate_all(requests)
        assert [[(one.request_id, len(one.tokens)) for one in some] for some in made] == [
            [(f"r{i}", 3 + i)] * (1 + i % 2) for i in range(8)
        ]

    with_engine(work)


def test_closing_a_stream_frees_its_rows(with_engine: Callable[..., None], ask: Ask) -> None:
    async def work(engine: AsyncEngine, _: DeviceThread) -> None:
        stream = engine.stream(ask("a", PROMPT, 400, n=4))
        assert isinstance(await anext(stream), TokenEvent)
        await stream.aclose()
        await idle(engine)
        assert engine.stats().tokens_total["serving"] < 1600
        assert len(await engine.generate(ask("a", PROMPT, 4))) == 1

    with_engine(work)


def test_rows_are_listed_by_the_names_of_their_requests(with_engine: Callable[..., None], ask: Ask) -> None:
    async def work(engine: AsyncEngine, _: DeviceThread) -> None:
        request = ask("long", PROMPT, 400, n=2)
        stream = engine.stream(request)
        await anext(stream)
        rows = await engine.rows()
        expected = {("long", 0, "base", "serving"), ("long", 1, "base", "serving")}
        assert {(row.request_id, row.index, row.model, row.traffic) for row in rows} == expected
        assert all(row.is_running and 0 < row.num_sampled < row.max_tokens == 400 for row in rows)
        assert all(row.num_prompt_tokens == len(request.prompt_tokens) and row.seconds > 0 for row in rows)
        await stream.aclose()
        await idle(engine)
        assert await engine.rows() == []

    with_engine(work)


def test_cancelling_the_task_aborts_the_request(with_engine: Callable[..., None], ask: Ask) -> None:
    async def work(engine: AsyncEngine, _: DeviceThread) -> None:
        task = asyncio.create_task(engine.generate(ask("a", PROMPT, 400)))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(engine)
        assert engine.stats().tokens_total["serving"] < 400

    with_engine(work)


@pytest.mark.parametrize(
    ("prompt", "fields", "error", "message"),
    [
        ((), {}, InvalidRequest, "the prompt has no tokens"),
        ((5, 385), {}, InvalidRequest, "from 0 to 384"),
        ((-1, 5), {}, InvalidRequest, "from 0 to 384"),
        (PROMPT, {"max_tokens": 506}, ContextTooLong, "maximum context length is 512.*engine.max_context"),
        (PROMPT, {"max_tokens": -1}, InvalidRequest, "max_tokens is -1"),
        (
            PROMPT,
            {"max_tokens": 3, "min_tokens": 4},
            InvalidRequest,
            "min_tokens is 4 and must be from 0 to max_tokens",
        ),
        (PROMPT, {"presence_penalty": 2.5}, InvalidRequest, "presence_penalty is 2.5"),
        (PROMPT, {"frequency_penalty": float("nan")}, InvalidRequest, "frequency_penalty is nan"),
        (PROMPT, {"repetition_penalty": 0.0}, InvalidRequest, "repetition_penalty is 0.0"),
        (PROMPT, {"logit_bias": ((5, 101.0),)}, InvalidRequest, "from -100 to 100"),
        (PROMPT, {"logit_bias": ((385, 1.0),)}, InvalidRequest, "from 0 to 384"),
        (PROMPT, {"prompt_logprobs": -1}, InvalidRequest, "prompt_logprobs is -1"),
        (PROMPT, {"n": 0}, InvalidRequest, "n is 0"),
        (PROMPT, {"temperature": -0.5}, InvalidRequest, "temperature is -0.5"),
        (PROMPT, {"temperature": float("nan")}, InvalidRequest, "temperature is nan"),
        (PROMPT, {"top_p": 0.0}, InvalidRequest, "top_p is 0.0 and must be above 0"),
        (PROMPT, {"top_k": -1}, InvalidRequest, "top_k is -1"),
        (PROMPT, {"min_p": 1.5}, InvalidRequest, "min_p is 1.5"),
        (PROMPT, {"stop": ("a", "")}, InvalidRequest, "without empty strings"),
        (PROMPT, {"model": "policy@9"}, UnknownModel, "policy@9"),
        (PROMPT, {"model": "nothing"}, UnknownModel, "nothing"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_token(
    prompt: tuple[int, ...],
    fields: dict[str, Any],
    error: type[ParallmError],
    message: str,
    with_engine: Callable[..., None],
    ask: Ask,
) -> None:
    async def work(engine: AsyncEngine, _: DeviceThread) -> None:
        with pytest.raises(error, match=message):
            await engine.generate(ask("a", prompt, **fields))
        assert len(await engine.generate(ask("a", PROMPT, 2))) == 1

    with_engine(work)


def test_prompt_and_answer_may_fill_the_context(with_engine: Callable[..., None], ask: Ask) -> None:
    async def work(engine: AsyncEngine, _: DeviceThread) -> None:
        (made,) = await engine.generate(ask("a", PROMPT, 505))
        assert (len(made.tokens), made.finish_reason) == (505, "length")

    with_engine(work)


def test_a_name_in_use_is_refused_and_its_owner_goes_on(with_engine: Callable[..., None], ask: Ask) -> None:
    async def work(engine: AsyncEngine, _: DeviceThread) -> None:
        stream = engine.stream(ask("a", PROMPT, 60))
        events = [await anext(stream)]
        for names in ("a", "bb"):
            with pytest.raises(InvalidRequest, match="in use"):
                await engine.generate_all([ask(name, PROMPT, 5) for name in names])
        events += [event async for event in stream]
        assert sum(len(event.tokens) for event in events) == 60  # those that piled up came as one event

    with_engine(work)


def test_events_of_an_aborted_request_never_reach_the_next_of_its_name(
    with_engine: Callable[..., None], ask: Ask
) -> None:
    async def work(engine: AsyncEngine, _: DeviceThread) -> None:
        (alone,) = await engine.generate(ask("a", PROMPT[::-1], 9))
        stream = engine.stream(ask("a", PROMPT, 400))
        await anext(stream)
        time.sleep(0.05)  # the device goes on while the loop stands: its events wait on the way here
        await stream.aclose()
        events = [event async for event in engine.stream(ask("a", PROMPT[::-1], 9))]
        assert sum((event.tokens for event in events), ()) == alone.tokens
        assert {event.request_id for event in events} == {"a"}
        assert events[-1].completion == alone

    with_engine(work)


def test_a_full_queue_refuses_and_leaves_nothing_behind(with_engine: Callable[..., None], ask: Ask) -> None:
    async def work(engine: AsyncEngine, _: DeviceThread) -> None:
        with pytest.raises(EngineFull):
            await engine.generate_all([ask(f"r{i}", PROMPT, 5) for i in range(4)])
        await idle(engine)
        assert len(await engine.generate_all([ask(f"r{i}", PROMPT, 5) for i in range(3)])) == 3

    with_engine(work, max_waiting=3)


def test_rollouts_wait_in_whatever_number_and_take_no_place_of_clients(
    with_engine: Callable[..., None], ask: Ask
) -> None:
    async def work(engine: AsyncEngine, _: DeviceThread) -> None:
        rollouts = [replace(ask(f"r{i}", PROMPT, 5), traffic="rollout") for i in range(40)]
        sampling = asyncio.create_task(engine.generate_all(rollouts))
        more = asyncio.create_task(
            engine.generate_all([replace(one, request_id=f"{one.request_id}b") for one in rollouts])
        )
        await asyncio.sleep(0)
        clients = [ask(f"c{i}", PROMPT, 5) for i in range(3)]
        assert len(await engine.generate_all(clients)) == 3
        assert len(await sampling) == len(await more) == 40

    with_engine(work, max_waiting=3)


def test_a_failed_step_reaches_its_requests_and_the_next_one_works(
    with_engine: Callable[..., None], ask: Ask, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(engine: AsyncEngine, _: DeviceThread) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(SharedModel, "hidden", lambda *_: 1 / 0)
            with pytest.raises(EngineStopped, match="failed: division by zero"):
                await engine.generate_all([ask("a", PROMPT, 5), ask("b", PROMPT, 5)])
        assert len(await engine.generate(ask("a", PROMPT, 5))) == 1
        assert engine.is_alive

    with_engine(work)
    assert "a serving step failed" in caplog.text


def test_nothing_is_generated_before_the_model_is_there(device: DeviceThread, ask: Ask) -> None:
    async def main() -> None:
        engine = AsyncEngine(device, asyncio.get_running_loop())
        assert not engine.is_alive
        with pytest.raises(EngineStopped, match="wait until the model is loaded"):
            await engine.generate(ask("a", PROMPT))

    asyncio.run(main())


def test_stopping_the_device_ends_what_runs_and_refuses_what_comes(tiny_model: Callable[[str], Path], ask: Ask) -> None:
    async def main(device: DeviceThread) -> None:
        engine = AsyncEngine(device, asyncio.get_running_loop())
        build = partial(build_engine, tiny_model("llama"), engine)
        engine.attach(await asyncio.wrap_future(device.call(build)))
        stream = engine.stream(ask("a", PROMPT, 400))
        await anext(stream)
        threading.Thread(target=device.stop).start()
        with pytest.raises(EngineStopped, match="restart the process"):
            async for _ in stream:
                pass
        assert not engine.is_alive
        with pytest.raises(EngineStopped):
            await engine.generate(ask("b", PROMPT))

    device = DeviceThread(Governor(serving_share=0.7, engine_share=0.5))
    try:
        asyncio.run(asyncio.wait_for(main(device), 60))
    finally:
        device.stop()


def build_engine(folder: Path, engine: AsyncEngine) -> Engine:
    model = load_shared_model(ModelSettings(path=str(folder)))
    streams = DeviceStreams(lambda _: None)
    return Engine(model, AdapterTable(), streams, EngineSettings(), emit=engine.emit, report=engine.report)


def test_a_cancelled_request_answers_with_what_it_has(with_engine: Callable[..., None], ask: Ask) -> None:
    async def work(engine: AsyncEngine, device: DeviceThread) -> None:
        events = engine.stream(ask("r", PROMPT, 400))
        first = [await anext(events) for _ in range(3)]
        assert await engine.cancel(["r", "unknown"]) == 1
        rest = [event async for event in events]
        completion = rest[-1].completion
        assert completion is not None
        assert completion.finish_reason == "abort"
        assert completion.tokens == tuple(token for event in (*first, *rest) for token in event.tokens)

    with_engine(work)


def test_frozen_requests_go_on_after_their_release(with_engine: Callable[..., None], ask: Ask) -> None:
    async def work(engine: AsyncEngine, device: DeviceThread) -> None:
        alone = (await engine.generate(ask("alone", PROMPT, 30)))[0]
        await engine.pause()
        task = asyncio.create_task(engine.generate(ask("r", PROMPT, 30)))
        await asyncio.sleep(0.1)
        assert (task.done(), engine.stats().num_waiting) == (False, 1)
        await engine.resume()
        assert (await task)[0].tokens == alone.tokens

    with_engine(work)


def test_warming_up_computes_all_numbers_of_rows_and_leaves_nothing(with_engine: Callable[..., None]) -> None:
    async def work(engine: AsyncEngine, _: DeviceThread) -> None:
        seconds = await warm_up(engine.generate, 7, model="base", rows=6, prompt_tokens=40)
        assert list(seconds) == [1, 2, 4, 6]
        assert min(seconds.values()) > 0
        await idle(engine)
        stats = engine.stats()
        assert stats.tokens_total["serving"] == 4 * (1 + 2 + 4 + 6)
        assert (stats.prompt_tokens_total, stats.cached_prompt_tokens_total) == (4 * 40, 0)

    with_engine(work, max_rows=6)


def token_event(name: str, index: int, token: int, completion: Completion | None = None) -> TokenEvent:
    return TokenEvent(
        request_id=name,
        index=index,
        tokens=(token,),
        logprobs=(-float(token),),
        top_logprobs=((TopLogprob(token, -1.0),),),
        text=f"<{token}>",
        completion=completion,
    )


END = Completion(
    request_id="a",
    index=0,
    tokens=(1, 2),
    logprobs=(-1.0, -2.0),
    top_logprobs=((), ()),
    text="<1><2>",
    finish_reason="stop",
    weight_versions=(),
)


def test_what_piles_up_of_one_completion_becomes_one_event() -> None:
    first, other, last = token_event("a", 0, 1), token_event("a", 1, 7), token_event("a", 0, 2, END)
    one, two = joined([first, other, last])
    assert (one.tokens, one.logprobs, one.text, one.completion) == ((1, 2), (-1.0, -2.0), "<1><2>", END)
    assert one.top_logprobs == ((TopLogprob(1, -1.0),), (TopLogprob(2, -1.0),))
    assert two is other


def test_completions_of_two_requests_stay_apart() -> None:
    assert joined([token_event("a", 0, 1), token_event("b", 0, 2)]) == [token_event("a", 0, 1), token_event("b", 0, 2)]


def test_events_before_an_error_are_received_before_it() -> None:
    async def work() -> None:
        channel = Channel()
        channel.put(token_event("a", 0, 1))
        channel.put(EngineStopped("it ends"))
        assert await channel.received() == [token_event("a", 0, 1)]
        with pytest.raises(EngineStopped, match="it ends"):
            await channel.received()

    asyncio.run(work())


def test_coalesced_events_come_together_but_the_first_and_the_last(with_engine: Callable[..., None], ask: Ask) -> None:
    async def work(engine: AsyncEngine, _: DeviceThread) -> None:
        async def read(name: str) -> list[TokenEvent]:
            return [event async for event in engine.stream(ask(name, PROMPT, 40, n=2, temperature=1.0, seed=5))]

        whole = await engine.generate(ask("whole", PROMPT, 40, n=2, temperature=1.0, seed=5))
        for seconds in (3600.0, 0.001, 0.0):
            engine.coalesce(seconds)
            for events in await asyncio.gather(*map(read, "ab")):
                for completion in whole:
                    own = [event for event in events if event.index == completion.index]
                    assert sum((event.tokens for event in own), ()) == completion.tokens
                    assert sum((event.logprobs for event in own), ()) == completion.logprobs
                    assert "".join(event.text for event in own) == completion.text
                    assert own[-1].completion is not None
                    assert own[-1].completion.text == completion.text
                    if seconds > 1:
                        assert [len(event.tokens) for event in own] == [1, 39]
                    if not seconds:
                        assert len(own) > 2
        assert not engine.attached._outbox._held

    with_engine(work)


def test_held_tokens_come_before_other_work_that_may_take_long(with_engine: Callable[..., None], ask: Ask) -> None:
    async def work(engine: AsyncEngine, device: DeviceThread) -> None:
        engine.coalesce(3600)
        events = engine.stream(ask("a", PROMPT, 200))
        num_tokens = len((await anext(events)).tokens)
        held = threading.Event()

        def units() -> Iterator[None]:  # of a learner, which ends once it has seen the tokens
            while not held.is_set():
                time.sleep(0.002)
                yield

        update = device.iterate(units())
        while num_tokens < 20:
            num_tokens += len((await asyncio.wait_for(anext(events), 5)).tokens)
        assert num_tokens < 200
        held.set()
        await asyncio.wrap_future(update)
        await events.aclose()

    with_engine(work)


def test_a_cancelled_or_aborted_stream_leaves_no_held_events(with_engine: Callable[..., None], ask: Ask) -> None:
    async def work(engine: AsyncEngine, _: DeviceThread) -> None:
        engine.coalesce(3600)
        cancelled = engine.stream(ask("a", PROMPT, 480))
        aborted = engine.stream(ask("b", PROMPT, 480))
        events = [await anext(cancelled)]
        await anext(aborted)
        while engine.stats().tokens_total["serving"] < 40:
            await asyncio.sleep(0.001)
        await aborted.aclose()
        await engine.cancel(["a"])
        events += [event async for event in cancelled]
        completion = events[-1].completion
        assert completion is not None
        assert completion.finish_reason == "abort"
        assert sum((event.tokens for event in events), ()) == completion.tokens
        assert "".join(event.text for event in events) == completion.text
        await idle(engine)
        assert not engine.attached._outbox._held

    with_engine(work)


def test_tokens_before_an_error_come_before_it(
    with_engine: Callable[..., None], ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(engine: AsyncEngine, _: DeviceThread) -> None:
        engine.coalesce(3600)
        num_steps, decode = 0, Engine._decode

        def failing(self: Engine, traffic: Any) -> bool:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 12:
                raise ValueError("a step fails")
            return decode(self, traffic)

        monkeypatch.setattr(Engine, "_decode", failing)
        tokens: list[int] = []

        async def read() -> None:
            async for event in engine.stream(ask("a", PROMPT, 100)):
                tokens.extend(event.tokens)

        with pytest.raises(EngineStopped, match="a step fails"):
            await read()
        assert len(tokens) >= 10

    with_engine(work)


def test_streams_may_be_coalesced_before_there_is_an_engine_and_after_its_end() -> None:
    async def work() -> None:
        device = DeviceThread(Governor(serving_share=0.7, engine_share=0.5))
        engine = AsyncEngine(device, asyncio.get_running_loop())
        engine.coalesce(0.001)
        await asyncio.sleep(0.01)
        device.stop()
        await asyncio.sleep(0.01)
        engine.coalesce(0)

    asyncio.run(work())


def test_held_events_come_when_streams_are_coalesced_no_longer(with_engine: Callable[..., None], ask: Ask) -> None:
    async def work(engine: AsyncEngine, _: DeviceThread) -> None:
        engine.coalesce(3600)
        events = engine.stream(ask("a", PROMPT, 60))
        num_tokens = len((await anext(events)).tokens)
        while engine.stats().tokens_total["serving"] < 10:
            await asyncio.sleep(0.001)
        await engine.pause()
        engine.coalesce(0)
        while num_tokens < 10:
            num_tokens += len((await asyncio.wait_for(anext(events), 5)).tokens)
        await engine.resume()
        async for event in events:
            num_tokens += len(event.tokens)
        assert num_tokens == 60

    with_engine(work)
