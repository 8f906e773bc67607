import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from parallm.errors import ConfigError
from parallm.server.operation.tracing import SpanExporter, Traces, exporting_traces
from tests.server.conftest import make_app

export = pytest.importorskip("opentelemetry.sdk.trace.export")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_a_request_becomes_a_span_of_the_callers_trace(engine: Any, tokenizer: Any) -> None:
    exporter = memory.InMemorySpanExporter()
    app = make_app(engine, tokenizer, traces=Traces(export.SimpleSpanProcessor(exporter)))
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True}
    with TestClient(app, base_url="http://localhost") as client:
        client.post("/v1/chat/completions", json=body, headers={"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"})
        client.post("/v1/completions", json={"model": "nobody", "prompt": "hi"})
    answered, refused = exporter.get_finished_spans()
    assert (answered.name, f"{answered.context.trace_id:032x}") == ("chat policy", TRACE)
    wanted = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.usage.input_tokens": 8,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.response.model": "policy@3",
        "gen_ai.response.finish_reasons": ("length",),
        "server.address": "localhost",
    }
    assert {name: answered.attributes[name] for name in wanted} == wanted
    assert 0 < answered.attributes["gen_ai.latency.time_to_first_token"] < 5
    assert 0 < answered.end_time - answered.start_time < 5e9
    assert (refused.name, refused.attributes["error.type"]) == ("text_completion nobody", "UnknownModel")
    assert not refused.status.is_ok


def test_without_an_endpoint_nothing_is_loaded_and_without_the_extra_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with exporting_traces(None) as traces:
        assert traces is None
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'parallm\[otel\]'"), exporting_traces("http://localhost:4318"):
        pass


def test_an_endpoint_without_a_scheme_is_refused_before_anything_is_served() -> None:
    with pytest.raises(ConfigError, match="endpoint=localhost:4318 is no address"), exporting_traces("localhost:4318"):
        pass


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
