"""Checks of a completion from another process: it is whole, of the version that was asked for, and likely.

A server names version and digest of the weights of each token, which proves that it has got the right ones. Log-probs,
which this process computes anew for the first tokens of each version, show that it computes with them.
"""

import itertools
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from parallm.server.control.replica_schemas import SampledCompletion
from parallm.types import Completion, GenerationRequest, SamplingParams

PROOF_TOKENS = 32
"""Tokens of a version that are computed anew."""
MAX_MEAN = 5e-2
"""Mean difference of log-probs beyond which a server computes something else; the guard ends training there, too."""
CLOSER = 4.0
"""A version whose log-probs are closer by this factor is the one that has sampled; by more where tokens are few."""
MIN_TOKENS = 4
"""Fewer tokens say nothing: noise may lie on another version's side."""
MIN_MEAN = 1e-6
"""Mean difference below which the factor says nothing: two orders of summation differ by as much."""

GenerateAll = Callable[[Sequence[GenerationRequest]], Awaitable[list[list[Completion]]]]


def fault_of(
    sampled: SampledCompletion, request: GenerationRequest, digests: Mapping[int, str], vocabulary_size: int
) -> str:
    """Return what is wrong with a completion; empty if nothing is. `digests`: of the versions that may have sampled."""
    tokens, spans = sampled.tokens, sampled.weight_versions
    if not 0 <= sampled.index < request.n or len(tokens) > request.sampling.max_tokens:
        return f"completion {sampled.index} with {len(tokens)} tokens was not asked for"
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary_size:
        return f"token ids from {min(tokens)} to {max(tokens)} are not all below {vocabulary_size}"
    if len(sampled.logprobs) != len(tokens) or any(map(math.isnan, sampled.logprobs)):
        return f"{len(tokens)} tokens have {len(sampled.logprobs)} log-probs, or some that are no numbers"
    bounds = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != bounds[:-1] or bounds[-1] != len(tokens) or bounds != sorted(bounds):
        return f"the versions of {len(tokens)} tokens are given for {[(span.start, span.end) for span in spans]}"
    for span in spans:
        if span.version not in digests:
            return f"version {span.version} has sampled, and {' or '.join(map(str, sorted(digests)))} was asked for"
        if span.digest != digests[span.version]:
            return (
                f"version {span.version} has the digest {span.digest[:12] or 'of the base'} there and "
                f"{digests[span.version][:12] or 'that of the base'} here"
            )
    return ""


@dataclass(slots=True)
class Parity:
    """Differences between the log-probs of a server and this process's, over tokens that were computed anew."""

    num_tokens: int = 0
    sum_abs: float = 0.0
    sum_k3: float = 0.0
    max_abs: float = 0.0

    def add(self, differences_T: np.ndarray) -> None:
        """`differences_T`: own log-probs minus the server's."""
        if differences_T.size:
            self.num_tokens += differences_T.size
            self.sum_abs += float(np.abs(differences_T).sum())
            self.sum_k3 += float((np.expm1(differences_T) - differences_T).sum())
            self.max_abs = max(self.max_abs, float(np.abs(differences_T).max()))

    @property
    def mean_abs(self) -> float:
        return self.sum_abs / max(1, self.num_tokens)

    @property
    def k3(self) -> float:
        """Mean over the tokens of the k3 estimate of the KL, http://joschu.net/blog/kl-approx.html."""
        return self.sum_k3 / max(1, self.num_tokens)


class Rescorer:
    """Computes log-probs of sampled tokens with the trainer's own model, as those of a prompt."""

    def __init__(self, generate_all: GenerateAll, policy: str) -> None:
        self._generate_all = generate_all
        self._policy = policy
        self._numbers = itertools.count()

    async def differences(
        self, request: GenerationRequest, sampled: SampledCompletion, models: Sequence[str]
    ) -> list[np.ndarray]:
        """Return own log-probs minus the server's, (T,) float64, for each of `models`. Raises as the engine."""
        start = len(request.prompt_tokens)
        requests = [
            GenerationRequest(
                request_id=f"check-{self._policy}-{next(self._numbers)}",
                prompt_tokens=(*request.prompt_tokens, *sampled.tokens),
                sampling=SamplingParams(max_tokens=0, temperature=request.sampling.temperature, prompt_logprobs=0),
                model=model,
                traffic="rollout",
                priority=-1,  # the server's other completions wait for it
                is_continued=False,
            )
            for model in models
        ]
        theirs_T = np.asarray(sampled.logprobs, np.float64)
        return [_logprobs(completion)[start:] - theirs_T for (completion,) in await self._generate_all(requests)]


def _logprobs(completion: Completion) -> np.ndarray:
    assert completion.prompt_logprobs is not None, "the request asks for them"
    return np.array([0.0 if entry is None else entry.logprob for entry in completion.prompt_logprobs])


def disproof(parity: Parity, others: Mapping[str, Parity], model: str) -> str:
    """Return why `model` cannot have sampled what `parity` compares; empty if it can. `others`: under other models."""
    num_tokens = parity.num_tokens
    if num_tokens < MIN_TOKENS:
        return ""
    closest = min(others, key=lambda other: others[other].mean_abs, default=None)
    factor = CLOSER * (1 + PROOF_TOKENS / num_tokens)
    if closest is not None and parity.mean_abs > max(MIN_MEAN, factor * others[closest].mean_abs):
        return (
            f"its log-probs are those of {closest}, not of {model}: they differ by {others[closest].mean_abs:.2g} and "
            f"{parity.mean_abs:.2g} on average"
        )
    if num_tokens >= PROOF_TOKENS and parity.mean_abs > MAX_MEAN:
        return (
            f"its log-probs of {model} differ from this process's by {parity.mean_abs:.2g} on average, above "
            f"{MAX_MEAN:g}; start it with the trainer's model.dtype"
        )
    return ""
