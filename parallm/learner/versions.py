"""The adapter that is trained, its optimizer, and the way back to the last good state. Arrays are never changed."""

from dataclasses import dataclass, replace

import mlx.core as mx

from parallm.errors import AdapterNotFinite
from parallm.learner.flat import Arrays, Layout
from parallm.learner.optimizer import AdapterOptimizer, scaled_to_norm
from parallm.learner.settings import LearnerSettings
from parallm.model.adapter import Adapter, next_version


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodState:
    """What the newest update that went well started from; arrays are immutable, so keeping it copies nothing."""

    adapter: Adapter
    optimizer: Arrays


class Versions:
    """Makes the next version from a gradient. All methods run on the device thread."""

    def __init__(self, start: Adapter, settings: LearnerSettings, total_steps: int) -> None:
        self._settings = settings
        self.adapter = start  # the newest version; written only by the methods here
        self._optimizer = AdapterOptimizer(settings, total_steps, start.arrays)
        self._good = GoodState(adapter=start, optimizer=self._optimizer.state())

    @property
    def layout(self) -> Layout:
        """Of gradients."""
        return self._optimizer.layout

    def advance(self, gradient_N: mx.array, norm: float, step: int) -> None:
        """Make the next version from a gradient in `layout`, of that norm, which is finite.

        Raises AdapterNotFinite, changing nothing, if its weights would not be.
        """
        before = GoodState(adapter=self.adapter, optimizer=self._optimizer.state())
        clipped_N = scaled_to_norm(gradient_N, norm, self._settings.max_gradient_norm)
        arrays = self._optimizer.apply(self.adapter.arrays, clipped_N, step)
        try:
            self.adapter = next_version(self.adapter, arrays, step + 1)
        except AdapterNotFinite:
            self._optimizer.restore(before.optimizer)
            raise
        self._good = before

    def optimizer_state(self) -> Arrays:
        return self._optimizer.state()

    def restore(self, adapter: Adapter, optimizer_state: Arrays) -> None:
        """Continue from a checkpoint."""
        self.adapter = adapter
        self._optimizer.restore(optimizer_state)
        self._good = GoodState(adapter=adapter, optimizer=self._optimizer.state())

    def roll_back(self) -> Adapter:
        """Undo the newest update: weights and moments are again those that it started from, with which it went well.

        The weights come back under a new version number, since numbers only grow; without an update to undo the
        version stays. Returns the version to publish.
        """
        good = self._good
        if good.adapter is not self.adapter:
            self.adapter = replace(good.adapter, version=self.adapter.version + 1, parent=good.adapter.version)
            self._optimizer.restore(good.optimizer)
            self._good = GoodState(adapter=self.adapter, optimizer=good.optimizer)
        return self.adapter
