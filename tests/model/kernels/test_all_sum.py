"""The protocol of `peer_sum.cuh`, thread by thread in any order, and the memory that ranks share."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import mlx.core as mx
import pytest

from parallm.model.kernels import all_sum as module
from parallm.model.kernels.all_sum import open_peer_memory
from parallm.model.kernels.driver import CudaError

WARPS, THREADS = 3, 2


@dataclass
class Part:
    """A rank's part of the memory, and its results."""

    words: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """By turn, rank that wrote it, and index; others are empty."""
    calls: list[int] = field(default_factory=lambda: [0] * WARPS)
    results: list[list[int | None]] = field(default_factory=list)


def thread(parts: Sequence[Part], rank: int, index: int, call: int, value: int | None, turns: int) -> Iterator[bool]:
    """What a thread of a kernel does, which has nothing to sum without a value; yields whether it has moved on."""
    ranks, own = len(parts), parts[rank].words
    others = [(rank + step) % ranks for step in range(1, ranks)]
    if value is not None:
        for other in others:
            assert (call % turns, rank, index) not in parts[other].words, "nobody has read it"
            parts[other].words[call % turns, rank, index] = value
            yield True
    for other in others:
        own.pop(((call - 1) % turns, other, index), None)
        yield True
    if value is None:
        return
    total = value
    for other in others:
        while (call % turns, other, index) not in own:
            yield False
        total += own[call % turns, other, index]
        yield True
    parts[rank].results[-1][index] = total


def launches(
    parts: Sequence[Part], rank: int, sizes: Sequence[int], order: random.Random, turns: int
) -> Iterator[bool]:
    """The kernels of a rank, one after the other, each with its threads in any order."""
    for number, size in enumerate(sizes):
        part = parts[rank]
        part.results.append([None] * size)
        running: list[Iterator[bool]] = []
        for warp in range(-(-size // THREADS)):
            part.calls[warp] += 1
            running += [
                thread(parts, rank, index, part.calls[warp], value_of(rank, number, index, size), turns)
                for index in range(warp * THREADS, (warp + 1) * THREADS)
            ]
        while running:
            chosen = order.choice(running)
            moved = next(chosen, None)
            if moved is None:
                running.remove(chosen)
            yield moved is not False


def value_of(rank: int, number: int, index: int, size: int) -> int | None:
    return 10**rank * (1 + number * 7 + index) if index < size else None


def run(ranks: int, sizes: Sequence[int], seed: int, *, turns: int = module.TURNS) -> bool:
    """Whether all ranks get all sums, in a random order of all threads."""
    order = random.Random(seed)
    parts = [Part() for _ in range(ranks)]
    running = {rank: launches(parts, rank, sizes, order, turns) for rank in range(ranks)}
    idle = 0
    while running and idle < 20_000:
        rank = order.choice(list(running))
        moved = next(running[rank], None)
        if moved is None:
            del running[rank]
        idle = 0 if moved is not False else idle + 1
    wanted = [
        [sum(value_of(rank, number, index, size) or 0 for rank in range(ranks)) for index in range(size)]
        for number, size in enumerate(sizes)
    ]
    return not running and all(part.results == wanted for part in parts)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_gets_every_sum_in_any_order_of_threads(ranks: int) -> None:
    order = random.Random(1)
    for seed in range(40):
        sizes = [order.randint(1, WARPS * THREADS) for _ in range(12)]
        assert run(ranks, sizes, seed), (seed, sizes)


@pytest.mark.parametrize("turns", [1, 2])
def test_with_fewer_turns_words_are_lost(turns: int) -> None:
    def is_right(seed: int) -> bool:
        with suppress(AssertionError):
            return run(2, [6] * 12, seed, turns=turns)
        return False

    assert not all(map(is_right, range(40)))


class Driver:
    """Stands in for CUDA's."""

    fails_at = ""

    def allocate(self, size: int) -> int:
        assert size == module.num_bytes(2)
        return self._or_fail("allocate", 1000)

    def handle(self, address: int) -> bytes:
        self._or_fail("handle", 0)
        return b"handle of %d" % address

    def open(self, handle: bytes) -> int:
        return self._or_fail("open", 2000)

    def _or_fail(self, name: str, value: int) -> int:
        if name == self.fails_at:
            raise CudaError(f"{name} answers CUDA's error 217")
        return value


@pytest.fixture
def open_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """The memory of rank 1, where the driver fails at a step, or the other rank does."""

    def make(fails_at: str = "", other: Callable[[bytes], bytes] = lambda own: own) -> object:
        monkeypatch.setattr(Driver, "fails_at", fails_at)
        monkeypatch.setattr(module, "_Driver", Driver)
        monkeypatch.setattr(module, "has_kernels", lambda: True)
        return open_peer_memory(1, 2, lambda own: [other(own), own])

    return make


def test_a_rank_knows_its_own_part_and_opens_the_others(open_memory: Callable[..., module.PeerMemory]) -> None:
    memory = open_memory()
    assert memory.addresses.tolist()[:2] == [2000, 1000]
    assert (memory.rank, memory.size) == (1, 2)


@pytest.mark.parametrize("step", ["allocate", "handle", "open"])
def test_gpus_that_cannot_reach_each_other_are_left_to_nccl(
    open_memory: Callable[..., object], step: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_memory(step, other=lambda own: b"other") is None
    assert "sums between GPUs go through NCCL" in caplog.text


def test_all_ranks_go_through_nccl_if_one_does(open_memory: Callable[..., object]) -> None:
    assert open_memory(other=lambda own: b"") is None


def test_only_what_the_memory_has_room_for_is_summed() -> None:
    assert module.fits(mx.zeros((128, 1, 8192), mx.bfloat16))
    assert not module.fits(mx.zeros((129, 1, 8192), mx.bfloat16))
    assert not module.fits(mx.zeros((1, 1, 3), mx.bfloat16))
    assert not module.fits(mx.zeros((1, 1, 8), mx.int32))
