"""Counters and histograms of HTTP requests for Prometheus: vLLM's names where they mean the same, else `parallm:`.

The middleware counts HTTP requests, the engine gateway what they ask of the engine.
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter, which no dashboard reads

TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
FIRST_TOKEN_SECONDS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
REQUEST_SECONDS = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)
TOKEN_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)
COUNTS = (1, 2, 5, 10, 20, 50, 100)
LABELS = ("model_name", "engine")


class HttpMetrics:
    """Counters and histograms of HTTP alone. No label takes its value from a client."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.http_requests = Counter(
            "http_requests", "Requests by route.", ("handler", "method", "status"), registry=self.registry
        )
        self.http_seconds = Histogram(
            "http_request_duration_seconds",
            "From the request line to the last byte.",
            ("handler", "method"),
            registry=self.registry,
            buckets=REQUEST_SECONDS,
        )


class RequestMetrics(HttpMetrics):
    """Counters and histograms of one server."""

    def __init__(self, base_name: str) -> None:
        super().__init__()
        self._labels = {"model_name": base_name, "engine": "0"}
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that began to answer.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens sampled for requests.")
        self.first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From a streamed request to its first token.", FIRST_TOKEN_SECONDS
        )
        self.inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of one streamed completion.", TOKEN_SECONDS
        )
        self.per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean of the former over one completion.", TOKEN_SECONDS
        )
        self.request = self._histogram(
            "vllm:e2e_request_latency_seconds", "From a request to its last token.", REQUEST_SECONDS
        )
        self.prompt_lengths = self._histogram("vllm:request_prompt_tokens", "Prompt tokens.", TOKEN_COUNTS)
        self.lengths = self._histogram("vllm:request_generation_tokens", "Tokens of a completion.", TOKEN_COUNTS)
        self.n = self._histogram("vllm:request_params_n", "Completions asked for.", COUNTS)
        self.max_tokens = self._histogram("vllm:request_params_max_tokens", "Tokens allowed.", TOKEN_COUNTS)
        success = self._family("vllm:request_success", "Completions by their end.", ("finished_reason",))
        self.finished = {
            reason: success.labels(**self._labels, finished_reason=reason)
            for reason in ("stop", "length", "abort", "error")
        }

    def _counter(self, name: str, text: str) -> Counter:
        return self._family(name, text).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, LABELS, registry=self.registry, buckets=buckets).labels(**self._labels)

    def _family(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(name, text, (*LABELS, *labels), registry=self.registry)
