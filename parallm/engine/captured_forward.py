"""Decode steps over pages as CUDA graphs: the trunk of a model, captured for each number of rows, width of tables and
form of LoRA.

Ranks of a divided model capture the same forms in the same steps, because a step that is captured sums.

What differs from step to step is copied to where the captured kernels read it: tokens, lengths, tables, the versions of
rows, and their LoRA weights when they change. Pools that have grown get new graphs of what was captured.

Axes: B rows, N pages of a table, H hidden.
"""

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import mlx.core as mx

from parallm.device.memory import device_memory, is_out_of_memory
from parallm.engine.kv.attention_metadata import AttentionMetadata
from parallm.engine.kv.paged_cache import PagedCache
from parallm.model.kernels.addresses import addresses
from parallm.model.kernels.copy_into import copy_into
from parallm.model.kernels.cuda_graph import Arena, Capture, NotCaptured, capture
from parallm.model.kernels.driver import CudaError, Graph, GraphStream
from parallm.model.kernels.page_write import PAGE
from parallm.model.kernels.wait_until import wait_until
from parallm.model.lora.segmented import PackedLayout, PackedLora, SegmentedLora
from parallm.model.shared_model import SharedModel

MAX_STEPS = 512
"""Forms whose graphs are kept."""
LORA_PART = 0.02
"""Share of the device's memory for the LoRA weights that graphs read. A single form may take more. The smallest device
of a divided model counts, so that all its ranks drop the same forms."""
FEW_ROWS = 4
"""Rows of a step that is captured in place of one of a single row, which goes through kernels of MLX."""

Part = TypeVar("Part")
LoraForm = tuple[PackedLayout, int, tuple[int, ...]]
StepForm = tuple[int, int, LoraForm | None]
"""Rows, width of tables, and layout, number of versions and shape of the order of LoRA."""

logger = logging.getLogger(__name__)


class PackedCopy:
    """LoRA weights where captured kernels read them."""

    def __init__(self, like: PackedLora) -> None:
        arrays = tuple(mx.zeros(array.shape, array.dtype) for array in like.arrays)
        mx.eval(arrays)
        self.weights = replace(like, arrays=arrays)
        self._source: weakref.ref[mx.array] | None = None  # the first array of the weights that are here

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.weights.arrays)

    def take(self, source: PackedLora) -> None:
        """Hold the weights of `source`, from the next step on."""
        if self._source is None or self._source() is not source.arrays[0]:
            pairs = zip(self.weights.arrays, source.arrays, strict=True)
            mx.async_eval([copy_into([target], [array])[0] for target, array in pairs])
            self._source = weakref.ref(source.arrays[0])


@dataclass(slots=True, kw_only=True)
class CapturedStep:
    """A step of one form."""

    captured: Capture
    inputs: Sequence[mx.array]
    """Tokens, lengths, tables, and the order of rows where there is LoRA."""
    weights: PackedCopy | None
    pools: Sequence[int]
    """Addresses of the pools in `graph`."""
    graph: Graph


class Pools:
    """The pools of the present, which are not kept here: they are large."""

    def __init__(self) -> None:
        self._first: weakref.ref[mx.array] | None = None
        self.addresses: Sequence[int] = ()

    def set(self, pools: Sequence[mx.array]) -> None:
        if self._first is None or self._first() is not pools[0]:
            self.addresses = [address for address in addresses(pools) if address is not None]
            self._first = weakref.ref(pools[0])


class CapturedForward:
    """The trunk of a model for rows with pages. Device thread only."""

    def __init__(self, model: SharedModel) -> None:
        self.min_rows = FEW_ROWS
        """Rows of the smallest step that may be captured, as far as is known; 1 where steps of few rows cannot be."""
        self._model = model
        self._smallest: Callable[[int], int] = int if model.parallel is None else model.parallel.smallest
        self._max_lora_bytes = LORA_PART * self._smallest(device_memory())
        self._arena = Arena()
        self._pools = Pools()
        self._steps: OrderedDict[StepForm, CapturedStep | None] = OrderedDict()  # those used last come last
        self._weights: OrderedDict[tuple[PackedLayout, int], PackedCopy] = OrderedDict()  # in the same order
        self._reasons: set[str] = set()  # that were logged
        self._stream: GraphStream | None = None
        try:
            self._stream = GraphStream()
        except (CudaError, OSError) as error:
            self._give_up(FEW_ROWS, error)
        self._stream = self._agreed(FEW_ROWS, self._stream)

    def __call__(
        self,
        tokens_B: mx.array,
        lengths_B: mx.array,
        tables_BN: mx.array,
        pools: Sequence[mx.array],
        lora: SegmentedLora | None,
    ) -> mx.array | None:
        """Feed `tokens_B`, int32: hidden states (B, H), or None where steps of this form cannot be captured. The step
        is launched at once.

        What is computed from the hidden states has to be launched before the next call.
        """
        step = self.prepare(tables_BN.shape[0], tables_BN.shape[1], pools, lora)
        if step is None or self._stream is None:
            return None
        if step.weights is not None and lora is not None:
            step.weights.take(lora.weights)
        given = [tokens_B, lengths_B, tables_BN] + ([] if lora is None else [lora.order_B2])
        copied, arrivals = copy_into(step.inputs, given, self._stream.arrivals.address)
        try:
            mx.async_eval(copied)
            ended = self._stream.launch(step.graph, arrivals)
            mx.async_eval(wait_until(self._stream.graphs.address, ended))  # all that MLX launches from now on waits
        except BaseException:
            self._stream.reset()
            raise
        return step.captured.result.reshape(len(tokens_B), -1)

    def prepare(
        self, rows: int, width: int, pools: Sequence[mx.array], lora: SegmentedLora | None
    ) -> CapturedStep | None:
        """Capture the steps of a form, unless they are; None where that cannot be."""
        if self._stream is None:
            return None
        of_lora = None if lora is None else (lora.weights.layout, lora.weights.num_versions, lora.order_B2.shape)
        form = rows, width, of_lora
        if of_lora is not None and of_lora[:2] in self._weights:
            self._weights.move_to_end(of_lora[:2])
        self._pools.set(pools)
        if form not in self._steps:
            self._steps[form] = self._try_capture(rows, width, pools, lora)
            if len(self._steps) > MAX_STEPS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(form)
        step = self._steps[form]
        if step is not None and step.pools is not self._pools.addresses:
            captured = step.captured.moved(dict(zip(step.pools, self._pools.addresses, strict=True)))
            step.graph = Graph(captured.nodes)  # raises, or all three belong together
            step.captured, step.pools = captured, self._pools.addresses
        return step

    def _try_capture(
        self, rows: int, width: int, pools: Sequence[mx.array], lora: SegmentedLora | None
    ) -> CapturedStep | None:
        """None where the steps of a form can never be captured; raises where memory is short now."""
        step: CapturedStep | None = None
        try:
            step = self._capture(rows, width, pools, lora)
        except NotCaptured as error:
            self._give_up(rows, error)
        except CudaError as error:
            if is_out_of_memory(error):
                raise
            self._give_up(rows, error)
        return self._agreed(rows, step)

    def _capture(self, rows: int, width: int, pools: Sequence[mx.array], lora: SegmentedLora | None) -> CapturedStep:
        """Runs the step twice, for rows of length 0: it writes to the scratch page alone."""
        shapes, weights = [(rows,), (rows,), (rows, width)], None
        if lora is not None:
            if lora.weights.experts:
                raise NotCaptured("experts have LoRA")
            shapes.append(lora.order_B2.shape)
            weights = self._copy_like(lora.weights)
        tokens_B, lengths_B, tables_BN, *order = inputs = [mx.zeros(shape, mx.int32) for shape in shapes]
        own = replace(lora, weights=weights.weights, order_B2=order[0]) if lora and weights else None
        mx.eval(inputs)

        def forward() -> mx.array:
            metadata = AttentionMetadata()
            metadata.set_traced(lengths_B, tables_BN, num_positions=width * PAGE)
            caches = [PagedCache(metadata, layer) for layer in zip(pools[::2], pools[1::2], strict=True)]
            return self._model.hidden(tokens_B[:, None], caches, own)

        captured = capture(forward, self._arena, self._pools.addresses)
        return CapturedStep(
            captured=captured,
            inputs=inputs,
            weights=weights,
            pools=self._pools.addresses,
            graph=Graph(captured.nodes),
        )

    def _copy_like(self, weights: PackedLora) -> PackedCopy:
        key = weights.layout, weights.num_versions
        if key not in self._weights:
            self._make_room(sum(array.nbytes for array in weights.arrays))
            self._weights[key] = PackedCopy(weights)
        return self._weights[key]

    def _make_room(self, num_bytes: int) -> None:
        """Drop the least recently used weights and their graphs until `num_bytes` more fit in `LORA_PART`."""
        free = self._max_lora_bytes - sum(copy.nbytes for copy in self._weights.values()) - num_bytes
        while self._weights and free < 0:
            oldest, copy = self._weights.popitem(last=False)
            free += copy.nbytes
            for form in [form for form in self._steps if form[2] is not None and form[2][:2] == oldest]:
                del self._steps[form]

    def _agreed(self, rows: int, own: Part | None) -> Part | None:
        """Return `own`, or None where any rank of a divided model has None."""
        if self._smallest(own is not None):
            return own
        if own is not None:
            self._give_up(rows, NotCaptured("another rank cannot capture them"))
        return None

    def _give_up(self, rows: int, error: Exception) -> None:
        """Say once why the steps of a form are not captured."""
        if rows == FEW_ROWS:
            self.min_rows = 1
        if str(error) not in self._reasons:
            logger.info("the kernels of steps of %d rows are launched one by one: %s", rows, error)
            self._reasons.add(str(error))


def list_kernels() -> None:
    """Build what captured steps need beside the kernels of steps; see `listed_kernels`."""
    word = mx.zeros(1, mx.int32)
    addresses([word])
    for count in (1, 3, 4):  # weights, and inputs without LoRA and with it
        copy_into([word] * count, [word] * count)
    wait_until(0, 0)
