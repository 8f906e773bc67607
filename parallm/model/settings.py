"""Settings of the model: what to load and how its adapters look."""

from typing import Annotated, Literal

from pydantic import Field

from parallm.settings import settings

Rank = Annotated[int, Field(ge=1, le=512)]
LayerRange = Annotated[str, Field(pattern=r"^(all|\d+-\d+)$")]


@settings
class LoraSettings:
    rank: Rank = 16
    """Rank of the adapter's product; more can learn more and costs more memory."""
    ranks: dict[str, Rank] = Field(default_factory=dict)
    """Another rank for the layers whose path ends with a name, e.g. {q_proj: 8}; the longest name that fits counts."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapter's product is scaled by alpha / rank."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead, so that a higher rank does not learn more slowly."""
    dora: bool = False
    """Train the length of each output's weights apart from their direction."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the inputs of an adapter that each update drops."""
    targets: str | tuple[str, ...] = "all-linear"
    """`all-linear` (all but embedding, head, routers and experts), or names of linear layers, e.g. [q_proj, v_proj]."""
    layers: int | tuple[int, ...] | LayerRange = "all"
    """Which layers of the model have targets: `all`, a number (the last so many), a list, or a range such as 8-15."""


@settings
class BaseSettings:
    """A base, and an adapter of it."""

    path: str = "nano"
    """`nano` (the model inside the package), a local Hugging Face folder, or a hub id."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights and of what is computed with them. `auto`: float32 on a CPU, as stored elsewhere."""
    adapter: str | None = None
    """LoRA adapter: a run (its best version by evaluation, else the newest), RUN@VERSION, RUN@newest, a checkpoint, or
    the folder of an adapter in mlx-lm's or PEFT's format."""


@settings
class ComputedBaseSettings(BaseSettings):
    """A base that computes here."""

    quantized: Literal["auto", "packed", "unpacked"] = "auto"
    """How the weights of a quantized base are kept: as they are stored, or written out in `dtype`. `auto`: packed on a
    GPU; on a CPU, whose products need them so, unpacked where that takes at most half of the free memory."""


@settings
class ModelSettings(ComputedBaseSettings):
    """A base and the form of its adapters."""

    lora: LoraSettings = LoraSettings()
    """Form of a new adapter."""
