"""Completions that clients of the policy were given, found again by their exact tokens.

The server records each completion and `Intake` looks up what environments post, which names no version and often no
log-probs. The store is bounded in tokens and age, so evaluations and probes, which are never posted, leave it in time.

Axes: N tokens of a completion, T tokens of a posted sequence, P tokens of a prompt.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from parallm.rollout.settings import AtroposSettings
from parallm.types import Completion, FinishReason, GenerationRequest, WeightSpan

HASH_FACTORS = np.random.default_rng(0).integers(2**64, size=1 << 16, dtype=np.uint64, endpoint=False)
"""Factors by position: a sequence's hash is the sum of each token times its factor. Matches are compared token by
token, so two prompts of one hash cost a completion and never mix."""


@dataclass(slots=True, kw_only=True)
class SampledCompletion:
    """One completion. Only the store changes `num_joined`."""

    tokens_N: np.ndarray
    """int32."""
    logprobs_N: np.ndarray
    """float32, after the temperature."""
    spans: tuple[WeightSpan, ...]
    temperature: float
    is_filtered: bool
    """Whether its distribution was not the whole policy's: top_p, a grammar, penalties."""
    finish_reason: FinishReason
    num_joined: int = 0

    def versions(self) -> np.ndarray:
        """int32 (N,)."""
        versions_N = np.zeros(len(self.tokens_N), np.int32)
        for span in self.spans:
            versions_N[span.start : span.end] = span.version
        return versions_N


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRecord:
    """How a sequence's trained tokens were sampled. Values at other tokens mean nothing."""

    logprobs_T: np.ndarray
    """float32."""
    versions_T: np.ndarray
    """int32."""
    temperature: float
    is_filtered: bool
    finish_reason: FinishReason


@dataclass(slots=True)
class _Prompt:
    tokens_P: np.ndarray
    completions: dict[int, SampledCompletion] = field(default_factory=dict)  # by number, in the order of arrival


class SampleStore:
    """The completions of one policy. Used on the asyncio thread; `clock` returns seconds."""

    def __init__(self, settings: AtroposSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._prompts: dict[int, _Prompt] = {}
        self._arrivals: deque[tuple[float, int, int, int]] = deque()  # time, prompt's key, number, tokens
        self.num_tokens = 0
        self.num_recorded = 0
        """Completions since the start."""

    @property
    def num_completions(self) -> int:
        return len(self._arrivals)

    def record(self, request: GenerationRequest, completions: Sequence[Completion]) -> None:
        """Keep what a client was given."""
        sampled = [completion for completion in completions if completion.tokens]
        if not sampled:
            return
        now = self._clock()
        tokens_P = np.asarray(request.prompt_tokens, np.int32)
        key = int(prefix_hashes(tokens_P)[-1])
        prompt = self._prompts.get(key)
        if prompt is None or not np.array_equal(prompt.tokens_P, tokens_P):
            prompt = self._prompts[key] = _Prompt(tokens_P)
        sampling = request.sampling
        filters = (sampling.top_p, sampling.top_k, sampling.min_p)
        for completion in sampled:
            prompt.completions[self.num_recorded] = SampledCompletion(
                tokens_N=np.asarray(completion.tokens, np.int32),
                logprobs_N=np.asarray(completion.logprobs, np.float32),
                spans=completion.weight_versions,
                temperature=sampling.temperature,
                is_filtered=sampling.has_logits_processors or filters != (1.0, 0, 0.0),
                finish_reason=completion.finish_reason,
            )
            num_tokens = len(completion.tokens) + len(tokens_P)  # a shared prompt counts once per completion
            self._arrivals.append((now, key, self.num_recorded, num_tokens))
            self.num_recorded += 1
            self.num_tokens += num_tokens
        self.expire()

    def expire(self) -> None:
        oldest = self._clock() - self._settings.ledger_seconds
        while self._arrivals and (self._arrivals[0][0] < oldest or self.num_tokens > self._settings.ledger_tokens):
            _, key, number, num_tokens = self._arrivals.popleft()
            self.num_tokens -= num_tokens
            prompt = self._prompts.get(key)
            if prompt is None:
                continue
            prompt.completions.pop(number, None)
            if not prompt.completions:
                del self._prompts[key]

    def find(self, tokens_T: np.ndarray, trained_T: np.ndarray, logprobs_T: np.ndarray | None) -> SamplingRecord | None:
        """Return how the trained tokens of a sequence were sampled.

        None unless each lies in a recorded completion whose prompt is exactly what stands before it.

        A conversation of several turns is several completions, each with everything before it as its prompt. Among
        equal completions of one prompt the one counts whose log-probs are nearest to `logprobs_T`, then the one with
        fewer joins, then the oldest.
        """
        matches = list(self._completions_in(tokens_T, logprobs_T))
        covered_T = np.zeros(len(tokens_T), bool)
        sampled_T, versions_T = np.zeros(len(tokens_T), np.float32), np.zeros(len(tokens_T), np.int32)
        owner_T = np.full(len(tokens_T), -1)
        for index, (start, completion) in enumerate(matches):
            length = _num_equal(tokens_T[start:], completion.tokens_N)
            span = slice(start, start + length)
            covered_T[span], owner_T[span] = True, index
            sampled_T[span], versions_T[span] = completion.logprobs_N[:length], completion.versions()[:length]
        if not covered_T[trained_T].all():
            return None
        owners = [matches[index][1] for index in np.unique(owner_T[trained_T])]
        for completion in owners:
            completion.num_joined += 1
        temperatures = {completion.temperature for completion in owners} or {1.0}
        return SamplingRecord(
            logprobs_T=sampled_T,
            versions_T=versions_T,
            temperature=temperatures.pop() if len(temperatures) == 1 else np.nan,
            is_filtered=any(completion.is_filtered for completion in owners),
            finish_reason=owners[-1].finish_reason if owners else "stop",
        )

    def _completions_in(
        self, tokens_T: np.ndarray, logprobs_T: np.ndarray | None
    ) -> Iterator[tuple[int, SampledCompletion]]:
        """Yield the end of each recorded prompt in the sequence, from the front, with the completion that fits best.

        Where completions overlap, the later one has sampled the tokens: a client may cut one and go on from there.
        """
        keys = prefix_hashes(tokens_T)[:-1].tolist()
        for start in sorted(map(keys.index, self._prompts.keys() & set(keys))):
            prompt = self._prompts[keys[start]]
            if len(prompt.tokens_P) != start or not np.array_equal(prompt.tokens_P, tokens_T[:start]):
                continue
            following_T = tokens_T[start:]
            posted_T = None if logprobs_T is None else logprobs_T[start:]
            distance = partial(_distance, following_T=following_T, posted_T=posted_T)
            yield start, min(prompt.completions.values(), key=distance)


def prefix_hashes(tokens_T: np.ndarray) -> np.ndarray:
    """uint64 (T + 1,): hashes of the first 0, 1, ... T tokens. Sums wrap around."""
    factors_T = np.resize(HASH_FACTORS, len(tokens_T))
    products_T = (tokens_T.astype(np.uint64) + np.uint64(1)) * factors_T
    return np.concatenate([np.zeros(1, np.uint64), np.cumsum(products_T, dtype=np.uint64)])


def _distance(
    completion: SampledCompletion, following_T: np.ndarray, posted_T: np.ndarray | None
) -> tuple[int, float, int]:
    """Sort key: more equal tokens come first, then nearer log-probs, then fewer joins."""
    length = _num_equal(following_T, completion.tokens_N)
    gap = 0.0
    if posted_T is not None and length:
        gap = float(np.abs(posted_T[:length] - completion.logprobs_N[:length]).max())
    return -length, gap, completion.num_joined


def _num_equal(first_T: np.ndarray, second_N: np.ndarray) -> int:
    """Length of the longest common prefix of two sequences."""
    length = min(len(first_T), len(second_N))
    differs = np.flatnonzero(first_T[:length] != second_N[:length])
    return int(differs[0]) if len(differs) else length
