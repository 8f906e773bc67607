"""OpenTelemetry spans of requests, named by its conventions for generative models. Needs the extra `parallm[otel]`."""

import importlib
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from parallm.errors import ConfigError
from parallm.server.operation.request_context import RequestContext
from parallm.types import Completion, GenerationRequest

logger = logging.getLogger(__name__)

PROVIDER = "parallm"
EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


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

    def record(
        self,
        request: GenerationRequest,
        context: RequestContext | None,
        *,
        began: float,
        first_token: float | None,
        completions: Sequence[Completion],
        num_tokens: int,
        model: str | None,
        error: str | None,
    ) -> None:
        """Record a request that has ended now. Times are of `time.perf_counter`.

        `model` is the version that has answered, if one has, and `error` the name of the error's class.
        """
        headers = {} if context is None else context.headers
        is_chat = context is not None and context.route in ("/v1/chat/completions", "/v1/responses")
        operation = "chat" if is_chat else "text_completion"
        ended = time.time_ns()
        cached = [completion.num_cached_prompt_tokens for completion in completions]
        attributes = _request_attributes(request) | {
            "gen_ai.operation.name": operation,
            "gen_ai.response.model": model,
            "gen_ai.response.finish_reasons": tuple(completion.finish_reason for completion in completions) or None,
            "gen_ai.usage.cache_read.input_tokens": max(cached, default=0),
            "gen_ai.usage.output_tokens": num_tokens,
            "gen_ai.latency.time_to_first_token": first_token and first_token - began,
            **_server_attributes(headers.get("host", "")),
            "parallm.request_id": context and context.request_id,
            "error.type": error,
        }
        span = self._tracer.start_span(
            f"{operation} {request.model}",
            context=self._propagator.extract(headers),
            kind=self._kind,
            attributes={name: value for name, value in attributes.items() if value is not None},
            start_time=ended - int(1e9 * (time.perf_counter() - began)),
        )
        if error is not None:
            span.set_status(self._status.StatusCode.ERROR)
        span.end(ended)

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


def _request_attributes(request: GenerationRequest) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": request.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
        "gen_ai.request.stop_sequences": sampling.stop or None,
        "gen_ai.request.choice.count": request.n,
        "gen_ai.response.id": request.request_id,
        "gen_ai.usage.input_tokens": len(request.prompt_tokens),
    }


def _server_attributes(host: str) -> dict[str, Any]:
    server = urlsplit("//" + host)
    try:
        return {"server.address": server.hostname, "server.port": server.port}
    except ValueError:  # a client may send any host
        return {"server.address": server.hostname}


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
