"""Gathers over connections: whole, in any order, and never for ever."""

import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from parallm.distributed import channel as channel_module
from parallm.distributed.channel import GREETING_SECONDS, HEADER, Channel, Link, connect, listen, write_frame
from parallm.distributed.identity import Address
from parallm.errors import ExchangeFailed
from tests.distributed.conftest import free_ports

Channels = Callable[..., list[Channel]]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_ranks_get_the_parts_of_all_ranks(size: int, channels: Channels) -> None:
    made = channels(size)
    chance = random.Random(size)
    for number in range(50):
        parts = [chance.randbytes(chance.choice((0, 10, 70_000))) for _ in made]
        futures = [channel.gather(f"round {number}", part) for channel, part in zip(made, parts, strict=True)]
        assert [future.result(5) for future in futures] == [parts] * size


def test_ranks_may_begin_labels_in_different_orders(channels: Channels) -> None:
    first, second = channels(2)
    ours = {label: first.gather(label, label.encode()) for label in ("a", "b")}
    theirs = {label: second.gather(label, label.upper().encode()) for label in ("b", "a")}
    for label in ("a", "b"):
        assert ours[label].result(5) == theirs[label].result(5) == [label.encode(), label.upper().encode()]


def test_a_rank_without_a_word_fails_all_that_wait_and_all_later_calls(channels: Channels) -> None:
    made = channels(3)
    waiting = [made[0].gather("x", b""), made[2].gather("x", b"")]
    for link in made[1]._links.values():
        link._connection.close()  # as the kernel does for a killed process
        link._connection.detach()
    for link in made[0]._links.values():
        if link.rank == 1:
            link._connection.shutdown(2)
    for future in waiting:
        with pytest.raises(ExchangeFailed, match="rank 1 is gone"):
            future.result(5)
    with pytest.raises(ExchangeFailed, match="rank 1 is gone"):
        made[0].gather("y", b"").result(5)


def test_a_failure_is_awaited_no_longer_than_it_takes(channels: Channels) -> None:
    first, second = channels(2)
    began = time.monotonic()
    first.await_failure(0.2)
    assert not first.failure
    assert time.monotonic() - began >= 0.2
    threading.Timer(0.1, second.close, ["it was killed"]).start()
    began = time.monotonic()
    first.await_failure(60)
    assert str(first.failure) == "rank 1 has ended: it was killed"
    assert time.monotonic() - began < 30


def test_a_rank_that_leaves_says_why(channels: Channels) -> None:
    first, second = channels(2)
    waiting = first.gather("x", b"")
    second.close("ConfigError: no such thing")
    with pytest.raises(ExchangeFailed, match="rank 1 has ended: ConfigError: no such thing"):
        waiting.result(5)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_ended_well_is_missed_only_where_it_is_needed(late: int, channels: Channels) -> None:
    made = channels(2)
    made[1 - late].close()
    time.sleep(0.1)
    assert made[late].failure is None
    with pytest.raises(ExchangeFailed, match=f"rank {1 - late} ended before the others"):
        made[late].gather("x", b"").result(5)


def test_a_silent_rank_is_an_error_after_the_time_limit(channels: Channels) -> None:
    first, second = channels(2, timeout_seconds=0.3)
    with pytest.raises(ExchangeFailed, match=r"no answer in 0.3 seconds .* to x, which waited for rank 1"):
        first.gather("x", b"").result(5)
    with pytest.raises(ExchangeFailed, match="no answer"):
        second.gather("x", b"").result(5)


def test_a_gather_that_was_given_up_is_no_silent_rank(channels: Channels) -> None:
    first, second = channels(2, timeout_seconds=0.3)
    assert first.gather("old", b"").cancel()
    time.sleep(1)
    futures = [channel.gather("new", b"") for channel in (first, second)]
    assert [future.result(5) for future in futures] == [[b"", b""]] * 2


def test_what_was_asked_for_early_has_its_time_as_long_as_all_are_there(channels: Channels) -> None:
    """A gather of a step ahead waits for three times the limit, while others end."""
    first, second = channels(2, timeout_seconds=0.5)
    ahead = first.gather("groups of the next step", b"a")
    for number in range(6):
        time.sleep(0.25)
        for future in [channel.gather(f"step {number}", b"") for channel in (first, second)]:
            assert future.result(5) == [b"", b""]
    assert second.gather("groups of the next step", b"b").result(5) == ahead.result(5) == [b"a", b"b"]


def test_a_guarded_block_that_hangs_fails_its_future(channels: Channels) -> None:
    first, _ = channels(2, timeout_seconds=0.3)
    waiting = first.gather("other", b"")
    with first.guarded("a sum", waiting), pytest.raises(ExchangeFailed, match="no answer"):
        waiting.result(5)


def test_what_was_flushed_is_with_the_system() -> None:
    ours, theirs = socket.socketpair()
    link = Link(ours, 1)
    link.start(lambda *_: None, lambda _: None)
    for number in range(20):
        link.send(f"label {number}", b"x" * 1000)
    link.flush()
    theirs.setblocking(False)
    expected = 20 * (HEADER.size + 1000) + sum(len(f"label {number}") for number in range(20))
    assert len(theirs.recv(1 << 20, socket.MSG_PEEK)) == expected
    theirs.close()
    link.close()


def test_ranks_meet_before_any_goes_on(channels: Channels) -> None:
    first, second = channels(2)
    waiting = threading.Thread(target=first.meet, args=("x",))
    waiting.start()
    time.sleep(0.1)
    assert waiting.is_alive()
    second.meet("x")
    waiting.join(5)
    assert not waiting.is_alive()


def joined(address: Address) -> socket.socket:
    """A connection to rank 0, which may begin to listen a little later."""
    deadline = time.monotonic() + 5
    while True:
        try:
            return socket.create_connection((address.host, address.port), 5)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_connections_that_are_no_workers_keep_no_worker_out(caplog: pytest.LogCaptureFixture) -> None:
    address = Address("127.0.0.1", free_ports(1)[0])
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        listening = pool.submit(listen, address, 2, 30.0)
        silent = joined(address)
        joined(address).close()
        with joined(address) as browser:
            browser.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with suppress(ConnectionResetError):
                assert not browser.recv(1)
        with joined(address) as other:
            write_frame(other, "states", b"{}")
            assert not other.recv(1)
        worker = pool.submit(connect, address, b"rank 1", 30.0)
        ((connection, hello),) = listening.result(10)
        write_frame(connection, "welcome", b"rank 0")
        assert (hello, worker.result(5)[1]) == (b"rank 1", b"rank 0")
        assert time.monotonic() - began < GREETING_SECONDS
    for _ in range(1000):  # each is greeted in a thread of its own
        if len(found := [record for record in caplog.records if "is no worker's" in record.message]) == 3:
            break
        time.sleep(0.01)
    for end in (silent, connection, worker.result()[0]):
        end.close()
    assert len(found) == 3


def test_a_silent_connection_is_closed_after_a_short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "GREETING_SECONDS", 0.1)
    address = Address("127.0.0.1", free_ports(1)[0])
    with ThreadPoolExecutor(1) as pool:
        listening = pool.submit(listen, address, 2, 2.0)
        with joined(address) as silent:
            silent.settimeout(1)
            assert not silent.recv(1)
        with pytest.raises(ExchangeFailed, match="1 of 2 workers have not come"):
            listening.result(5)


def test_all_ranks_hear_of_gathers_in_one_order(channels: Channels) -> None:
    made = channels(3)
    heard: list[list[str]] = [[] for _ in made]
    labels = [str(number) for number in range(40)]

    def ask(rank: int, shuffled: list[str]) -> None:
        futures = [
            made[rank].gather(label, b"", lambda _, label=label: heard[rank].append(label))  # type: ignore[misc]
            for label in shuffled
        ]
        for future in futures:
            future.result(5)

    chance = random.Random(0)
    with ThreadPoolExecutor(6) as pool:
        for rank in range(3):
            for half in (labels[:20], labels[20:]):
                pool.submit(ask, rank, chance.sample(half, len(half)))
    assert sorted(heard[0]) == sorted(labels)
    assert heard[0] == heard[1] == heard[2]


def test_who_has_given_up_hears_of_a_gather_all_the_same(channels: Channels) -> None:
    first, second = channels(2, timeout_seconds=0.5)
    heard: list[list[bytes]] = []
    assert second.gather("x", b"theirs", heard.append).cancel()
    time.sleep(1)  # longer than the time limit
    assert first.gather("x", b"ours").result(5) == [b"ours", b"theirs"]
    after = second.gather("y", b"")
    first.gather("y", b"")
    after.result(5)
    assert heard == [[b"ours", b"theirs"]]


def cut_off(channel: Channel) -> None:
    """End its connection as that of a killed process ends."""
    channel._links[0]._connection.shutdown(socket.SHUT_RDWR)


def test_posts_come_to_rank_0_in_the_order_of_each_rank_and_no_answer_goes_back(channels: Channels) -> None:
    leader, *others = channels(3)
    for number in (b"1", b"2"):
        for channel in others:
            channel.post(number)
    came = [leader.take_post(5.0) for _ in range(4)]
    assert sorted(filter(None, came)) == [(rank, number) for rank in (1, 2) for number in (b"1", b"2")]
    assert [post for post in came if post and post[0] == 2] == [(2, b"1"), (2, b"2")]
    assert leader.take_post(0.01) is None
    assert leader.take_post(0.0) is None
    assert all(channel.take_post(0.01) is None for channel in others)


@pytest.mark.parametrize("ends", [Channel.close, lambda channel: channel.fail("over"), cut_off])
def test_the_last_post_of_a_rank_is_followed_by_its_end(ends: Callable[[Channel], None], channels: Channels) -> None:
    leader, other = channels(2)
    other.post(b"last")
    other._links[0].flush()
    ends(other)
    assert [leader.take_post(60.0) for _ in range(2)] == [(1, b"last"), (1, None)]


@pytest.mark.parametrize("ends", [lambda channel: channel.fail("over"), cut_off])
def test_a_rank_that_is_lost_after_the_end_is_no_failure(ends: Callable[[Channel], None], channels: Channels) -> None:
    leader, other, third = channels(3)
    leader.finish()
    ends(other)
    if ends is cut_off:
        assert leader.take_post(60.0) == (1, None)
    third.post(b"late")
    assert leader.take_post(60.0) == (2, b"late")
    assert leader.failure is None
    third.close()
    assert leader.take_post(60.0) == (2, None)
