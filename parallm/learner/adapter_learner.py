"""The base class of both learners: the trained adapter, its optimizer state, and the last good state."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import mlx.core as mx

from parallm.device.streams import DeviceStreams
from parallm.errors import AdapterNotFinite
from parallm.learner.faults import Faults
from parallm.learner.optimizer import AdapterOptimizer, Arrays, ParameterLayout, clip_gradient_norm
from parallm.learner.passes.packing import can_pack
from parallm.learner.passes.recomputation import checkpoints_layers, pass_tokens
from parallm.learner.settings import LearnerSettings
from parallm.model.adapters.adapter import Adapter, Checksums, checksums, next_version
from parallm.model.shared_model import SharedModel
from parallm.reports import UpdateReport
from parallm.seeds import mix

Batch = TypeVar("Batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """A computed optimizer step that is not applied yet. Not evaluated."""

    norm: mx.array
    """Norm of the gradient before clipping."""
    delta_norm: mx.array
    """Norm of the difference of new and old parameters."""
    adapter_norm: mx.array
    """Norm of the old parameters."""
    has_moved: mx.array
    """False if no number has changed."""
    parameters_N: mx.array
    """The new parameters in `AdapterLearner.layout`."""
    arrays: Arrays
    """Parts of `parameters_N`."""
    optimizer: Arrays
    checksums: Checksums

    def all_arrays(self) -> list[mx.array]:
        """All arrays that `advance` evaluates."""
        sums = [self.norm, self.delta_norm, self.adapter_norm, self.has_moved]
        sums += [self.checksums.sums, self.checksums.is_finite]
        return [self.parameters_N, *self.arrays.values(), *self.optimizer.values(), *sums]


class AdapterLearner:
    """Makes the next version from a gradient. Runs on the device thread; `compute_step` also on the builder's.

    Arrays of a version never change, so keeping the last good state copies nothing.
    """

    def __init__(
        self,
        model: SharedModel,
        streams: DeviceStreams,
        settings: LearnerSettings,
        *,
        start: Adapter,
        total_steps: int,
        seed: int,
    ) -> None:
        """`start` of a reward model has a reward head."""
        self._model = model
        self._streams = streams
        self._settings = settings
        self._total_steps = total_steps
        self._seed = seed
        self._packs = can_pack(model)
        self._budget = pass_tokens(settings, model)
        self._checkpoints = checkpoints_layers(settings, model, self._budget * streams.width)
        self.adapter = start  # the newest version; only methods here change it
        self._optimizer = AdapterOptimizer(settings, total_steps, start.arrays)
        self._good = (start, self._optimizer.state())  # before the newest good update
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
            delta_norm=mx.linalg.norm(parameters_N - before_N),
            adapter_norm=mx.linalg.norm(before_N),
            has_moved=(parameters_N != before_N).any(),
            parameters_N=parameters_N,
            arrays=arrays,
            optimizer=optimizer,
            checksums=checksums(arrays, self.adapter.max_scale),
        )

    def optimizer_state(self) -> Arrays:
        return self._optimizer.state()

    def restore(self, adapter: Adapter, optimizer_state: Arrays) -> None:
        """Resume from a checkpoint."""
        self._optimizer.restore(optimizer_state)
        self._keep(adapter)

    def renumber(self, version: int) -> Adapter:
        """Give the newest version the higher number `version`. Returns the version to publish."""
        self._keep(replace(self.adapter, version=version, parent=self.adapter.version))
        return self.adapter

    def roll_back(self) -> Adapter:
        """Undo the newest update: return to the weights and moments that it started from, under a new version number.

        Without an update to undo the version stays. Returns the version to publish.
        """
        good, optimizer = self._good
        if good is not self.adapter:
            self._optimizer.restore(optimizer)
            self._keep(replace(good, version=self.adapter.version + 1, parent=good.version))
        return self.adapter

    def _advance(self, update: OptimizerStep, step: int, faults: Faults) -> None:
        """Apply it as the next version; if it moves no weight, keep the version and apply its moments.

        If its weights are not finite, changes nothing and adds the fault.
        """
        mx.eval(update.all_arrays())
        before = (self.adapter, self._optimizer.state())
        if update.has_moved.item():
            try:
                self.adapter = next_version(self.adapter, update.arrays, update.checksums, step + 1)
            except AdapterNotFinite:
                faults.add("weights")
                return
            self._good = before
            self._joined = (self.adapter, update.parameters_N)
        self._optimizer.restore(update.optimizer)

    def _rounds_of(self, batches: Sequence[Batch], step: int) -> Iterator[tuple[Sequence[Batch], mx.array]]:
        """One batch per stream, and the random key of this round."""
        for start in range(0, len(batches), self._streams.width):
            yield batches[start : start + self._streams.width], self._key(step, start)

    def _key(self, step: int, start: int) -> mx.array:
        """Random key of the round whose first batch is at `start`."""
        return mx.random.key(mix(mix(self._seed, step), start))

    def _keep(self, adapter: Adapter) -> None:
        """Take `adapter` and the optimizer's state as newest and last good."""
        self.adapter = adapter
        self._good = (adapter, self._optimizer.state())

    def _parameters(self) -> mx.array:
        """Parameters of the newest version in `layout`. Joining the arrays would take a kernel for each."""
        if self._joined is not None and self._joined[0] is self.adapter:
            return self._joined[1]
        return self.layout.join(self.adapter.arrays)


def with_change(report: UpdateReport, update: OptimizerStep | None) -> UpdateReport:
    """`report` with the size of the step; unchanged if it was skipped."""
    if update is None or report.skipped is not None:
        return report
    return replace(
        report,
        adapter_norm=float(update.adapter_norm.item()),
        adapter_delta_norm=float(update.delta_norm.item()),
        has_moved=bool(update.has_moved.item()),
    )
