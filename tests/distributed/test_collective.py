"""Collectives of several ranks: in one order everywhere, and none waits for ever. Runs are in `test_runs.py`."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from parallm.distributed import collective
from parallm.distributed.channel import Channel
from parallm.distributed.collective import Collective, _all_gather
from parallm.errors import ExchangeFailed
from tests.distributed.conftest import ring

Channels = Callable[..., list[Channel]]
LENGTHS = ((0, 0), (0, 5), (4096, 4097), (3, 3))
GATHERS = f"""
import mlx.core as mx
from parallm.distributed.collective import _all_gather
group = mx.distributed.init(strict=True, backend="ring")
for lengths in {LENGTHS}:
    parts = [bytes(range(rank, rank + 7)) * (length // 7 + 1) for rank, length in enumerate(lengths)]
    parts = [part[:length] for part, length in zip(parts, lengths)]
    found = _all_gather(parts[group.rank()], lengths, group, mx.default_stream(mx.cpu))
    assert found == parts, (found, parts)
"""


@pytest.fixture
def pair(
    channels: Channels, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[list[Collective]]:
    """The exchanges of two ranks in this process, which join no group; the parameter is the time limit."""
    monkeypatch.setattr(
        mx.distributed,
        "init",
        lambda *, strict, backend: SimpleNamespace(rank=lambda: backend, size=lambda: 2),
    )

    def join(channel: Channel) -> Collective:
        made = Collective(channel, channel.rank, exact=False)  # type: ignore[arg-type]  # the number is the group's
        made._gathers = True
        return made

    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(join, channels(2, timeout_seconds=getattr(request, "param", 10.0))))
    yield made
    for one in made:
        one.close()


def test_parts_of_any_length_come_as_they_were(tmp_path: Path) -> None:
    command = [sys.executable, "-c", GATHERS]
    ranks = [subprocess.Popen(command, env=environment) for environment in ring(tmp_path, 2)]
    assert [rank.wait(60) for rank in ranks] == [0, 0]


def test_all_ranks_make_collectives_in_one_order(pair: list[Collective], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[bytes]] = [[], []]

    def gather(part: bytes, lengths: Sequence[int], group: Any, _: mx.Stream) -> list[bytes]:
        assert list(lengths) == [len(part)] * 2
        made[group.rank()].append(part)
        return [part]

    monkeypatch.setattr(collective, "_all_gather", gather)

    def ask(rank: int, numbers: Sequence[int]) -> None:
        futures = [pair[rank].all_gather(f"gather {number}", str(number).encode()) for number in numbers]
        for future in futures:
            future.result(5)

    halves = range(20), range(20, 40)
    with ThreadPoolExecutor(4) as pool:  # two threads of each rank, and each asks in its own order
        for half in halves:
            pool.submit(ask, 0, half)
            pool.submit(ask, 1, half[::-1])
    assert len(made[0]) == 40
    assert made[0] == made[1]


@pytest.mark.parametrize("pair", [0.5], indirect=True)
def test_a_rank_that_has_given_up_takes_part_all_the_same(
    pair: list[Collective], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def gather(part: bytes, lengths: Sequence[int], group: Any, _: mx.Stream) -> list[bytes]:
        made.append(group.rank())
        return [part]

    monkeypatch.setattr(collective, "_all_gather", gather)
    assert pair[1].all_gather("x", b"").cancel()
    time.sleep(1)  # longer than the time limit, which is no longer its own
    assert pair[0].all_gather("x", b"").result(5) == [b""]
    for future in [one.all_gather("y", b"") for one in pair]:
        future.result(5)
    assert sorted(made) == [0, 0, 1, 1]


def test_the_end_of_the_exchange_ends_what_waits_behind_a_collective_that_hangs(
    pair: list[Collective], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def hang(*_: object) -> list[bytes]:
        has_begun.set()
        may_end.wait(20)
        return []

    monkeypatch.setattr(collective, "_all_gather", hang)
    waiting = [one.all_gather(label, b"1") for label in ("first", "second") for one in pair]
    assert has_begun.wait(5)
    pair[0].fail("rank 1 is gone")
    try:
        for future in waiting:
            with pytest.raises(ExchangeFailed, match="rank 1 is gone"):
                future.result(5)
    finally:
        may_end.set()


@pytest.mark.parametrize("pair", [0.5], indirect=True)
def test_a_collective_that_hangs_ends_the_exchange_after_the_time_limit(
    pair: list[Collective], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()

    def hang(*_: object) -> list[bytes]:
        may_end.wait(20)
        return []

    monkeypatch.setattr(collective, "_all_gather", hang)
    try:
        for future in [one.all_gather("groups", b"1") for one in pair]:
            with pytest.raises(ExchangeFailed, match=r"no answer in 0\.5 seconds .* to making groups"):
                future.result(5)
    finally:
        may_end.set()


@pytest.mark.parametrize("error", [RuntimeError("[nccl] a rank is gone"), ValueError("[nccl] a rank is gone")])
def test_an_error_of_a_collective_ends_the_exchange(
    pair: list[Collective], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> list[bytes]:
        raise error

    monkeypatch.setattr(collective, "_all_gather", fail)
    for future in [one.all_gather("groups", b"1") for one in pair]:
        with pytest.raises(ExchangeFailed, match=r"rank \d has failed in groups: \[nccl\]"):
            future.result(5)
    with pytest.raises(ExchangeFailed, match="has failed in groups"):
        pair[0].all_gather("later", b"").result(5)


def test_a_result_goes_when_nobody_needs_it_any_more(pair: list[Collective], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a collection: results are gradients on a GPU."""
    monkeypatch.setattr(collective, "_all_gather", lambda part, *_: [part])
    gc.disable()
    try:
        futures = [one.all_gather("x", b"1") for one in pair]
        for future in futures:
            future.result(5)
        seen = [weakref.ref(future) for future in futures]
        for one in pair:
            one.all_gather("y", b"")  # the threads let go of the last one
        del future, futures
        end = time.monotonic() + 5
        while any(ref() is not None for ref in seen) and time.monotonic() < end:
            time.sleep(0.01)
        assert [ref() for ref in seen] == [None, None]
    finally:
        gc.enable()


def test_a_rank_may_leave_while_another_makes_what_both_have_given_up(
    pair: list[Collective], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def gather(part: bytes, lengths: Sequence[int], group: Any, _: mx.Stream) -> list[bytes]:
        if group.rank() == 0:
            has_begun.set()
            may_end.wait(20)
        return [part]

    monkeypatch.setattr(collective, "_all_gather", gather)
    for one in pair:
        one.all_gather("x", b"1").cancel()
    assert has_begun.wait(5)
    try:
        pair[1].close()
        time.sleep(0.3)
        assert pair[0].failure is None
    finally:
        may_end.set()


def test_a_group_of_one_gathers_its_own() -> None:
    group = mx.distributed.init()
    assert _all_gather(b"12345", [5], group, mx.default_stream(mx.cpu)) == [b"12345"]
