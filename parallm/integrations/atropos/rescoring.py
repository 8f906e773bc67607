"""Log-probs of tokens that nobody here has sampled, under the policy of now: it is taken for the one that did."""

import itertools
from collections.abc import Sequence

import numpy as np

from parallm.integrations.atropos.sample_store import SamplingRecord
from parallm.integrations.atropos.scored_group import ScoredSequence
from parallm.rollout.runner import GenerateAll
from parallm.types import Completion, GenerationRequest, SamplingParams

USUAL_TEMPERATURE = 1.0
"""Of environments that name none, as in atroposlib's example trainer."""


class Rescorer:
    """Asks the engine for log-probs of prompts, as rollout traffic: the very numbers that the learner computes."""

    def __init__(self, generate_all: GenerateAll, model: str) -> None:
        self._generate_all = generate_all
        self._model = model
        self._count = itertools.count()

    async def score(self, sequences: Sequence[ScoredSequence], version: int) -> list[SamplingRecord]:
        """`version` is the one that answers."""
        rows = await self._generate_all([self._request(one) for one in sequences])
        pairs = zip(sequences, rows, strict=True)
        return [_behaviour(one, completions[0], version) for one, completions in pairs]

    def _request(self, sequence: ScoredSequence) -> GenerationRequest:
        return GenerationRequest(
            request_id=f"rescore-{self._model}-{next(self._count)}",
            prompt_tokens=tuple(sequence.tokens_T.tolist()),
            sampling=SamplingParams(max_tokens=0, temperature=temperature_of(sequence), prompt_logprobs=0),
            model=self._model,
            traffic="rollout",
            is_continued=False,
        )


def temperature_of(sequence: ScoredSequence) -> float:
    """What the environment says; 0 means 1, as in atroposlib's example trainer."""
    return sequence.temperature or USUAL_TEMPERATURE


def _behaviour(sequence: ScoredSequence, completion: Completion, version: int) -> SamplingRecord:
    assert completion.prompt_logprobs is not None, "they were asked for"
    logprobs_T = [0.0 if one is None else one.logprob for one in completion.prompt_logprobs]
    return SamplingRecord(
        logprobs_T=np.asarray(logprobs_T, np.float32),
        versions_T=np.full(len(sequence.tokens_T), version, np.int32),
        temperature=temperature_of(sequence),
        is_filtered=False,
        finish_reason="stop",
    )
