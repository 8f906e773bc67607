"""Events reach every watcher in order, and none that is slow can hold up a run or fill its memory."""

import asyncio
import json
import logging
import threading
from typing import Any

import pytest

from parallm.metrics import news as news_module
from parallm.metrics.news import MAX_EVENTS, Event, News, Watcher
from parallm.metrics.pulse import Pulse
from parallm.metrics.recent_log import MAX_CHARACTERS, MAX_LINES, RecentLog


def told(event: Event | None) -> tuple[str, Any]:
    assert event is not None
    kind, _, data = event.text.decode().partition("\n")
    return kind.removeprefix("event: "), json.loads(data.removeprefix("data: ").strip())


async def rest(watcher: Watcher) -> list[tuple[str, Any]]:
    found = []
    while (event := await watcher.next(0)) is not None:
        found.append(told(event))
    return found


def test_each_watcher_gets_all_events_in_their_order() -> None:
    async def run() -> list[list[Any]]:
        news = News()
        with news.watch() as first, news.watch() as second:
            for step in range(3):
                news.tell("step", {"step": step}, "policy")
            return [await rest(first), await rest(second)]

    one = [("step", {"policy": "policy", "step": step}) for step in range(3)]
    assert asyncio.run(run()) == [one, one]


def test_a_slow_watcher_is_told_that_it_lost_events_and_keeps_few() -> None:
    async def run() -> list[Any]:
        news = News()
        with news.watch() as slow:
            for step in range(10 * MAX_EVENTS):
                news.tell("step", {"step": step})
            return await rest(slow)

    found = asyncio.run(run())
    assert len(found) <= MAX_EVENTS
    assert found[0] == ("lost", {})
    assert found[-1][1]["step"] == 10 * MAX_EVENTS - 1


def test_a_later_status_takes_the_place_of_one_that_waits_but_of_no_other_policys() -> None:
    async def run() -> list[Any]:
        news = News()
        with news.watch() as watcher:
            for step in range(3):
                news.tell("status", {"step": step}, "a")
                news.tell("status", {"step": step}, "b")
            return await rest(watcher)

    assert asyncio.run(run()) == [
        ("status", {"policy": "a", "step": 2}),
        ("status", {"policy": "b", "step": 2}),
    ]


def test_without_watchers_nothing_is_made_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(news_module, "event_of", None)
    News().tell("step", {"step": 1})
    News().tell_soon("log", lambda: {"text": "a"})


def test_a_watcher_that_must_leave_gets_one_last_event_and_no_other() -> None:
    async def run() -> list[Any]:
        news = News()
        with news.watch() as watcher:
            news.tell("step", {"step": 1})
            news.end("draining")
            news.tell("step", {"step": 2})
            found = [told(await watcher.next(1))]
            with pytest.raises(StopAsyncIteration):
                await watcher.next(1)
            return found

    assert asyncio.run(run()) == [("bye", {"reason": "draining"})]


@pytest.mark.parametrize("text", ["\ud800 alone", "line\nbreak \u2028", "\x00", "NaN"])
def test_any_text_is_one_line_of_json(text: str) -> None:
    async def run() -> list[Any]:
        news = News()
        with news.watch() as watcher:
            news.tell("log", {"text": text, "number": float("nan")})
            return await rest(watcher)

    assert asyncio.run(run()) == [("log", {"policy": "", "text": text, "number": None})]


def test_log_records_of_other_threads_are_kept_and_told() -> None:
    logger = logging.getLogger("parallm.test_news")

    async def run() -> tuple[list[Any], list[Any]]:
        news = News()
        log = RecentLog(news)
        with log.listening(), news.watch() as watcher:
            writer = threading.Thread(target=lambda: logger.warning("from a thread: %s", "x" * 2 * MAX_CHARACTERS))
            writer.start()
            writer.join()
            logging.getLogger("parallm.progress").info("a step, which the page has already")
            await asyncio.sleep(0)
            return await rest(watcher), log.lines()

    events, lines = asyncio.run(run())
    assert [kind for kind, _ in events] == ["log"]
    assert [line.text for line in lines] == [events[0][1]["text"]]
    assert len(lines[0].text) == MAX_CHARACTERS
    assert lines[0].text.endswith("has all of it)")
    assert (lines[0].level, lines[0].logger) == ("WARNING", "parallm.test_news")


def test_the_log_keeps_the_newest_lines() -> None:
    log = RecentLog(News())
    with log.listening():
        for number in range(MAX_LINES + 5):
            logging.getLogger("parallm.test_news").warning("%d", number)
    assert [log.lines()[0].text, log.lines()[-1].text] == ["5", str(MAX_LINES + 4)]
    logging.getLogger("parallm.test_news").warning("after the end")
    assert log.lines()[-1].text == str(MAX_LINES + 4)


def test_the_pulse_keeps_seconds_and_minutes_and_gaps() -> None:
    number = [0]
    pulse = Pulse(
        lambda: {"running": number[0], "tokens": {"serving": 2 * number[0]}, "by_version": {"p@1": 1}}, News()
    )
    begin = 2_000_000_000.0
    for second in range(1000):
        number[0] = second
        pulse.beat(begin + second)
    by_second = pulse._by_second.since(begin + 990, 1)
    assert by_second.times.tolist() == [begin + second for second in range(990, 1000)]
    assert by_second.columns["tokens/serving"].tolist() == [2.0 * second for second in range(990, 1000)]
    assert set(by_second.columns) == {"running", "tokens/serving"}
    assert len(pulse._by_second.since(0, 1).times) == 900
    assert pulse._by_minute.since(0, 60).times.tolist() == [begin + 60 * minute for minute in range(17)]


def test_what_cannot_be_measured_is_said_once_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def measure() -> dict[str, Any]:
        raise RuntimeError("the engine has stopped")

    pulse = Pulse(measure, News())
    for second in range(3):
        pulse.beat(float(second))
    assert [record.message for record in caplog.records] == [
        "the pulse of this process cannot be measured: RuntimeError: the engine has stopped"
    ]
