"""Stand-ins for the kernels of pages, so that an engine keeps keys and values in pages on a CPU.

MLX is lazy and knows nothing of writes in place; the stand-ins work at once, in the order of the calls, which is that
of a GPU's stream. Positions that were never written are NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from parallm.engine import flat_prefill, memory, paged_batch, paged_memory
from parallm.engine.kv import attention_metadata, paged_cache
from parallm.model.kernels import flash_attention
from parallm.model.kernels.page_write import PAGE
from tests.model.kernels.flash_emulation import fake_kernel


@dataclass(frozen=True, slots=True)
class Plan:
    """Stands in for `PagePlan`."""

    tables: mx.array
    lengths: mx.array
    window: int


def plan_pages(
    tables: mx.array, lengths: mx.array, *, query_heads: int, key_heads: int, head_size: int, window: int
) -> Plan:
    assert query_heads % key_heads == 0
    return Plan(tables, lengths, window)


class PoolsInNumpy:
    def __init__(self) -> None:
        self._arrays: dict[int, tuple[mx.array, np.ndarray]] = {}
        self.num_copied = 0

    def of(self, pool: mx.array) -> np.ndarray:
        if id(pool) not in self._arrays:
            shape = max(pool.shape[0], 2), *pool.shape[1:]  # a flat forward that is only listed has one page
            self._arrays[id(pool)] = pool, np.full(shape, np.nan, np.float32)
        return self._arrays[id(pool)][1]

    def grown(self, pool: mx.array, num_pages: int) -> mx.array:
        larger = mx.zeros((num_pages, *pool.shape[1:]), pool.dtype)
        self.of(larger)[: pool.shape[0]] = self.of(pool)[: pool.shape[0]]
        return larger

    def write_pages(
        self, heads: Sequence[mx.array], keys: mx.array, values: mx.array, slots_M: mx.array, rotary: object = None
    ) -> mx.array:
        assert rotary is None
        slots = np.array(slots_M)
        for pool, new in zip((keys, values), heads[1:], strict=True):
            self.of(pool)[slots // PAGE, :, slots % PAGE] = np.array(new[:, :, 0])
        return heads[0][:, :, 0]

    def attend_pages(
        self, queries: mx.array, keys: mx.array, values: mx.array, *rest: mx.array, **more: Any
    ) -> mx.array:
        pools = (mx.array(self.of(pool)) for pool in (keys, values))
        return flash_attention.attend_pages(queries, *pools, *rest, **more)

    def append_and_attend(
        self,
        queries: mx.array,
        new_keys: mx.array,
        new_values: mx.array,
        keys: mx.array,
        values: mx.array,
        plan: Plan,
        *,
        scale: float,
        rotary: object,
        sinks_Q: mx.array | None,
    ) -> mx.array:
        """As the kernel of a decode step: each row writes, and attends to what it has then."""
        assert rotary is None
        outputs = []
        own = list(zip(np.array(plan.tables), np.array(plan.lengths).tolist(), strict=True))
        written = [(table[length // PAGE], length % PAGE) for table, length in own if table[length // PAGE] != 0]
        assert len(set(written)) == len(written), "two rows write in one place"
        for row, (table, length) in enumerate(own):
            pair = []
            for pool, new in ((keys, new_keys), (values, new_values)):
                whole = self.of(pool)
                whole[table[length // PAGE], :, length % PAGE] = np.array(new[row, :, 0])
                pages = whole[table[: length // PAGE + 1]].swapaxes(1, 2).reshape(-1, whole.shape[1], whole.shape[3])
                first = max(0, length + 1 - plan.window) if plan.window else 0
                pair.append(mx.array(pages[first : length + 1].swapaxes(0, 1)))
            attended = mx.fast.scaled_dot_product_attention(
                queries[row : row + 1], *(one[None] for one in pair), scale=scale, sinks=sinks_Q
            )
            outputs.append(attended)
        return mx.concatenate(outputs)

    def copy_pages(self, pools: Sequence[mx.array], sources: Sequence[int], targets: Sequence[int]) -> list[mx.array]:
        assert 0 not in targets
        self.num_copied += len(targets)
        for pool in pools:
            whole = self.of(pool)
            whole[list(targets)] = whole[list(sources)]
        return []


class NothingCaptured:
    """Stands in for `CapturedForward`."""

    min_rows = 1

    def __init__(self, model: object) -> None: ...

    def __call__(self, *_: object) -> None: ...

    def prepare(self, *_: object) -> None: ...


def install_pages(monkeypatch: pytest.MonkeyPatch) -> PoolsInNumpy:
    """Let engines that are made from now on keep their keys and values in pages."""
    pools = PoolsInNumpy()
    monkeypatch.setattr(memory, "can_decode", lambda model: model.is_batch_invariant)
    monkeypatch.setattr(memory, "fits", lambda model: model.is_batch_invariant)
    monkeypatch.setattr(paged_memory, "CompiledForward", lambda *_: None)
    monkeypatch.setattr(paged_memory, "CapturedForward", NothingCaptured)
    monkeypatch.setattr(paged_memory, "grown", pools.grown)
    monkeypatch.setattr(paged_memory, "first_page", lambda pool: pool)
    monkeypatch.setattr(attention_metadata, "plan_pages", plan_pages)
    monkeypatch.setattr(paged_cache, "fits", lambda *_: True)
    monkeypatch.setattr(paged_cache, "append_and_attend", pools.append_and_attend)
    monkeypatch.setattr(paged_batch, "copy_pages", pools.copy_pages)
    monkeypatch.setattr(flat_prefill, "fits_pages", lambda *_: True)
    monkeypatch.setattr(flat_prefill, "write_pages", pools.write_pages)
    monkeypatch.setattr(flat_prefill, "attend_pages", pools.attend_pages)
    monkeypatch.setattr(flash_attention, "kernel", fake_kernel)
    return pools
