"""Compares sums over the GPUs of a host with those that every rank knows, before a model is divided between them.

The kernels poll memory that other GPUs write into, which few kinds of hosts have been seen to do right.

Axes: B rows, T tokens, H hidden, S parts of a sum.
"""

import logging
from collections.abc import Callable, Sequence

import mlx.core as mx

from parallm.model.kernels.all_sum import PeerMemory, all_sum
from parallm.model.kernels.sum_add_norm import sum_add_norm

ROWS = (1, 32, 3, 1, 1, 32)
HIDDEN, SPLITS, EPS = 8192, 4, 1e-5
ZEROS = 8
"""First numbers of each row that are -0.0, as which nothing can be sent."""
HALF = mx.bfloat16
MAX_ERROR = 2e-2
"""The largest difference over the largest number: a few last bits of bfloat16. Another sum differs by 0.3 and more."""

logger = logging.getLogger(__name__)


def tried(peers: PeerMemory, gather: Callable[[bytes], Sequence[bytes]]) -> PeerMemory | None:
    """`peers`; None, after a warning, if a rank's sums are wrong, or its bits differ from those of another.

    `gather` is that of `open_peer_memory`. Device thread only.
    """
    try:
        pairs = [pair for call, rows in enumerate(ROWS) for pair in _pairs(peers, call, rows)]
        error = max(_error(*pair) for pair in pairs)
        reason = "" if error <= MAX_ERROR else f"sums differ by {error:.1e}"
        bits = repr([_checksum(found) for found, _ in pairs]).encode()
    except Exception as failure:  # noqa: BLE001  # any failure means that NCCL is used
        reason, bits = str(failure), b""
    answers = gather(b"" if reason else bits)
    if all(answers) and len(set(answers)) == 1:
        return peers
    logger.warning(
        "sums between GPUs go through NCCL, which takes longer: %s", reason or "a rank's kernels give other sums"
    )
    return None


def _pairs(peers: PeerMemory, call: int, rows: int) -> list[tuple[mx.array, mx.array]]:
    """The results of the kernels, and the right ones."""
    is_zero_H = mx.arange(HIDDEN) < ZEROS
    parts = [
        mx.where(is_zero_H, -0.0, _normal(1 + 100 * call + rank, SPLITS, rows, 1, HIDDEN)) for rank in range(peers.size)
    ]
    stream_B1H, weight_H = _normal(50 + 100 * call, rows, 1, HIDDEN), mx.ones(HIDDEN, HALF)
    if call in (1, 3):  # of many rows and of one, as before the first sum of a model
        stream_B1H = stream_B1H.astype(HALF)
    sent = [parts_SB1H.sum(axis=0).astype(HALF) for parts_SB1H in parts]
    whole_B1H = sum(one.astype(mx.float32) for one in sent)
    added_B1H = whole_B1H + stream_B1H
    sums_B1H = all_sum(sent[peers.rank], peers)
    mx.eval(sums_B1H)  # two sums that do not depend on each other must not run at once
    found = sum_add_norm(parts[peers.rank], stream_B1H, weight_H, EPS, peers=peers)
    mx.eval(found)
    expected = added_B1H, mx.fast.rms_norm(added_B1H, weight_H, EPS)
    return [(sums_B1H, whole_B1H.astype(HALF)), *zip(found, expected, strict=True)]


def _checksum(array: mx.array) -> int:
    """The sum of an array's words of 16 bits, each times its place, modulo 2**32."""
    bits = array.view(mx.uint16).flatten().astype(mx.uint32)
    checksum: int = (bits * mx.arange(1, bits.size + 1, dtype=mx.uint32)).sum().item()
    return checksum


def _normal(seed: int, *shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def _error(found: mx.array, expected: mx.array) -> float:
    """The largest difference over the largest number."""
    largest: float = (mx.abs(found.astype(mx.float32) - expected).max() / mx.abs(expected).max()).item()
    return largest
