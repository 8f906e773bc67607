"""Settings of the model: what to load and how its adapters look."""

from typing import Literal

from pydantic import Field

from parallm.settings import settings


@settings
class LoraSettings:
    rank: int = Field(default=16, ge=1, le=512)
    alpha: float = Field(default=32.0, gt=0)
    """The adapter's product is scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: str | tuple[str, ...] = "all-linear"
    """`all-linear`, or names of linear layers, e.g. [q_proj, v_proj]."""


@settings
class ModelSettings:
    path: str = "nano"
    """`nano` (the model inside the package), a local Hugging Face folder, or a hub id."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: float32 on a CPU, as stored elsewhere."""
    adapter: str | None = None
    """Folder of a LoRA adapter (mlx-lm or PEFT format) to start from."""
    lora: LoraSettings = LoraSettings()
