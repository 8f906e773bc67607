"""Sums over ranks as the sources that run, on a CPU: each rank's kernels in a thread, and memory that all share."""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Barrier

import mlx.core as mx
import numpy as np
import pytest

import parallm.model.kernels.peer_trial as trial
from parallm.model.kernels import all_sum, sum_add_norm
from parallm.model.kernels.all_sum import EMPTY, PeerMemory, num_bytes
from parallm.model.kernels.compiler import Defines
from tests.model.kernels.cuda_on_cpu import CpuKernels, NeverEnds, needs_compiler

HIDDEN, SPLITS, EPS, SEED = 512, 2, 1e-5, 3
SHORT = 40  # five vectors
FIRST_CALL = 0xFFFFFFFC
"""The count of calls, which begins anew within `CALLS`."""
CALLS = (
    *(("norm", 3), ("norm", 1), ("sum", 3), ("short sum", 1), ("wide sum", 1), ("norm", 2), ("short sum", 1)),
    *(("sum", 1), ("sum", 1), ("norm", 3), ("norm", 3), ("norm", 3), ("sum", 1), ("short sum", 1)),
)
"""The kernel, and the rows: those of one after the other share words."""
MUTANTS = {
    "nothing is waited for": ("sum_add_norm", "while (waits)", "while (false)"),
    "the last quarter is not waited for": (
        "sum_add_norm",
        "quarter < 4; quarter++)\n        w",
        "quarter < 3; quarter++)\n        w",
    ),
    "the first quarter is not waited for": ("sum_add_norm", "quarter = 0; quarter < 4", "quarter = 1; quarter < 4"),
    "words are not emptied": ("sum_add_norm", "call - 1), quarters", "call - 2), quarters"),
    "words are emptied that others write": ("sum_add_norm", "call - 1), quarters", "call + 1), quarters"),
    "a sum empties nothing": ("all_sum", "\n  empty(memory, vector, call);", ""),
    "a thread without a vector empties nothing": ("all_sum", "return empty(memory, vector, call)", "return"),
    "an empty quarter is sent": ("sum_add_norm", "quarter == EMPTY ? 0 : quarter", "quarter"),
    "others get something else": ("all_sum", "own = word.pack", ""),
    "a rank adds itself instead": ("sum_add_norm", "words[rank].pack", "words[RANK].pack"),
    "parts are left out": ("sum_add_norm", "s = 1; s < SPLITS", "s = 1; s < 1"),
}
Results = list[np.ndarray]


class Ranks:
    """Some ranks with their parts of the memory."""

    def __init__(self, folder: Path, size: int) -> None:
        self.kernels = [CpuKernels(folder / str(rank), SEED) for rank in range(size)]
        for rank in range(size):
            (folder / str(rank)).mkdir()
        self._parts = [np.full(num_bytes(size) // 4 + 2, EMPTY, np.uint32) for _ in range(size)]
        starts = [part.ctypes.data + part.ctypes.data % 16 for part in self._parts]
        num_words = all_sum.TURNS * size * all_sum.VECTORS
        self._words = [
            part[(start - part.ctypes.data) // 4 :][: 4 * num_words].reshape(all_sum.TURNS, size, -1, 4)
            for part, start in zip(self._parts, starts, strict=True)
        ]
        self._calls = [
            part[(start - part.ctypes.data) // 4 + 4 * num_words :][: all_sum.VECTORS // all_sum.WARP]
            for part, start in zip(self._parts, starts, strict=True)
        ]
        for calls in self._calls:
            calls[:] = FIRST_CALL
        addresses = mx.array(starts, mx.uint64)
        self.peers = [PeerMemory(rank=rank, size=size, addresses=addresses) for rank in range(size)]

    def kernel(self, name: str, defines: Defines) -> Callable[..., list[mx.array]]:
        """Stands in for `cuda.kernel`."""
        compiled: Callable[..., list[mx.array]] = self.kernels[int(str(dict(defines)["RANK"]))](name, defines)
        return compiled

    def is_empty(self) -> bool:
        """Whether nobody can take a word of an earlier call for that of a later one: only the newest are left."""
        for words, calls in zip(self._words, self._calls, strict=True):
            turns, _, vectors = np.nonzero((words != EMPTY).any(axis=-1))
            if (turns != calls[vectors // all_sum.WARP] % all_sum.TURNS).any():
                return False
        return True

    def run(self, arrays: Sequence[Sequence[list[mx.array]]]) -> list[Results]:
        """What each rank gets of all calls."""
        with ThreadPoolExecutor(len(self.peers)) as pool:
            return list(pool.map(self._run_calls, self.peers, arrays))

    def _run_calls(self, peers: PeerMemory, arrays: Sequence[list[mx.array]]) -> Results:
        results: Results = []
        for (kind, _), given in zip(CALLS, arrays, strict=True):
            if kind == "norm":
                parts, stream, weight = given
                results += map(np.array, sum_add_norm.sum_add_norm(parts, stream, weight, EPS, peers=peers))
            else:
                results.append(np.array(all_sum.all_sum(given[0], peers)))
        return results


@pytest.fixture(params=[2, 3])
def size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def ranks(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    made = Ranks(tmp_path, size)
    monkeypatch.setattr(all_sum, "kernel", made.kernel)
    monkeypatch.setattr(sum_add_norm, "kernel", made.kernel)
    return made


def random_calls(size: int) -> list[list[list[mx.array]]]:
    """The arrays of each rank's calls; stream and weight are the same at all."""
    numbers = np.random.default_rng(SEED)

    def normal(*shape: int) -> np.ndarray:
        return numbers.standard_normal(shape, np.float32)

    streams = itertools.cycle([np.float16, np.float32])  # the stream before the first sum is that of the model
    common = [(normal(rows, 1, HIDDEN).astype(next(streams)), normal(HIDDEN)) for _, rows in CALLS]

    def given(kind: str, rows: int, rank: int) -> np.ndarray:
        array = normal(*([SPLITS] if kind == "norm" else []), rows, 1, SHORT if kind == "short sum" else HIDDEN)
        array = array if kind in ("norm", "wide sum") else array.astype(np.float16)
        array[..., :8] = -0.0  # as which nothing can be sent
        if kind == "wide sum":
            array.view(np.uint32)[..., rank * 8 : rank * 8 + 8] = EMPTY
        return array

    calls = [
        [
            [given(kind, rows, rank), *([shared[0], shared[1].astype(np.float16)] if kind == "norm" else [])]
            for (kind, rows), shared in zip(CALLS, common, strict=True)
        ]
        for rank in range(size)
    ]
    made = [[[mx.array(array) for array in call] for call in of_rank] for of_rank in calls]
    mx.eval(made)
    return made


def expected(arrays: Sequence[Sequence[list[mx.array]]]) -> Results:
    results: Results = []
    for (kind, _), of_ranks in zip(CALLS, zip(*arrays, strict=True), strict=True):
        given = [np.array(call[0]) for call in of_ranks]
        sent = [(one[0] + one[1]).astype(np.float16) if kind == "norm" else one for one in given]
        if kind == "wide sum":
            sent = [np.where(one.view(np.uint32) == EMPTY, np.float32(0), one) for one in sent]
        total = sent[0].astype(np.float32)
        for one in sent[1:]:
            total = total + one.astype(np.float32)
        if kind != "norm":
            results.append(total.astype(given[0].dtype))
            continue
        _, stream, weight = (np.array(array).astype(np.float32) for array in of_ranks[0])
        added = total + stream
        scale = 1 / np.sqrt(np.square(added).mean(-1, keepdims=True) + EPS)
        results += [added, (weight * (added * scale)).astype(np.float16)]
    return results


def agree(found: Sequence[Results], wanted: Results) -> bool:
    same = all(one.tobytes() == other.tobytes() for each in found for one, other in zip(each, found[0], strict=True))
    return same and all(np.allclose(one, other, rtol=2e-3) for one, other in zip(found[0], wanted, strict=True))


@needs_compiler
def test_all_ranks_get_the_bits_of_one_sum_whatever_kernel_came_before(ranks: Ranks, size: int) -> None:
    arrays = random_calls(size)
    found, wanted = ranks.run(arrays), expected(arrays)
    assert agree(found, wanted)
    assert ranks.is_empty()
    sums = [place for place, one in enumerate(wanted) if np.array_equal(one, found[0][place])]
    assert len(sums) >= len(CALLS)  # all that is no norm, whose squares are added in another order


@needs_compiler
@pytest.mark.parametrize(
    "mutant", [pytest.param(name, marks=[pytest.mark.slow] if place else []) for place, name in enumerate(MUTANTS)]
)
@pytest.mark.parametrize("size", [2], indirect=True)
def test_what_is_not_waited_for_is_found(mutant: str, ranks: Ranks, size: int) -> None:
    for kernels in ranks.kernels:
        kernels.mutation = MUTANTS[mutant]
    arrays = random_calls(size)
    with suppress(NeverEnds):  # a rank that is ahead has written over what another waits for
        assert not (agree(ranks.run(arrays), expected(arrays)) and ranks.is_empty())


def try_all(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> list[PeerMemory | None]:
    """What each rank's trial returns."""
    monkeypatch.setattr(trial, "HALF", mx.float16)
    monkeypatch.setattr(trial, "HIDDEN", HIDDEN)
    monkeypatch.setattr(trial, "ROWS", (1, 3, 1))
    answers, barrier = [b""] * len(ranks.peers), Barrier(len(ranks.peers))

    def tried(peers: PeerMemory) -> PeerMemory | None:
        return trial.tried(peers, partial(gather, peers.rank))

    def gather(rank: int, own: bytes) -> list[bytes]:
        answers[rank] = own
        barrier.wait()
        return answers

    with ThreadPoolExecutor(len(ranks.peers)) as pool:
        return list(pool.map(tried, ranks.peers))


@needs_compiler
@pytest.mark.parametrize("size", [2], indirect=True)
def test_sums_that_are_right_are_used(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    assert try_all(ranks, monkeypatch) == ranks.peers


@needs_compiler
@pytest.mark.parametrize("size", [2], indirect=True)
def test_all_ranks_go_through_nccl_if_the_sums_of_one_are_wrong(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks.kernels[1].mutation = "sum_add_norm", "+ float(before", "+ 2 * float(before"
    assert try_all(ranks, monkeypatch) == [None, None]
    assert "sums between GPUs go through NCCL, which takes longer: sums differ by" in caplog.text
