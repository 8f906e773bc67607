"""A completion as `/generate` answers it, and the way back to `/v1/training/update`."""

from dataclasses import dataclass
from typing import Any

from parallm.types import FinishReason, WeightSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    request_id: str
    policy_version: int | None
    """The version that the request named; without one, the version that sampled the last token."""
    step_id: int | str | None
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    """Log-probs of `completion_ids`, after temperature."""
    finish_reason: FinishReason
    weight_versions: tuple[WeightSpan, ...]
    """Ranges of `completion_ids`, each with the version that sampled it."""
    model: str
    """Name with the exact version, such as `policy@12`."""
    current_policy_version: int | None
    """Version that sampled the last token."""
    batch_size: int
    latency_ms: float
    temperature: float
    """Temperature of the request."""

    def rewarded(self, reward: float, *, group: str | int | None = None) -> dict[str, Any]:
        """Return a trajectory for `train_on`. It is compared with others of its `group`, or else of its prompt."""
        spans = [{"version": str(span.version), "start": span.start, "end": span.end} for span in self.weight_versions]
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
