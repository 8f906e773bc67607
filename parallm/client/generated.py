"""A completion as `/generate` answers it, and the way back to `/v1/training/update`."""

from dataclasses import dataclass
from typing import Any

from parallm.types import FinishReason, WeightSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    request_id: str
    policy_version: int | None
    """As it was sent; without, the version that has sampled."""
    step_id: int | str | None
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    """Of the completion's tokens, after temperature."""
    finish_reason: FinishReason
    weight_versions: tuple[WeightSpan, ...]
    """Which tokens came from which version."""
    model: str
    """The exact version."""
    current_policy_version: int | None
    """That has sampled the last token."""
    batch_size: int
    latency_ms: float
    temperature: float
    """That it was asked for with."""

    def rewarded(self, reward: float, *, group: str | int | None = None) -> dict[str, Any]:
        """A trajectory for `train_on`. Those of one `group` are compared, without it those of one prompt."""
        spans = [{"version": str(one.version), "start": one.start, "end": one.end} for one in self.weight_versions]
        return {
            "prompt_ids": list(self.prompt_ids),
            "completion_ids": list(self.completion_ids),
            "text": self.text,
            "logprobs": list(self.logprobs),
            "weight_versions": spans,
            "temperature": self.temperature,
            "finish_reason": self.finish_reason,
            "reward": reward,
            "group": group,
        }
