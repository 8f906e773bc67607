"""OpenTelemetry spans of requests, named by its conventions for generative models. Needs the extra `parallm[otel]`."""

import importlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from parallm.errors import ConfigError
from parallm.server.operation.request_context import RequestContext
from parallm.types import GenerationRequest

logger = logging.getLogger(__name__)

PROVIDER = "parallm"
EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """One request to the engine, for its span. Times are of `time.perf_counter`."""

    request: GenerationRequest
    context: RequestContext | None
    began: float
    first_token: float | None
    ended: float
    finish_reasons: Sequence[str]
    num_tokens: int
    num_cached_tokens: int
    """Tokens of the prompt that came from the prefix cache."""
    model: str | None
    """Version that has answered, if one has."""
    error: str | None
    """Name of the error's class."""


class Traces:
    """Makes a span of each finished request; a processor sends them from a thread of its own."""

    def __init__(self, processor: Any) -> None:
        sdk, resources = _module("opentelemetry.sdk.trace"), _module("opentelemetry.sdk.resources")
        self._provider = sdk.TracerProvider(resource=resources.Resource.create({"service.name": PROVIDER}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(PROVIDER)
        self._propagator = _module("opentelemetry.trace.propagation.tracecontext").TraceContextTextMapPropagator()
        self._kind = _module("opentelemetry.trace").SpanKind.SERVER
        self._status = _module("opentelemetry.trace.status")

    def record(self, finished: FinishedRequest) -> None:
        operation = "chat" if _is_chat(finished.context) else "text_completion"
        began = time.time_ns() - int(1e9 * (time.perf_counter() - finished.began))
        span = self._tracer.start_span(
            f"{operation} {finished.request.model}",
            context=self._propagator.extract({} if finished.context is None else finished.context.headers),
            kind=self._kind,
            attributes=_attributes(finished, operation),
            start_time=began,
        )
        if finished.error is not None:
            span.set_status(self._status.StatusCode.ERROR)
        span.end(began + int(1e9 * (finished.ended - finished.began)))

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


@contextmanager
def exporting_traces(endpoint: str | None) -> Iterator[Traces | None]:
    """Yield traces that go to an OTLP endpoint over HTTP, or None without one. Raises ConfigError."""
    if endpoint is None:
        yield None
        return
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"server.otlp_endpoint={endpoint} is no address; give one as http://localhost:4318/v1/traces")
    exporter = _module(EXPORTER).OTLPSpanExporter(endpoint=endpoint)
    steady = SpanExporter(exporter, logging.getLogger(EXPORTER), endpoint)
    traces = Traces(_module("opentelemetry.sdk.trace.export").BatchSpanProcessor(steady))
    try:
        yield traces
    finally:
        traces.close()


def _is_chat(context: RequestContext | None) -> bool:
    return context is not None and context.route in ("/v1/chat/completions", "/v1/responses")


def _attributes(finished: FinishedRequest, operation: str) -> Mapping[str, Any]:
    sampling = finished.request.sampling
    server = urlsplit("//" + ("" if finished.context is None else finished.context.headers.get("host", "")))
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": finished.request.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
        "gen_ai.request.stop_sequences": sampling.stop or None,
        "gen_ai.request.choice.count": finished.request.n,
        "gen_ai.response.id": finished.request.request_id,
        "gen_ai.response.model": finished.model,
        "gen_ai.response.finish_reasons": tuple(finished.finish_reasons) or None,
        "gen_ai.usage.input_tokens": len(finished.request.prompt_tokens),
        "gen_ai.usage.cache_read.input_tokens": finished.num_cached_tokens,
        "gen_ai.usage.output_tokens": finished.num_tokens,
        "gen_ai.latency.time_to_first_token": finished.first_token and finished.first_token - finished.began,
        "server.address": server.hostname,
        "server.port": _port(server),
        "parallm.request_id": finished.context and finished.context.request_id,
        "error.type": finished.error,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _port(server: SplitResult) -> int | None:
    try:
        return server.port
    except ValueError:  # a client may send any host
        return None


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)  # by name and not at the top: the extra is optional
    except ImportError as error:
        raise ConfigError(f"server.otlp_endpoint needs OpenTelemetry: pip install 'parallm[otel]' ({error})") from error


class SpanExporter:
    """An OpenTelemetry exporter around `exporter`, which warns once that an endpoint takes no spans, not at each try.

    It keeps the exporter's own `complaints` from the log. Used on the thread of the span processor.
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
