"""The adapter that is trained, its optimizer, and the way back to the last good state. Arrays are never changed."""

from dataclasses import dataclass, replace

import mlx.core as mx

from parallm.learner.optimizer import AdapterOptimizer, Arrays, ParameterLayout, clip_gradient_norm
from parallm.learner.settings import LearnerSettings
from parallm.model.adapters.adapter import Adapter, Checksums, checksums, next_version
from parallm.reports import UpdateReport


@dataclass(frozen=True, slots=True, kw_only=True)
class LastGoodState:
    """What the newest update that went well started from; arrays are immutable, so keeping it copies nothing."""

    adapter: Adapter
    optimizer: Arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChange:
    """How far an adapter is moved. Not evaluated."""

    delta_norm: mx.array
    """Norm of the new arrays less the old ones."""
    adapter_norm: mx.array
    """Norm of the old arrays."""
    has_moved: mx.array
    """False where every number is what it was."""

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return self.delta_norm, self.adapter_norm, self.has_moved


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """What a gradient would make of the newest version. Not evaluated."""

    norm: mx.array
    """Of the gradient, before it is clipped."""
    change: "WeightChange"
    parameters_N: mx.array
    """Of the new arrays, in `AdapterState.layout`."""
    arrays: Arrays
    """Parts of `parameters_N`."""
    optimizer: Arrays
    checksums: Checksums

    def all_arrays(self) -> list[mx.array]:
        """All arrays that are needed if it is taken."""
        sums = [self.norm, *self.change.arrays, self.checksums.sums, self.checksums.is_finite]
        return [self.parameters_N, *self.arrays.values(), *self.optimizer.values(), *sums]


class AdapterState:
    """Makes the next version from a gradient. All methods run on the device thread, but `compute_step`, which may run in a
    thread that builds for it meanwhile."""

    def __init__(self, start: Adapter, settings: LearnerSettings, total_steps: int) -> None:
        self._settings = settings
        self.adapter = start  # the newest version; written only by the methods here
        self._optimizer = AdapterOptimizer(settings, total_steps, start.arrays)
        self._good = LastGoodState(adapter=start, optimizer=self._optimizer.state())
        self._joined: tuple[Adapter, mx.array] | None = None  # the last version that was made, and its numbers

    @property
    def layout(self) -> ParameterLayout:
        """Of gradients."""
        return self._optimizer.layout

    def compute_step(self, gradient_N: mx.array, step: int) -> OptimizerStep:
        """What a gradient in `layout` would make. Changes nothing, so that it can be built while the device is still
        at work on the gradient."""
        norm, before_N = mx.linalg.norm(gradient_N), self._numbers()
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

    def advance(self, optimizer_step: OptimizerStep, step: int) -> None:
        """Make it the next version, or only take its moments where it moves no weight.

        Raises AdapterNotFinite, changing nothing, if its weights are not finite.
        """
        mx.eval(optimizer_step.all_arrays())
        if not optimizer_step.change.has_moved.item():
            self._optimizer.restore(optimizer_step.optimizer)
            return
        adapter = next_version(self.adapter, optimizer_step.arrays, optimizer_step.checksums, step + 1)
        self._good = LastGoodState(adapter=self.adapter, optimizer=self._optimizer.state())
        self._optimizer.restore(optimizer_step.optimizer)
        self.adapter = adapter
        self._joined = (adapter, optimizer_step.parameters_N)

    def optimizer_state(self) -> Arrays:
        return self._optimizer.state()

    def restore(self, adapter: Adapter, optimizer_state: Arrays) -> None:
        """Continue from a checkpoint."""
        self.adapter = adapter
        self._optimizer.restore(optimizer_state)
        self._good = LastGoodState(adapter=adapter, optimizer=self._optimizer.state())

    def renumber(self, version: int) -> Adapter:
        """Call the newest version `version` from now on, which must be higher: its number means other weights by now.

        Returns the version to publish.
        """
        self.adapter = replace(self.adapter, version=version, parent=self.adapter.version)
        self._good = LastGoodState(adapter=self.adapter, optimizer=self._optimizer.state())
        return self.adapter

    def roll_back(self) -> Adapter:
        """Undo the newest update: weights and moments are again those that it started from, with which it went well.

        The weights come back under a new version number, since numbers only grow; without an update to undo the
        version stays. Returns the version to publish.
        """
        good = self._good
        if good.adapter is not self.adapter:
            self.adapter = replace(good.adapter, version=self.adapter.version + 1, parent=good.adapter.version)
            self._optimizer.restore(good.optimizer)
            self._good = LastGoodState(adapter=self.adapter, optimizer=good.optimizer)
        return self.adapter

    def _numbers(self) -> mx.array:
        """Of the newest version, in `layout`. Joining its arrays takes a kernel for each."""
        if self._joined is not None and self._joined[0] is self.adapter:
            return self._joined[1]
        return self.layout.join(self.adapter.arrays)


def with_change(report: UpdateReport, optimizer_step: OptimizerStep | None) -> UpdateReport:
    """`report` with how far the update has moved the adapter; unchanged where it was skipped."""
    if optimizer_step is None or report.skipped is not None:
        return report
    change = optimizer_step.change
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
