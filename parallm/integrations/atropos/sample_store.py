"""What clients of the policy were given, by its exact tokens: nothing that an environment posts says which version it
is from. Bounded in tokens and age, so that evaluations and probes, which nobody posts, leave it by themselves.

Axes: N tokens of a completion, T tokens of a posted sequence, P of a prompt.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from parallm.rollout.atropos_settings import AtroposSettings
from parallm.types import Completion, FinishReason, GenerationRequest, SamplingParams, WeightSpan

HASH_FACTORS = np.random.default_rng(0).integers(2**64, size=1 << 16, dtype=np.uint64, endpoint=False)
"""A sequence's hash is the sum of its tokens times the factor of their place. What it finds is compared token by token,
so two prompts of one hash cost a completion and never mix."""


@dataclass(slots=True, kw_only=True)
class SampledCompletion:
    """One completion. `num_joined` is changed by the ledger only."""

    tokens_N: np.ndarray
    """int32."""
    logprobs_N: np.ndarray
    """float32, after temperature."""
    spans: tuple[WeightSpan, ...]
    temperature: float
    is_filtered: bool
    """Whether it was sampled from less than the policy, or something beside it: top_p, a grammar, penalties."""
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
    """How a sequence's trained tokens came to be. What stands at other tokens means nothing."""

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
    sampled: dict[int, SampledCompletion] = field(default_factory=dict)  # by number, in the order of arrival


@dataclass(frozen=True, slots=True)
class _Arrival:
    at: float
    key: int
    number: int
    num_tokens: int


class SampleStore:
    """Of one policy. For the asyncio thread; `clock` tells seconds."""

    def __init__(self, settings: AtroposSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._prompts: dict[int, _Prompt] = {}
        self._arrivals: deque[_Arrival] = deque()
        self.num_tokens = 0
        self.num_recorded = 0
        """Completions since the start."""
        self.num_expired = 0
        """Of them, those that left without having been joined."""
        self.last_recorded_at: float | None = None

    @property
    def num_completions(self) -> int:
        return len(self._arrivals)

    def record(self, request: GenerationRequest, completions: Sequence[Completion]) -> None:
        """Remember what a client was given."""
        made = [one for one in completions if one.tokens]
        if not made:
            return
        self.last_recorded_at = self._clock()
        self.num_recorded += len(made)
        tokens_P = np.asarray(request.prompt_tokens, np.int32)
        key = int(prefix_hashes(tokens_P)[-1])
        prompt = self._prompts.get(key)
        if prompt is None or not np.array_equal(prompt.tokens_P, tokens_P):
            prompt = self._prompts[key] = _Prompt(tokens_P)
        for place, one in enumerate(made):
            number = self.num_recorded - len(made) + place
            prompt.sampled[number] = _sampled(one, request.sampling)
            num_tokens = len(one.tokens) + len(tokens_P)  # a shared prompt counts as often as it is used
            self._arrivals.append(_Arrival(self.last_recorded_at, key, number, num_tokens))
            self.num_tokens += num_tokens
        self.expire()

    def expire(self) -> None:
        """Forget what is too old or too much."""
        oldest = self._clock() - self._settings.ledger_seconds
        while self._arrivals and (self._arrivals[0].at < oldest or self.num_tokens > self._settings.ledger_tokens):
            arrival = self._arrivals.popleft()
            self.num_tokens -= arrival.num_tokens
            prompt = self._prompts.get(arrival.key)
            gone = None if prompt is None else prompt.sampled.pop(arrival.number, None)
            if prompt is not None and not prompt.sampled:
                del self._prompts[arrival.key]
            self.num_expired += gone is not None and gone.num_joined == 0

    def find(self, tokens_T: np.ndarray, trained_T: np.ndarray, logprobs_T: np.ndarray | None) -> SamplingRecord | None:
        """How the trained tokens of a sequence were sampled; None unless every one of them was, here, behind exactly
        the tokens before it.

        A conversation of several turns is several completions, each of which has all before it for its prompt. Of
        equal completions of one prompt the one counts whose log-probs are nearest to `logprobs_T`, then one that was
        joined less often, then the oldest.
        """
        found = [(start, one) for start, one in self._completions_in(tokens_T, logprobs_T)]
        covered_T = np.zeros(len(tokens_T), bool)
        behaviour_T, versions_T = np.zeros(len(tokens_T), np.float32), np.zeros(len(tokens_T), np.int32)
        owner_T = np.full(len(tokens_T), -1)
        for place, (start, one) in enumerate(found):
            length = _num_equal(tokens_T[start:], one.tokens_N)
            here = slice(start, start + length)
            covered_T[here], owner_T[here] = True, place
            behaviour_T[here], versions_T[here] = one.logprobs_N[:length], one.versions()[:length]
        if not covered_T[trained_T].all():
            return None
        owners = [found[place][1] for place in np.unique(owner_T[trained_T])]
        if not owners:
            return SamplingRecord(
                logprobs_T=behaviour_T, versions_T=versions_T, temperature=1.0, is_filtered=False, finish_reason="stop"
            )
        for one in owners:
            one.num_joined += 1
        temperatures = {one.temperature for one in owners}
        return SamplingRecord(
            logprobs_T=behaviour_T,
            versions_T=versions_T,
            temperature=temperatures.pop() if len(temperatures) == 1 else np.nan,
            is_filtered=any(one.is_filtered for one in owners),
            finish_reason=owners[-1].finish_reason,
        )

    def _completions_in(
        self, tokens_T: np.ndarray, logprobs_T: np.ndarray | None
    ) -> Iterator[tuple[int, SampledCompletion]]:
        """Each place behind a known prompt, from the front, and the completion that goes on there as the sequence does.

        Where they overlap, the later one has sampled the tokens: a client may cut a completion and go on from there.
        """
        keys = prefix_hashes(tokens_T)[:-1].tolist()
        for start in sorted(map(keys.index, self._prompts.keys() & set(keys))):
            prompt = self._prompts[keys[start]]
            if len(prompt.tokens_P) != start or not np.array_equal(prompt.tokens_P, tokens_T[:start]):
                continue
            rest_T = tokens_T[start:]
            told_T = None if logprobs_T is None else logprobs_T[start:]
            yield start, min(prompt.sampled.values(), key=lambda one: _distance(one, rest_T, told_T))


def prefix_hashes(tokens_T: np.ndarray) -> np.ndarray:
    """uint64 (T + 1): of the first 0, 1, ... T tokens. Sums wrap around."""
    factors_T = np.resize(HASH_FACTORS, len(tokens_T))
    products_T = (tokens_T.astype(np.uint64) + np.uint64(1)) * factors_T
    return np.concatenate([np.zeros(1, np.uint64), np.cumsum(products_T, dtype=np.uint64)])


def _distance(one: SampledCompletion, rest_T: np.ndarray, told_T: np.ndarray | None) -> tuple[int, float, int]:
    """Less is nearer: fewer equal tokens is farther than any other log-probs."""
    length = _num_equal(rest_T, one.tokens_N)
    gap = 0.0
    if told_T is not None and length:
        gap = float(np.abs(told_T[:length] - one.logprobs_N[:length]).max())
    return -length, gap, one.num_joined


def _num_equal(some_T: np.ndarray, others_N: np.ndarray) -> int:
    """How many tokens two sequences begin with in common."""
    length = min(len(some_T), len(others_N))
    differs = np.flatnonzero(some_T[:length] != others_N[:length])
    return int(differs[0]) if len(differs) else length


def _sampled(completion: Completion, sampling: SamplingParams) -> SampledCompletion:
    filters = (sampling.top_p, sampling.top_k, sampling.min_p)
    return SampledCompletion(
        tokens_N=np.asarray(completion.tokens, np.int32),
        logprobs_N=np.asarray(completion.logprobs, np.float32),
        spans=completion.weight_versions,
        temperature=sampling.temperature,
        is_filtered=sampling.has_logits_processors or filters != (1.0, 0, 0.0),
        finish_reason=completion.finish_reason,
    )
