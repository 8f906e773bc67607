"""The version that clients get by a policy's bare name. Rollouts and evaluations ask for the newest one."""

import logging
import math
from collections.abc import Mapping
from typing import Any

from parallm.errors import UnknownModel
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.names import of_alias
from parallm.model.adapters.table import AdapterTable
from parallm.reports import EvaluationReport
from parallm.trainer.settings import TrainerSettings
from parallm.types import LATEST

logger = logging.getLogger(__name__)


class Publication:
    """Publishes versions: served at once (`trainer.publish_if=always`), or after a good evaluation (`evaluation`).

    A version that an operator promotes stays served until an operator promotes the newest one. Running requests finish
    on the version they began with. `make_adapter` has checked that a version is finite.
    """

    def __init__(self, adapters: AdapterTable, policy: str, settings: TrainerSettings) -> None:
        self._adapters = adapters
        self._policy = policy
        self._waits = settings.publish_if == "evaluation"
        self._margin = settings.publish_margin
        self._best: float | None = None
        self._served = _version(adapters.resolve(policy))  # the version published to be served; 0 is the base
        self._was_held = False

    def publish(self, adapter: Adapter, *, serve: bool | None = None) -> None:
        """Publish the version of an update. `serve`: whether clients get it; None: as the settings say."""
        serve = not self._is_held() and (not self._waits if serve is None else serve)
        self._adapters.publish(adapter, serve=serve)
        if serve:
            self._served = adapter.version

    def evaluated(self, report: EvaluationReport) -> None:
        """Serve the evaluated version if it is good enough; log if it is not."""
        if self._waits and report.version > 0:
            self._judge(report)
        if math.isfinite(report.score):
            self._best = report.score if self._best is None else max(self._best, report.score)

    def roll_back(self, adapter: Adapter) -> None:
        """Publish `adapter`, the last good weights; clients get it if they got its bad successor."""
        if adapter.version <= _version(self._adapters.resolve(of_alias(LATEST, self._policy))):
            return  # there was no update to undo
        self.publish(adapter, serve=self._served > (adapter.parent or 0))

    def renumbered(self, adapter: Adapter) -> None:
        """Publish `adapter`, which had its parent's number; clients get it if they got that."""
        self.publish(adapter, serve=not self._waits or self._served == adapter.parent)

    def counters(self) -> dict[str, Any]:
        """Counters for a checkpoint."""
        return {"best": self._best, "served": self._served}

    def resume(self, counters: Mapping[str, Any], fallback: str) -> None:
        """Serve the version that was served, or the alias `fallback` if it is not on disk."""
        self._best = counters["best"]
        if not self._waits:
            self._served = counters["served"]
            return
        if counters["served"] == 0:
            return
        try:
            self._promote(counters["served"])
        except UnknownModel:
            self._serve_alias(fallback, counters["served"])

    def _promote(self, version: int) -> None:
        self._adapters.promote(version, name=self._policy)
        self._served = version

    def _is_held(self) -> bool:
        """Whether an operator's promotion holds. Promoting the newest version follows newer ones."""
        served = _version(self._adapters.resolve(self._policy))
        newest = _version(self._adapters.resolve(of_alias(LATEST, self._policy)))
        is_held = served not in (self._served, newest)
        if is_held and not self._was_held:
            logger.warning(
                "clients get version %d of %s, as was asked for; newer ones wait until the newest is promoted",
                served,
                self._policy,
            )
        if not is_held:
            self._served = served
        self._was_held = is_held
        return is_held

    def _serve_alias(self, alias: str, lost: int) -> None:
        try:
            fallback = self._adapters.resolve(of_alias(alias, self._policy))
        except UnknownModel:
            fallback = None
        if fallback is not None:
            self._promote(fallback.version)
        logger.warning(
            "version %d, which clients got as %s, was not kept; they get %s until an evaluation finds a newer one "
            "good enough",
            lost,
            self._policy,
            "the base" if fallback is None else f"version {fallback.version}",
        )

    def _judge(self, report: EvaluationReport) -> None:
        best = report.score if self._best is None else self._best
        if report.score >= best - self._margin:
            if not self._is_held():
                self._promote(report.version)
            return
        logger.warning(
            "version %d is not served: its %s, the best was %s (trainer.publish_margin=%g); %s stays %s",
            report.version,
            *_compared(report, best),
            self._margin,
            self._policy,
            f"version {self._served}" if self._served else "the base",
        )


def _compared(report: EvaluationReport, best: float) -> tuple[str, str]:
    if report.is_of_loss:
        return f"held-out loss is {-report.score:.3f}", f"{-best:.3f}"
    return f"held-out accuracy is {100 * report.score:.1f}%", f"{100 * best:.1f}%"


def _version(adapter: Adapter | None) -> int:
    return 0 if adapter is None else adapter.version
