"""GRPO and supervised updates on the shared model. The trainer drives `Learner` on the device thread.

The learner owns the trained adapter and its optimizer, and knows nothing of serving.
"""

import math
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import mlx.core as mx

from parallm.device.streams import DeviceStreams
from parallm.device.thread_end import end_before_process
from parallm.learner.adapter_learner import AdapterLearner, OptimizerStep, with_change
from parallm.learner.faults import Blame, Faults, check_passes
from parallm.learner.look import Look
from parallm.learner.loss.objective import resolve_objective
from parallm.learner.optimizer import learning_rate
from parallm.learner.passes.batch import MicroBatch, PlannedBatches, make_micro_batches
from parallm.learner.passes.gradient import LoraWeights, PassResult, PolicyGradient
from parallm.learner.passes.lm_head import Stages, run_stages
from parallm.learner.passes.packing import takes_rows
from parallm.learner.passes.recomputation import head_chunk_bytes, overlaps_passes
from parallm.learner.passes.scoring import ScoredStep, TokenLoss, score_step, token_losses
from parallm.learner.settings import LearnerSettings
from parallm.learner.totals import UpdateTotals
from parallm.metrics.rollout_format import LearnedCompletion
from parallm.model.adapters.adapter import Adapter
from parallm.model.shared_model import SharedModel
from parallm.reports import UpdateReport
from parallm.types import CompletionIndex, TrajectoryGroup

Built = TypeVar("Built")
LAST_PARTS = 2
Unit = Future[Any] | None
"""What an update yields after a unit of work: None, or a future that it waits for (see `DeviceThread.iterate`)."""


class GraphBuilder:
    """A thread that builds graphs for `stream` while the device thread launches others. It evaluates nothing.

    `mx.async_eval` returns when the device is about to run out of work, at most ten launches ahead. A graph built only
    then leaves the device idle: 10 to 25 ms for a pass of an 8B model on an H200, 5% of an update.
    """

    def __init__(self, stream: mx.Stream) -> None:
        # MLX gives each thread its own streams, which only that thread may evaluate
        self._pool = ThreadPoolExecutor(1, "builder", initializer=_begin_builder, initargs=(stream,))

    def build_during(self, build: Callable[[], Built], launch: Callable[[], object]) -> Built:
        """Run `build` at the same time as `launch`; return its result when both have ended."""
        built = self._pool.submit(build)
        try:
            launch()
        finally:
            wait([built])
        return built.result()


def _begin_builder(stream: mx.Stream) -> None:
    mx.set_default_stream(stream)
    end_before_process()


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One micro-batch per stream, built and not yet evaluated."""

    batches: Sequence[MicroBatch]
    result: PassResult
    norm: mx.array
    """Norm of this round's gradients alone."""
    gradient_N: mx.array
    """Gradient with respect to the LoRA weights, summed up to this round."""

    def queue_trunk(self) -> None:
        """Queue the forward through the trunk."""
        if self.result.stages:
            mx.async_eval(self.result.stages[0])

    def queue_head(self) -> None:
        """Queue the rest of the forward, the head, and the backward through the last layers.

        The latter keeps the device busy while MLX traverses the whole backward.
        """
        run_stages([*self.result.stages, self.result.backward[0]])

    def parts(self) -> Stages:
        """What is evaluated one by one while others wait for the device. The rest of the backward takes as long as the
        next round takes to build."""
        return [*self.result.parts, *self.result.backward[:-LAST_PARTS]]

    def queue_backward(self) -> None:
        """Queue the rest of the backward. Returns when the device has nearly finished."""
        mx.async_eval(self.gradient_N, self.norm, [statistics.arrays for statistics in self.result.statistics])


class LastArrays(Protocol):
    """What the last round's graph ends in, built and not evaluated."""

    def all_arrays(self) -> list[mx.array]: ...


Last = TypeVar("Last", bound=LastArrays)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The result of all passes of an update."""

    optimizer_step: OptimizerStep | None
    """None if there was no pass."""
    seconds: float
    """Device seconds."""


class Learner(AdapterLearner):
    """Turns trajectory groups into the next adapter version. All methods run on the device thread."""

    def __init__(
        self,
        model: SharedModel,
        streams: DeviceStreams,
        settings: LearnerSettings,
        *,
        start: Adapter,
        total_steps: int,
        seed: int,
        is_waited_for: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_waited_for`: whether answers stream meanwhile, which a pass must not hold up."""
        super().__init__(model, streams, settings, start=start, total_steps=total_steps, seed=seed)
        self._is_waited_for = is_waited_for
        self._objective = resolve_objective(settings)
        self._builder = GraphBuilder(streams.handles[0])
        self._takes_rows = takes_rows(model)
        self._overlaps = overlaps_passes(model, self._budget * streams.width, checkpoints=self._checkpoints)
        self._look = Look((), ())
        self._gradient = PolicyGradient(
            model,
            streams,
            self._objective,
            chunk_bytes=head_chunk_bytes(settings, model, self._budget),
            dropout=start.dropout,
            checkpoints=self._checkpoints,
        )

    @property
    def needs_all_groups(self) -> bool:
        """Whether it also learns from groups with equal rewards."""
        return self._objective.needs_all_groups

    def update(
        self, groups: Sequence[TrajectoryGroup], *, step: int, max_tokens: int, look: Collection[int] = ()
    ) -> Iterator[UpdateReport | Unit]:
        """One optimizer step over `groups`. Yields after each round of micro-batches, the report last.

        A step with a value that is not finite changes neither weights nor moments; `skipped`, `fault` and `culprits` of
        the report name it, and `left_out` the completions with unusable rewards. `max_tokens` is the limit of a
        completion, which Dr. GRPO divides by. `look`: completions, counted over all groups, whose numbers `take_looked`
        will hand over.
        """
        totals, faults = UpdateTotals(), Faults(groups)
        self._look = Look(look, groups)
        weights = LoraWeights(self.adapter, self._model)
        scored = ScoredStep(batches=[])
        if faults.kind is None:
            batches = self._micro_batches(faults.groups, max_tokens)
            scored = yield from self._score(batches, faults.groups, weights)
        passes = yield from self._run_passes(scored.batches, weights, step, totals, faults)
        optimizer_step = passes.optimizer_step
        began = time.perf_counter()
        norm = math.nan if optimizer_step is None else float(optimizer_step.norm.item())
        skipped = faults.message or _nothing_to_learn(totals, norm)
        if skipped is None and optimizer_step is not None:
            self._advance(optimizer_step, step, faults)
            skipped = faults.message
        seconds = scored.seconds + passes.seconds + time.perf_counter() - began
        yield with_change(self._report(totals, norm, step, seconds, skipped, faults), optimizer_step)

    def take_looked(self) -> list[LearnedCompletion]:
        """Hand over what the last update computed of the completions that it was to look at, and forget it."""
        return self._look.take()

    def losses(self, groups: Sequence[TrajectoryGroup]) -> Iterator[TokenLoss]:
        """Score completions with the newest version, without dropout, in the same units as `update`."""
        score = partial(self._gradient.score, LoraWeights(self.adapter, self._model).lora)
        return token_losses(self._micro_batches(groups, max_tokens=1), score, self._streams.width)

    def _micro_batches(self, groups: Sequence[TrajectoryGroup], max_tokens: int) -> PlannedBatches:
        return make_micro_batches(
            groups,
            self._objective,
            max_tokens=max_tokens,
            budget=self._budget,
            streams=self._streams.width,
            packs=self._packs,
            takes_rows=self._takes_rows,
        )

    def _score(
        self, batches: PlannedBatches, groups: Sequence[TrajectoryGroup], weights: LoraWeights
    ) -> Generator[None, None, ScoredStep]:
        """Score what the objective needs before any gradient."""
        return score_step(
            batches,
            groups,
            self._objective,
            self._gradient.score,
            policy=weights.lora,
            width=self._streams.width,
        )

    def _run_passes(
        self, batches: Sequence[MicroBatch], weights: LoraWeights, step: int, totals: UpdateTotals, faults: Faults
    ) -> Generator[Unit, None, Passes]:
        """Run all passes and compute the optimizer step; add to `totals` and `faults`."""

        def add(done: Round) -> None:
            faults.blame(self._add_round(totals, done, faults.indices))

        def finish(last: Round) -> OptimizerStep:
            return self.compute_step(weights.backward(last.gradient_N, self.layout), step)

        optimizer_step, seconds = yield from self._launch(weights, self._rounds(batches, weights, step), finish, add)
        return Passes(optimizer_step=optimizer_step, seconds=seconds)

    def _launch(
        self,
        weights: LoraWeights,
        rounds: Iterator[Round],
        finish: Callable[[Round], Last],
        add: Callable[[Round], None],
    ) -> Generator[None, None, tuple[Last | None, float]]:
        """Evaluate `rounds`, each while the next one is built, and what `finish` builds of the last; `add` gets each.

        While the first one is built, the `weights` are computed, which all read.

        Yields after each, and within each while answers stream. Returns the last result, None without a round, and the
        device seconds.
        """

        def build(current: Round) -> tuple[Round | None, Last | None]:
            following = next(rounds, None)
            return (following, None) if following is not None else (None, finish(current))

        last: Last | None = None
        seconds, began = 0.0, time.perf_counter()
        following = self._builder.build_during(partial(next, rounds, None), weights.queue)
        while following is not None:
            current = following
            for part in current.parts():
                if not self._is_waited_for():
                    break
                mx.eval(part)
                seconds += time.perf_counter() - began
                yield None
                began = time.perf_counter()
            current.queue_head()
            following, last = self._builder.build_during(partial(build, current), current.queue_backward)
            if last is not None:
                mx.async_eval(last.all_arrays())
            elif following is not None and self._overlaps and not self._is_waited_for():
                following.queue_trunk()
            add(current)
            seconds += time.perf_counter() - began
            yield None
            began = time.perf_counter()
        return last, seconds

    def _rounds(self, batches: Sequence[MicroBatch], weights: LoraWeights, step: int) -> Iterator[Round]:
        """Rounds of one micro-batch per stream, built on demand and not evaluated."""
        gradient_N: mx.array | None = None
        for chosen, key in self._rounds_of(batches, step):
            following = self._round(chosen, key, weights, gradient_N)
            gradient_N = following.gradient_N
            yield following

    def _round(
        self, batches: Sequence[MicroBatch], key: mx.array, weights: LoraWeights, before_N: mx.array | None
    ) -> Round:
        """A round whose gradients are added to the sum `before_N`. Not evaluated."""
        result = self._gradient(weights.lora, batches, key)
        more_N = weights.join(result.gradients, result.scale)
        gradient_N = more_N if before_N is None else before_N + more_N
        return Round(batches=batches, result=result, norm=mx.linalg.norm(more_N), gradient_N=gradient_N)

    def _add_round(self, totals: UpdateTotals, done: Round, indices: Sequence[CompletionIndex]) -> list[Blame]:
        """Add a round to `totals`, and keep what is to be looked at. Returns the values of it that are not finite.

        `indices`: those of each completion of the step.
        """
        for pair in zip(done.batches, done.result.statistics, strict=True):
            totals.add(*pair, self.adapter.version)
            self._look.add(*pair, indices)
        return check_passes(done.batches, done.result.statistics, float(done.norm.item()))

    def _report(
        self, totals: UpdateTotals, norm: float, step: int, seconds: float, skipped: str | None, faults: Faults
    ) -> UpdateReport:
        count = totals.tokens or math.nan
        return UpdateReport(
            step=step,
            version=self.adapter.version,
            loss=totals.loss if totals.tokens else math.nan,
            gradient_norm=norm,
            learning_rate=learning_rate(self._settings, step, self._total_steps),
            clip_fraction=totals.clipped / count,
            kl_to_behaviour=totals.kl / count,
            kl_to_base=totals.kl_to_base / count if self._objective.needs_base else None,
            entropy=totals.entropy / count,
            num_tokens=totals.tokens,
            seconds=seconds,
            parity=totals.parity(),
            ratio=totals.ratio(),
            skipped=skipped,
            fault=faults.kind,
            culprits=faults.culprits,
            left_out=faults.left_out,
        )


def _nothing_to_learn(totals: UpdateTotals, norm: float) -> str | None:
    if totals.tokens == 0:
        return "no tokens with signal"
    return "the gradient is zero" if norm == 0 else None  # the optimizer would apply its momentum alone
