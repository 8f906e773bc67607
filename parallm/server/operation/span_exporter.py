"""Sends spans, and says once that their endpoint takes none instead of once for each try."""

import logging
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger(__name__)


class SpanExporter:
    """An exporter of OpenTelemetry in place of `exporter`, whose own `complaints` are kept from the log.

    Used on the thread of the span processor.
    """

    def __init__(self, exporter: Any, complaints: logging.Logger, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._reasons: list[str] = []
        self._is_failing = False
        self._complaints = complaints
        complaints.addFilter(self._keep)

    def export(self, spans: Sequence[Any]) -> Any:
        self._reasons.clear()
        result = self._exporter.export(spans)
        has_failed = result.name != "SUCCESS"
        if has_failed and not self._is_failing:
            reason = next(iter(self._reasons), "no reason given")
            logger.warning("server.otlp_endpoint=%s takes no spans; they are dropped: %s", self._endpoint, reason)
        if self._is_failing and not has_failed:
            logger.info("server.otlp_endpoint=%s takes spans again", self._endpoint)
        self._is_failing = has_failed
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
        self._complaints.removeFilter(self._keep)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return bool(self._exporter.force_flush(timeout_millis))

    def _keep(self, record: logging.LogRecord) -> bool:
        self._reasons.append(record.getMessage())
        return False
