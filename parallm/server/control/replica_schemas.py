"""Wire types between a trainer and the servers that sample for it; both sides use these.

`routes_replicas.py` has the routes, `distributed/rollout_engines/` asks them.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field

from parallm.errors import InvalidRequest
from parallm.server.schemas import MAX_INT, Tokens, Wire
from parallm.types import Completion, FinishReason, GenerationRequest, SamplingParams, WeightSpan

API = 1
"""Number of this protocol. A server and a trainer of different numbers refuse each other."""

Name = Annotated[str, Field(min_length=1, max_length=128, pattern="^[^@#]+$")]
Text = Annotated[str, Field(min_length=1, max_length=1024)]
Digest = Annotated[str, Field(max_length=64)]
Version = Annotated[int, Field(ge=0, le=MAX_INT)]


class JoinBody(Wire):
    """A trainer that wants samples of one policy, or says that it is still there."""

    api: int
    session: Name
    """Name of the trainer's process; requests of other sessions are refused."""
    owner: Text
    """Machine and run folder, for people. Another process of the same owner takes its place at once."""
    policy: Name
    base: Text
    """Name of the base, for people."""
    base_sha256: Digest
    tokenizer_sha256: Digest
    max_context: int
    """Tokens of prompt and completion that the trainer may ask for."""
    served: Version | None = None
    """Version that clients of the trainer get by the policy's name; they get the same here. 0: the base."""


class JoinAnswer(Wire):
    api: int
    process: str
    """Name of the server's process; another one holds no versions."""
    dtype: str
    """Floating type that the model computes in."""
    max_rows: int
    """Completions that decode at the same time; 0 while the server is paused."""
    versions: dict[str, str]
    """Digest by version of what this session has sent."""


class LeaveBody(Wire):
    session: Name


class ReceivedVersion(Wire):
    name: str
    version: int
    digest: str
    """Digest of the arrays that have come."""


class SampleBody(Wire):
    """One prompt in token ids with `n` completions."""

    session: Name
    request_id: Text
    prompt: Tokens
    n: Annotated[int, Field(ge=1, le=MAX_INT)]
    model: Text
    """`base` or an exact version such as `policy@12`; `policy@latest` for completions that follow new versions."""
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT)]
    temperature: Annotated[float, Field(ge=0)]
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    stop: list[Annotated[str, Field(min_length=1)]]
    is_continued: bool
    switches_in_flight: bool

    @classmethod
    def of(cls, request: GenerationRequest, *, session: str, request_id: str, model: str) -> Self:
        """Raises InvalidRequest for sampling that this protocol has no field for."""
        sampling = request.sampling
        plain = SamplingParams(
            max_tokens=sampling.max_tokens, temperature=sampling.temperature, seed=sampling.seed, stop=sampling.stop
        )
        if sampling != plain:
            raise InvalidRequest(f"{request.request_id}: rollout engines sample by temperature, seed and stop alone")
        return cls(
            session=session,
            request_id=request_id,
            prompt=list(request.prompt_tokens),
            n=request.n,
            model=model,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            seed=sampling.seed,
            stop=list(sampling.stop),
            is_continued=request.is_continued,
            switches_in_flight=request.switches_in_flight,
        )

    def request(self) -> GenerationRequest:
        """Return the request of the engine: a rollout, to which serving comes first."""
        return GenerationRequest(
            request_id=f"{self.session}-{self.request_id}",
            prompt_tokens=tuple(self.prompt),
            sampling=SamplingParams(
                max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed, stop=tuple(self.stop)
            ),
            n=self.n,
            model=self.model,
            traffic="rollout",
            switches_in_flight=self.switches_in_flight,
            is_continued=self.is_continued,
        )


class SampledSpan(Wire):
    """Output tokens `start` to `end` (half-open) came from this version."""

    version: int
    digest: str
    """Digest of the version's arrays; empty for the base."""
    start: int
    end: int


class SampledCompletion(Wire):
    """One finished completion. Log-probs are float32, after temperature, one per token."""

    model_config = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="constants")

    index: int
    tokens: list[int]
    logprobs: list[float]
    text: str
    finish_reason: Literal["stop", "length", "abort"]
    weight_versions: list[SampledSpan]

    @classmethod
    def of(cls, completion: Completion, digests: Mapping[int, str]) -> Self:
        """`digests`: by version."""
        spans = [
            SampledSpan(version=span.version, digest=digests.get(span.version, ""), start=span.start, end=span.end)
            for span in completion.weight_versions
        ]
        return cls(
            index=completion.index,
            tokens=list(completion.tokens),
            logprobs=list(completion.logprobs),
            text=completion.text,
            finish_reason=completion.finish_reason,
            weight_versions=spans,
        )

    def completion(self, request_id: str) -> Completion:
        reason: FinishReason = self.finish_reason
        return Completion(
            request_id=request_id,
            index=self.index,
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            top_logprobs=((),) * len(self.tokens),
            text=self.text,
            finish_reason=reason,
            weight_versions=tuple(
                WeightSpan(version=span.version, start=span.start, end=span.end) for span in self.weight_versions
            ),
        )
