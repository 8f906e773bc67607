"""The learner of one of several workers: it computes its rounds of the step, and all workers make the same version.

Every worker holds all groups of a step and plans the same list of micro-batches, with their advantages and token
weights. Each builds and reports its own rounds, and the totals are gathered. Round i is in slot i modulo the number of
slots, slot s with worker s modulo the number of workers.
"""

import itertools
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from parallm.distributed.exchange import Exchange
from parallm.distributed.wire import pack_figures, unpack_figures
from parallm.learner.faults import Blame, Faults
from parallm.learner.learner import Learner, Passes, Round, Unit
from parallm.learner.passes.batch import MicroBatch, PlannedBatches, make_micro_batches
from parallm.learner.passes.gradient import LoraWeights
from parallm.learner.passes.scoring import ScoredStep, score_step
from parallm.learner.totals import UpdateTotals
from parallm.types import TrajectoryGroup


@dataclass(frozen=True, slots=True)
class _Slots:
    """Gradients by slot, in the layout of the adapter's arrays. Not evaluated."""

    vectors_N: dict[int, mx.array]

    def all_arrays(self) -> list[mx.array]:
        return list(self.vectors_N.values())


class SharedLearner(Learner):
    """A learner that shares the passes of an update with others."""

    def __init__(self, *arguments: Any, exchange: Exchange, exact: bool, slots: int, **options: Any) -> None:
        """`exact`: sum `slots` partial sums in their order, each of rounds of one micro-batch.

        Other arguments are those of `Learner`.
        """
        super().__init__(*arguments, **options)
        self._exchange = exchange
        self._num_slots = slots if exact else exchange.size
        self._round_width = 1 if exact else self._streams.width
        self._numbers = itertools.count()

    @property
    def plan(self) -> dict[str, int]:
        """Values that the list of micro-batches depends on besides the groups: equal for all workers."""
        return {"micro_batch_tokens": self._budget, "streams": self._round_width, "slots": self._num_slots}

    def _micro_batches(self, groups: Sequence[TrajectoryGroup], max_tokens: int) -> PlannedBatches:
        return make_micro_batches(
            groups,
            self._objective,
            max_tokens=max_tokens,
            budget=self._budget,
            streams=self._round_width * self._num_slots,
            packs=self._packs,
            takes_rows=self._takes_rows,
        )

    def _score(
        self, batches: PlannedBatches, groups: Sequence[TrajectoryGroup], weights: LoraWeights
    ) -> Generator[None, None, ScoredStep]:
        """Score own batches only, unless the objective needs numbers of the whole step: then all. Builds no others."""
        if not self._objective.needs_scores:
            return ScoredStep(batches=batches)
        needs_step = self._objective.top_entropy_fraction < 1 or self._objective.kl_placement == "reward"
        chosen = range(len(batches)) if needs_step else self._own_batches(len(batches))
        scored = yield from score_step(
            [batches[index] for index in chosen],
            groups,
            self._objective,
            self._gradient.score,
            policy=weights.lora,
            width=self._streams.width,
        )
        for index, batch in zip(chosen, scored.batches, strict=True):
            batches.replace(index, batch)
        return ScoredStep(batches=batches, seconds=scored.seconds)

    def _run_passes(
        self, batches: Sequence[MicroBatch], weights: LoraWeights, step: int, totals: UpdateTotals, faults: Faults
    ) -> Generator[Unit, None, Passes]:
        if not batches:
            return Passes(optimizer_step=None, seconds=0.0)
        starts = range(0, len(batches), self._round_width)
        sums: dict[int, mx.array] = {}
        figures: defaultdict[int, tuple[UpdateTotals, list[Blame]]] = defaultdict(lambda: (UpdateTotals(), []))
        own = self._own_rounds(len(starts))
        done = iter(own)

        def build() -> Iterator[Round]:
            for index in own:
                chosen = batches[starts[index] : starts[index] + self._round_width]
                slot, key = self._slot(index), self._key(step, starts[index])
                following = self._round(chosen, key, weights, sums.get(slot))
                sums[slot] = following.gradient_N
                yield following

        def add(last: Round) -> None:
            slot_totals, blames = figures[self._slot(next(done))]
            blames += self._add_round(slot_totals, last, faults.indices)

        def finish(_: Round) -> _Slots:
            return _Slots({slot: weights.backward(sum_N, self.layout) for slot, sum_N in sums.items()})

        gradients, seconds = yield from self._launch(weights, build(), finish, add)
        vectors_N = {} if gradients is None else gradients.vectors_N
        began = time.perf_counter()
        mx.eval(list(vectors_N.values()))
        seconds += time.perf_counter() - began
        used = sorted({self._slot(index) for index in range(len(starts))})
        summed = self._exchange.sum_slots(vectors_N, used, self._num_slots, self._num_parameters)
        gathered = self._exchange.gather(f"figures of update {next(self._numbers)}", pack_figures(figures))
        yield summed
        began = time.perf_counter()
        optimizer_step = self.compute_step(summed.result(), step)
        mx.async_eval(optimizer_step.all_arrays())
        seconds += time.perf_counter() - began
        yield gathered
        began = time.perf_counter()
        of_slots = {slot: found for part in gathered.result() for slot, found in unpack_figures(part).items()}
        for slot in used:  # in their order, which does not depend on the number of workers
            slot_totals, blames = of_slots[slot]
            totals.merge(slot_totals)
            faults.blame(blames)
        mx.eval(optimizer_step.all_arrays())
        return Passes(optimizer_step=optimizer_step, seconds=seconds + time.perf_counter() - began)

    def _slot(self, index: int) -> int:
        """The slot of a round."""
        return index % self._num_slots

    @property
    def _num_parameters(self) -> int:
        return sum(array.size for array in self.adapter.arrays.values())

    def _own_rounds(self, count: int) -> list[int]:
        return [index for index in range(count) if self._slot(index) % self._exchange.size == self._exchange.rank]

    def _own_batches(self, count: int) -> list[int]:
        rounds = self._own_rounds(-(-count // self._round_width))
        return [
            index
            for start in rounds
            for index in range(start * self._round_width, min(count, (start + 1) * self._round_width))
        ]
