"""A clock that stands still until a test moves it, and completions by numbers."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from parallm.rollout.live.source import LiveSource
from parallm.rollout.settings import RolloutSettings
from parallm.types import Completion, GenerationRequest, SamplingParams, WeightSpan


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it never came true"
        await asyncio.sleep(0.005)


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trajectories.jsonl"


def settings_of(**live: Any) -> RolloutSettings:
    """Two groups of two a step."""
    values = {"source": "live", "problems_per_step": 2, "group_size": 2, "score_seconds": 5.0, "live": live}
    return TypeAdapter(RolloutSettings).validate_python(values)


@pytest.fixture
def make(file: Path, clock: Clock) -> Callable[..., LiveSource]:
    """Traffic whose file is read and written; `make(group_by="none")` sets keys of `rollout.live`."""
    return lambda **live: LiveSource(settings_of(**live), file, clock)


@pytest.fixture
def source(make: Callable[..., LiveSource]) -> LiveSource:
    return make()


def request_of(prompt: int = 7, n: int = 1, name: str = "r", **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"{name}#0", prompt_tokens=(prompt, 8), sampling=SamplingParams(max_tokens=4, **sampling), n=n
    )


def completion_of(version: int = 0, text: str = "ab", **changes: Any) -> Completion:
    values: dict[str, Any] = {
        "request_id": "r#0",
        "index": 0,
        "tokens": (3, 4),
        "logprobs": (-0.5, -0.25),
        "top_logprobs": ((), ()),
        "text": text,
        "finish_reason": "stop",
        "weight_versions": (WeightSpan(version=version, start=0, end=2),),
    }
    return Completion(**(values | changes))


@pytest.fixture
def record() -> Callable[..., None]:
    """Records a completion under an id: `record(source, "a", prompt=7, version=0, reward=1.0)`."""

    def one(
        source: LiveSource,
        name: str,
        *,
        prompt: int = 7,
        version: int = 0,
        reward: float | None = None,
        n: int = 1,
        request: str = "r",
        scoring_function: str | None = None,
        metadata: dict[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        asked = request_of(prompt, n, request)
        source.record(name, asked, completion_of(version, **changes), scoring_function, metadata or {})
        if reward is not None:
            source.reward(name, reward)

    return one
