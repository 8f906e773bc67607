"""Settings of the model: what to load and how its adapters look."""

from typing import Annotated, Literal

from pydantic import Field

from parallm.settings import settings

Rank = Annotated[int, Field(ge=1, le=512)]
LayerRange = Annotated[str, Field(pattern=r"^(all|\d+-\d+)$")]


@settings
class LoraSettings:
    """A key that is null is as `model.adapter` has it, and in a new adapter as its docstring says."""

    rank: Rank | None = None
    """null: 16."""
    ranks: dict[str, Rank] = Field(default_factory=dict)
    """Another rank for the layers whose path ends with a name, e.g. {q_proj: 8}; the longest name that fits counts."""
    alpha: float | None = Field(default=None, gt=0)
    """The adapter's product is scaled by alpha / rank; null: 32."""
    rslora: bool | None = None
    """Scale by alpha / sqrt(rank) instead, so that a higher rank does not learn more slowly; null: false."""
    dora: bool | None = None
    """Train the length of each output's weights apart from their direction; null: false."""
    dropout: float | None = Field(default=None, ge=0, lt=1)
    """null: 0. Also of a given adapter, which is trained on with it."""
    targets: str | tuple[str, ...] | None = None
    """`all-linear` (all but embedding, head, routers and experts), or names of linear layers, e.g. [q_proj, v_proj];
    null: all-linear."""
    layers: int | tuple[int, ...] | LayerRange | None = None
    """Layers that have targets: `all`, a number of last ones, a list, or a range such as 8-15; null: all."""


@settings
class ModelSettings:
    path: str = "nano"
    """`nano` (the model inside the package), a local Hugging Face folder, or a hub id."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: float32 on a CPU, as stored elsewhere."""
    quantized: Literal["auto", "packed", "unpacked"] = "auto"
    """How the weights of a quantized base are kept: as they are stored, or written out in `dtype`. `auto`: packed on a
    GPU; on a CPU, whose products need them so, unpacked where that takes at most half of the free memory."""
    adapter: str | None = None
    """Folder of a LoRA adapter (mlx-lm or PEFT format) to start from."""
    lora: LoraSettings = LoraSettings()
