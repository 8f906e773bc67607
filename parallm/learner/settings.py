"""Settings of the learner. The defaults are DAPO's loss on strictly on-policy batches."""

from typing import Literal

from pydantic import Field

from parallm.settings import settings


@settings
class LearnerSettings:
    preset: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    """Advantage, clipping and aggregation by their published names; see learner/objective.py."""
    learning_rate: float = Field(default=5e-5, ge=0)
    lora_plus_ratio: float = Field(default=1.0, gt=0)
    """LoRA+: the learning rate of LoRA's B over that of everything else; its paper suggests 16."""
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = Field(default=5, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_gradient_norm: float = Field(default=1.0, gt=0)
    micro_batch_tokens: int = Field(default=1024, ge=16)
    """Tokens (padding included) of one forward and backward pass: the longest that decoding ever waits."""
    head_chunk_bytes: int = Field(default=64 << 20, ge=1 << 16)
    """Bytes of float32 logits that exist at the same time."""
    engine_share: float = Field(default=0.5, ge=0, le=1)
    """Share of device seconds for the engine while serving traffic is live and an update is under way."""
