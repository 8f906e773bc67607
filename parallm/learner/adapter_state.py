"""The trained adapter, its optimizer state, and the last good state. The learners call it. Arrays never change."""

from dataclasses import dataclass, replace

import mlx.core as mx

from parallm.learner.optimizer import AdapterOptimizer, Arrays, ParameterLayout, clip_gradient_norm
from parallm.learner.settings import LearnerSettings
from parallm.model.adapters.adapter import Adapter, Checksums, checksums, next_version
from parallm.reports import UpdateReport


@dataclass(frozen=True, slots=True, kw_only=True)
class LastGoodState:
    """The state before the newest good update. Arrays are immutable, so keeping it copies nothing."""

    adapter: Adapter
    optimizer: Arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChange:
    """Size of an optimizer step. Not evaluated."""

    delta_norm: mx.array
    """Norm of the difference of new and old arrays."""
    adapter_norm: mx.array
    """Norm of the old arrays."""
    has_moved: mx.array
    """False if no number has changed."""

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return self.delta_norm, self.adapter_norm, self.has_moved


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """A computed optimizer step that is not applied yet. Not evaluated."""

    norm: mx.array
    """Norm of the gradient before clipping."""
    change: WeightChange
    parameters_N: mx.array
    """The new parameters in `AdapterState.layout`."""
    arrays: Arrays
    """Parts of `parameters_N`."""
    optimizer: Arrays
    checksums: Checksums

    def all_arrays(self) -> list[mx.array]:
        """All arrays that `advance` evaluates."""
        sums = [self.norm, *self.change.arrays, self.checksums.sums, self.checksums.is_finite]
        return [self.parameters_N, *self.arrays.values(), *self.optimizer.values(), *sums]


class AdapterState:
    """Makes the next version from a gradient. Runs on the device thread; `compute_step` also on the builder's."""

    def __init__(self, start: Adapter, settings: LearnerSettings, total_steps: int) -> None:
        self._settings = settings
        self.adapter = start  # the newest version; only methods here change it
        self._optimizer = AdapterOptimizer(settings, total_steps, start.arrays)
        self._good = LastGoodState(adapter=start, optimizer=self._optimizer.state())
        self._joined: tuple[Adapter, mx.array] | None = None  # the last version made, and its parameters

    @property
    def layout(self) -> ParameterLayout:
        """Layout of gradients."""
        return self._optimizer.layout

    def compute_step(self, gradient_N: mx.array, step: int) -> OptimizerStep:
        """The step of a gradient in `layout`. Changes nothing, so it can be built before the gradient is computed."""
        norm, before_N = mx.linalg.norm(gradient_N), self._parameters()
        clipped_N = clip_gradient_norm(gradient_N, norm, self._settings.max_gradient_norm)
        parameters_N, optimizer = self._optimizer.compute_step(before_N, clipped_N, step)
        arrays = self.layout.split(parameters_N)
        return OptimizerStep(
            norm=norm,
            change=_change(before_N, parameters_N),
            parameters_N=parameters_N,
            arrays=arrays,
            optimizer=optimizer,
            checksums=checksums(arrays, self.adapter.max_scale),
        )

    def advance(self, update: OptimizerStep, step: int) -> None:
        """Apply it as the next version; if it moves no weight, keep the version and apply its moments.

        Raises AdapterNotFinite, changing nothing, if its weights are not finite.
        """
        mx.eval(update.all_arrays())
        if not update.change.has_moved.item():
            self._optimizer.restore(update.optimizer)
            return
        adapter = next_version(self.adapter, update.arrays, update.checksums, step + 1)
        self._good = LastGoodState(adapter=self.adapter, optimizer=self._optimizer.state())
        self._optimizer.restore(update.optimizer)
        self.adapter = adapter
        self._joined = (adapter, update.parameters_N)

    def optimizer_state(self) -> Arrays:
        return self._optimizer.state()

    def restore(self, adapter: Adapter, optimizer_state: Arrays) -> None:
        """Resume from a checkpoint."""
        self.adapter = adapter
        self._optimizer.restore(optimizer_state)
        self._good = LastGoodState(adapter=adapter, optimizer=self._optimizer.state())

    def renumber(self, version: int) -> Adapter:
        """Give the newest version the higher number `version`. Returns the version to publish."""
        self.adapter = replace(self.adapter, version=version, parent=self.adapter.version)
        self._good = LastGoodState(adapter=self.adapter, optimizer=self._optimizer.state())
        return self.adapter

    def roll_back(self) -> Adapter:
        """Undo the newest update: return to the weights and moments that it started from, under a new version number.

        Without an update to undo the version stays. Returns the version to publish.
        """
        good = self._good
        if good.adapter is not self.adapter:
            self.adapter = replace(good.adapter, version=self.adapter.version + 1, parent=good.adapter.version)
            self._optimizer.restore(good.optimizer)
            self._good = LastGoodState(adapter=self.adapter, optimizer=good.optimizer)
        return self.adapter

    def _parameters(self) -> mx.array:
        """Parameters of the newest version in `layout`. Joining the arrays would take a kernel for each."""
        if self._joined is not None and self._joined[0] is self.adapter:
            return self._joined[1]
        return self.layout.join(self.adapter.arrays)


def with_change(report: UpdateReport, update: OptimizerStep | None) -> UpdateReport:
    """`report` with the size of the step; unchanged if it was skipped."""
    if update is None or report.skipped is not None:
        return report
    change = update.change
    return replace(
        report,
        adapter_norm=float(change.adapter_norm.item()),
        adapter_delta_norm=float(change.delta_norm.item()),
        has_moved=bool(change.has_moved.item()),
    )


def _change(before_N: mx.array, after_N: mx.array) -> WeightChange:
    return WeightChange(
        delta_norm=mx.linalg.norm(after_N - before_N),
        adapter_norm=mx.linalg.norm(before_N),
        has_moved=(after_N != before_N).any(),
    )
