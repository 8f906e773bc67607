"""Plans of the products that warpgroups of Hopper multiply (`warpgroup_gemm.cu`), for `small_batch_gemm.py`."""

from dataclasses import dataclass
from typing import Protocol

from parallm.model.kernels.compiler import Defines

MAX_SHARED_BYTES = 225_000  # of the 227 KB that a block may have
PROCESSORS = 132  # of an H200, each with one block at a time
OUTPUTS_OF_GROUP = 64
CHUNK = 64  # values of the input that are fetched at once
ROW_BYTES = 2 * CHUNK
ROWS = (64, 128)  # of a block
MAX_WIDE = 4  # warpgroups side by side
MIN_STAGES, MAX_STAGES = 4, 8  # one of which is multiplied
SPLITS = (1, 2, 4, 8)
WEIGHT_OF_ROWS = 0.5  # of a value of the input beside one of the weights: it comes from the cache
PRODUCTS = 128  # that take as long as a value of the weights takes to be read


@dataclass(frozen=True, slots=True, kw_only=True)
class WarpgroupPlan:
    """The shares of the blocks in a product."""

    kernel = "warpgroup_gemm"
    chunk = CHUNK

    rows: int
    """Rows of a block."""
    wide: int
    """Warpgroups of a block."""
    stages: int
    splits: int
    """Parts of the input."""

    @property
    def outputs(self) -> int:
        """Outputs of a block."""
        return OUTPUTS_OF_GROUP * self.wide

    @property
    def threads(self) -> int:
        return 128 * self.wide

    def shared_bytes(self, *, adds: bool) -> int:
        """`adds`: B of LoRA comes to the weights."""
        sums = self.rows * (self.outputs + 4) * 4
        return max((self.stages + adds) * _stage_bytes(self.rows, self.wide), sums)

    @property
    def defines(self) -> Defines:
        return (("ROWS", self.rows), ("WIDE", self.wide), ("STAGES", self.stages))


class Plan(Protocol):
    """The numbers that a product is divided by."""

    @property
    def rows(self) -> int: ...

    @property
    def outputs(self) -> int: ...

    @property
    def splits(self) -> int: ...


def plan_of_warpgroups(rows: int, inputs: int, outputs: int, columns: int, *, is_whole: bool) -> WarpgroupPlan:
    """The plan that is expected to take the least time. There is one for each power of two of rows, since each is a
    kernel to compile."""
    rows = 1 << (rows - 1).bit_length()
    plans = [
        WarpgroupPlan(rows=of_block, wide=wide, stages=stages, splits=splits)
        for of_block in ROWS
        if of_block <= max(rows, ROWS[0])
        for wide in range(1, MAX_WIDE + 1)
        for splits in (SPLITS[:1] if is_whole else SPLITS)
        if splits <= -(-inputs // CHUNK) and (stages := _num_stages(of_block, wide)) >= MIN_STAGES
    ]
    return min(plans, key=lambda plan: cost(plan, rows, inputs, outputs, columns))


def cost(plan: WarpgroupPlan, rows: int, inputs: int, outputs: int, columns: int) -> float:
    """The time of the busiest processor, and its share of sums in parts, in values of the weights that are read. Its
    weights were fitted to products of 0.5B to 7B shapes on an H200."""
    length = -(-inputs // CHUNK // plan.splits) * CHUNK
    of_block = (plan.outputs + WEIGHT_OF_ROWS * plan.rows + plan.outputs * plan.rows / PRODUCTS) * length
    return num_waves(plan, rows, outputs, columns) * of_block + 2 * parts_written(plan.splits, rows, outputs)


def num_waves(plan: Plan, rows: int, outputs: int, columns: int) -> int:
    """Blocks of the busiest processor."""
    tiles = -(-outputs // plan.outputs) + -(-columns // plan.outputs)
    return -(-tiles * -(-rows // plan.rows) * plan.splits // PROCESSORS)


def parts_written(splits: int, rows: int, outputs: int) -> float:
    """A processor's share of writing sums in parts, which are float32."""
    return 0 if splits == 1 else splits * rows * outputs * 4 / PROCESSORS


def _num_stages(rows: int, wide: int) -> int:
    return min(MAX_SHARED_BYTES // _stage_bytes(rows, wide) - 1, MAX_STAGES)  # one is left for B


def _stage_bytes(rows: int, wide: int) -> int:
    return (OUTPUTS_OF_GROUP * wide + rows) * ROW_BYTES
