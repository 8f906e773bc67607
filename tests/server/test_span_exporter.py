import logging
from types import SimpleNamespace

import pytest

from parallm.server.operation.span_exporter import SpanExporter

COMPLAINTS = logging.getLogger("tests.exporter")
FAILED, ARRIVED = SimpleNamespace(name="FAILURE"), SimpleNamespace(name="SUCCESS")


class Endpoint:
    """An exporter that complains several times for each batch which does not arrive."""

    def __init__(self) -> None:
        self.is_there = False

    def export(self, spans: object) -> object:
        if self.is_there:
            return ARRIVED
        COMPLAINTS.warning("connection %s", "refused")
        COMPLAINTS.error("failed to export the batch")
        return FAILED

    def shutdown(self) -> None:
        COMPLAINTS.warning("aborting retry")


def test_an_endpoint_that_takes_no_spans_is_one_line_of_the_log_and_one_more_when_it_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    endpoint = Endpoint()
    exporter = SpanExporter(endpoint, COMPLAINTS, "http://here")
    caplog.set_level(logging.INFO)
    assert [exporter.export([]) for _ in range(3)] == [FAILED] * 3
    endpoint.is_there = True
    assert [exporter.export([]) for _ in range(2)] == [ARRIVED] * 2
    exporter.shutdown()
    assert caplog.messages == [
        "server.otlp_endpoint=http://here takes no spans; they are dropped: connection refused",
        "server.otlp_endpoint=http://here takes spans again",
    ]
    assert not COMPLAINTS.filters
