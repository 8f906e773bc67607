"""An API without a network, groups of small numbers, and completions that were given to clients."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from parallm.integrations.atropos.trainer_client import Registration, TrainerClient, TrajectoryApi
from parallm.rollout.settings import AtroposSettings
from parallm.types import Completion, GenerationRequest, SamplingParams, WeightSpan
from tests.run_api import RunApi

REGISTRATION = Registration(
    batch_size=4, max_token_len=64, checkpoint_dir="", save_checkpoint_interval=1, starting_step=0, num_steps=9
)


@pytest.fixture
def run_api() -> RunApi:
    return RunApi()


@pytest.fixture
def make_client(run_api: RunApi) -> Callable[..., TrainerClient]:
    """A trainer of the API: `make_client(batch_size=8, may_reset=True)`."""

    def make(
        *, batch_size: int = 4, may_reset: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> TrainerClient:
        api = TrajectoryApi(atropos_settings(), httpx.ASGITransport(run_api.app))
        values = {"batch_size": batch_size, "max_token_len": 64, "starting_step": 0, "num_steps": 9}
        registration = Registration(**values, checkpoint_dir="", save_checkpoint_interval=1)  # type: ignore[arg-type]
        return TrainerClient(api, lambda: registration, may_reset=may_reset, clock=clock)

    return make


def atropos_settings(**values: Any) -> AtroposSettings:
    return TypeAdapter(AtroposSettings).validate_python(values)


def group_of(*sequences: tuple[Sequence[int], Sequence[int]], **fields: Any) -> dict[str, Any]:
    """Sequences of a prompt and a completion; scores are 0, 1, ..."""
    return {
        "tokens": [[*prompt, *completion] for prompt, completion in sequences],
        "masks": [[-100] * len(prompt) + list(completion) for prompt, completion in sequences],
        "scores": [float(place) for place in range(len(sequences))],
        **fields,
    }


def numbered(number: int) -> dict[str, Any]:
    """A pair of sequences that differs from others in its first token."""
    return group_of(((number, 1), (2, 3)), ((number, 1), (4, 5)))


def request_of(prompt: Sequence[int], **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id="r", prompt_tokens=tuple(prompt), sampling=SamplingParams(max_tokens=8, **sampling)
    )


def completion_of(tokens: Sequence[int], version: int = 1, logprobs: Sequence[float] | None = None) -> Completion:
    return Completion(
        request_id="r",
        index=0,
        tokens=tuple(tokens),
        logprobs=tuple(logprobs or [-0.5] * len(tokens)),
        top_logprobs=((),) * len(tokens),
        text="",
        finish_reason="stop",
        weight_versions=(WeightSpan(version=version, start=0, end=len(tokens)),),
    )
