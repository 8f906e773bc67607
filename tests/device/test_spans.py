"""The time line of the device: units of one kind are one span, and an answer stays small."""

import time

from parallm.device.governor import Governor
from parallm.device.spans import MAX_SHOWN, MAX_SPANS, Span, Spans
from parallm.device.thread import DeviceThread


def test_units_of_one_kind_are_joined_and_others_are_not() -> None:
    spans = Spans()
    for work, start, end in (
        ("rollout", 0.0, 1.0),
        ("rollout", 1.0002, 2.0),
        ("learning", 2.0, 3.0),
        ("rollout", 3.0, 4.0),
    ):
        spans.units.append((work, start, end))  # type: ignore[arg-type]
    spans.units.append(("rollout", 5.0, 6.0))
    assert spans.since(0) == [
        Span("rollout", 0.0, 2.0),
        Span("learning", 2.0, 3.0),
        Span("rollout", 3.0, 4.0),
        Span("rollout", 5.0, 6.0),
    ]
    assert [span.start for span in spans.since(4.5)] == [5.0]


def test_memory_and_answers_are_bounded_and_keep_the_newest() -> None:
    spans = Spans()
    for number in range(2 * MAX_SPANS):
        spans.units.append(("serving" if number % 2 else "rollout", number * 1.0, number + 0.5))
    found = spans.since(0)
    assert len(found) <= MAX_SHOWN
    assert found[-1].end == 2 * MAX_SPANS - 0.5


def test_the_device_thread_notes_its_units() -> None:
    device = DeviceThread(Governor(serving_share=0.7, engine_share=0.5))
    began = time.perf_counter()
    try:
        device.iterate(iter([1, 2])).result(5)
    finally:
        device.stop()
    assert {span.work for span in device.spans.since(began)} == {"learning"}
